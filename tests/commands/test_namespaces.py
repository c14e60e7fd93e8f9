"""Flags are read where a command begins: nothing below takes them all, and nothing changes them."""

import ast
from pathlib import Path

import pytest

from cactus_theory import commands

FILES = sorted(Path(commands.__file__).parent.glob("*.py"))
READERS = ("flags.py", "models.py")  # of flags that several commands share


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_only_run_takes_the_flags_and_nothing_writes_to_them(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name != "run" and path.name not in READERS:
            assert "Namespace" not in ast.unparse(node.args), node.name
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            assert ast.unparse(node.value) != "args", ast.unparse(node)
