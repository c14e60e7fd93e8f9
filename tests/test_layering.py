"""Imports point one way, and importing the library stays light."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("cactus_theory", "solvers", "simulations", "paper_figures")
MAY_IMPORT = {
    "cactus_theory": set(),
    "solvers": {"cactus_theory"},
    "simulations": {"cactus_theory", "solvers"},
    "paper_figures": set(),
}
# solvers certify the closed forms, so they may not see them
SOLVERS_MAY_SEE = {
    "base",
    "divergences",
    "policies",
}
# these end by drawing their pictures; nothing they compute comes from there
EXCEPTIONS = {
    "simulations/demo.py": {"paper_figures.__main__.draw"},
    "simulations/answers.py": {"paper_figures.__main__.draw"},
}
HEAVY = tuple("cvxpy filelock hypothesis matplotlib numba scipy transformers triton".split())


def imported_modules(source: str, package: str) -> set[str]:
    """Return the dotted names a file imports; ``from a import b`` counts as a.b and a."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) + 1 - node.level]
            base = ".".join([*parts, node.module or ""] if node.level else [node.module or ""])
            found |= {f"{base.strip('.')}.{alias.name}" for alias in node.names}
    return found


def crossings(folder: str, source: str, package: str) -> set[str]:
    """Return the imports of ``source`` that point the wrong way."""
    wrong = set()
    for name in imported_modules(source, package):
        top, *rest = name.split(".")
        if top in FOLDERS and top != folder and top not in MAY_IMPORT[folder]:
            wrong.add(name)
        if folder == "solvers" and top == "cactus_theory" and not SOLVERS_MAY_SEE & set(rest[:1]):
            wrong.add(name)
    return wrong


def files():
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield pytest.param(folder, path, id=str(path.relative_to(ROOT)))


@pytest.mark.parametrize(("folder", "path"), list(files()))
def test_imports_point_one_way(folder, path):
    package = ".".join(path.relative_to(ROOT).parent.parts)
    allowed = EXCEPTIONS.get(path.relative_to(ROOT).as_posix(), set())
    assert crossings(folder, path.read_text(encoding="utf-8"), package) <= allowed


@pytest.mark.parametrize(("folder", "path"), list(files()))
def test_an_underscore_says_that_only_its_own_folder_imports_a_module(folder, path):
    package = ".".join(path.relative_to(ROOT).parent.parts)
    private = {
        name
        for name in imported_modules(path.read_text(encoding="utf-8"), package)
        if not name.startswith(f"{package}._") and name.partition(".")[0] in FOLDERS
        if any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
    }
    assert private == set()


def test_the_library_loads_no_optional_package():
    code = (
        "import sys, cactus_theory, cactus_theory.decoding, cactus_theory.kernels; "
        "cactus_theory.policy('band:price=1'); "  # vLLM starts no CPU engine once numba is loaded
        f"print(*[name for name in {HEAVY!r} if name in sys.modules], sep=',')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""


def test_the_kit_names_the_extra_that_brings_hypothesis(monkeypatch):
    for name in [own for own in sys.modules if own.startswith("cactus_theory.testing")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(ModuleNotFoundError, match="extra 'testing'"):
        importlib.import_module("cactus_theory.testing")
