"""What the wheel holds: every package, pages and the programs; extras are for its code alone."""

import ast
import re
import runpy
import tomllib
from pathlib import Path
from unittest.mock import patch

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
EXTRAS = PROJECT["project"]["optional-dependencies"]
IN_THE_WHEEL = [
    path
    for folder in ("cactus_theory", "solvers")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


def required(requirements: list[str]) -> set[str]:
    """Return the names of the modules that requirements install."""
    return {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in requirements}


def asked_for(path: Path) -> list[tuple[str, str]]:
    """Return (module, extra) of every ``optional_module`` in a file."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source if "optional_module" in source else "")
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [
        tuple(str(argument.value) for argument in call.args if isinstance(argument, ast.Constant))
        for call in calls
        if ast.unparse(call.func).endswith("optional_module")
    ]  # type: ignore[return-value]


@pytest.fixture(scope="module")
def named() -> dict:
    """Return what setup.py hands to setuptools."""
    pytest.importorskip("setuptools")
    with patch("setuptools.setup") as setup:
        runpy.run_path(str(ROOT / "setup.py"))
    return setup.call_args.kwargs


def test_it_holds_every_package_and_claims_one_name(named, monkeypatch) -> None:
    folders = {path.parent.relative_to(ROOT) for path in IN_THE_WHEEL}
    homes = {
        Path(named["package_dir"].get(own, own.replace(".", "/"))) for own in named["packages"]
    }
    assert homes == folders
    assert {own.split(".")[0] for own in named["packages"]} == {"cactus_theory"}


def test_every_extra_that_an_error_names_installs_the_module() -> None:
    for path in IN_THE_WHEEL:
        for module, extra in asked_for(path):
            assert module.split(".")[0] in required(EXTRAS[extra]), (path, module, extra)


def test_what_make_installs_has_a_tested_version() -> None:
    pinned = required((ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines())
    installed = {name for own in re.findall(r"\.\[([\w,]+)\]", MAKEFILE) for name in own.split(",")}
    groups = [*(EXTRAS[name] for name in installed), *PROJECT["dependency-groups"].values()]
    lines = [*PROJECT["project"]["dependencies"], *(line for group in groups for line in group)]
    assert required(lines) <= pinned


def test_the_version_is_one_everywhere() -> None:
    version = PROJECT["project"]["version"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.*)", citation, flags=re.M) == [version]
    assert re.findall(r"^## (\S+)", changes, flags=re.M) == [version]


def test_the_notice_says_where_all_shipped_data_are_from() -> None:
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    told = set(re.findall(r"^  (\S+)  +\S", notice, flags=re.M))
    shipped = {path.name for path in (ROOT / "simulations/data").iterdir()}
    assert told == shipped - {"__pycache__"}  # of wrong_rule.py, once a test has read it
    models = {path.parent for path in (ROOT / "simulations").rglob("*.safetensors")}
    traces = {ROOT / "simulations/data" / name for name in ("trace", "smollm_trace")}
    for folder in models - traces:
        assert str(folder.relative_to(ROOT)) in notice
