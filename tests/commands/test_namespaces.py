"""Flags are read where a command begins; an experiment keeps them. Nothing changes them."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = sorted(ROOT.glob("cactus_theory/commands/*.py"))
EXPERIMENTS = sorted([*ROOT.glob("simulations/**/*.py"), *ROOT.glob("solvers/*.py")])
READERS = ("flags.py", "inputs.py", "models.py")  # of flags that several commands share
BEGIN = ("run", "check_asked")  # the latter refuses flags, and returns nothing


@pytest.mark.parametrize("path", COMMANDS + EXPERIMENTS, ids=lambda path: path.stem)
def test_only_run_takes_the_flags_and_nothing_writes_to_them(path: Path) -> None:
    free = path.name in READERS or path in EXPERIMENTS
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name not in BEGIN and not free:
            assert "Namespace" not in ast.unparse(node.args), node.name
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            assert ast.unparse(node.value) != "args", ast.unparse(node)
