"""Every public name says what it is by an example that runs and prints what stands there."""

import ast
import doctest
import importlib
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.decoding import Pair, load_pair
from cactus_theory.divergences import definition as divergences
from cactus_theory.policies import registry as policies
from cactus_theory.testing.properties import PROPERTIES
from cactus_theory.testing.verifiers import VERIFIER_PROPERTIES
from cactus_theory.verify import contract as verifiers
from tests.amounts import thorough

ROOT = Path(__file__).resolve().parent.parent
TOPS = ("cactus_theory", "solvers", "simulations", "paper_figures")
PACKAGES = (
    "",
    ".decoding",
    ".kernels",
    ".losses",
    ".testing",
    ".traces",
    ".tuning",
    ".verify",
)
# public names without an example of their own
WITHOUT = {
    "testing.Enumeration": "what a property of verifiers is given; shown by verifier_property",
}
REGISTRIES = (
    policies.POLICIES.known,
    divergences.DIVERGENCES.known,
    verifiers.VERIFIERS.known,
    PROPERTIES,
    VERIFIER_PROPERTIES,
)


def public() -> Iterator[tuple[str, ModuleType, Any]]:
    """Yield name, package and object of everything that is public; an alias comes once."""
    seen = set()
    for package in PACKAGES:
        module = importlib.import_module(f"cactus_theory{package}")
        for name in module.__all__:
            found = getattr(module, name)
            if id(found) not in seen:
                seen.add(id(found))
                yield f"{package}.{name}".removeprefix("."), module, found


# the most names that somebody should have to read through
OF_CT, IN_ALL = 28, 91
PUBLIC = {name: (module, found) for name, module, found in public()}


@cache
def shipped_pair() -> Pair:
    return load_pair(ROOT / "simulations/pair/target", ROOT / "simulations/pair/draft")


def names_for(module: ModuleType, text: str) -> dict[str, Any]:
    """Return what an example may name without importing it; the page of the docs says so."""
    given: dict[str, Any] = {"ct": ct, "np": np, "torch": torch, "__name__": "__main__"}
    if module is not ct:
        given |= {name: getattr(module, name) for name in module.__all__}
    return given | ({"pair": shipped_pair()} if "pair." in text else {})


def complaints(name: str, text: str, given: dict[str, Any]) -> str:
    """Run the examples of a docstring; return what differs from what it says."""
    found: list[str] = []
    test = doctest.DocTestParser().get_doctest(text, given, name, None, None)
    doctest.DocTestRunner(verbose=False).run(test, out=found.append)
    return "".join(found)


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in a folder of its own that has ``simulations``, and forget what is registered."""
    (tmp_path / "simulations").symlink_to(ROOT / "simulations")
    monkeypatch.chdir(tmp_path)
    for registry in REGISTRIES:
        patch.dict(registry).start()
    yield
    patch.stopall()


def test_public_names_are_few_and_each_is_listed_once() -> None:
    lists: dict[str, list[str]] = {}
    for path in sorted(path for top in TOPS for path in (ROOT / top).rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                lists[path.relative_to(ROOT).as_posix()] = ast.literal_eval(node.value)
    names = [name for own in lists.values() for name in own]
    assert len(lists["cactus_theory/__init__.py"]) <= OF_CT and len(names) <= IN_ALL
    assert sorted(names) == sorted(set(names))


def test_the_first_line_of_a_docstring_names_the_thing() -> None:
    vague = ("What ", "That ", "One ", "Whoever", "The same", "Return what ")
    described = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        f"{path.relative_to(ROOT)}: {text.splitlines()[0]}"
        for path in sorted(path for top in TOPS for path in (ROOT / top).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, described) and (text := ast.get_docstring(node) or "").startswith(vague)
    ]
    assert found == []


def test_every_public_name_has_an_example() -> None:
    without = {name for name, (_, found) in PUBLIC.items() if ">>> " not in (found.__doc__ or "")}
    assert without == set(WITHOUT)


@pytest.mark.parametrize("name", sorted(PUBLIC.keys() - WITHOUT.keys()))
def test_an_example_prints_what_it_says(name: str, scratch: None) -> None:
    module, found = PUBLIC[name]
    text = inspect.getdoc(found) or ""
    assert complaints(name, text, names_for(module, text)) == ""


@thorough
def test_the_example_of_a_design(scratch: None) -> None:
    from solvers import design

    assert complaints("solvers.design", design.__doc__ or "", {}) == ""


def test_no_example_is_left_out() -> None:
    run = sum((found.__doc__ or "").count(">>> ") for _, found in PUBLIC.values())
    files = (ROOT / "cactus_theory").rglob("*.py")
    assert sum(path.read_text(encoding="utf-8").count(">>> ") for path in files) == run


def test_a_wrong_example_is_seen() -> None:
    assert "Expected:\n    3" in complaints("sum", ">>> 1 + 1\n3\n", {})
