"""``make gpu-check`` takes the python at hand if that has a GPU, and installs nothing then."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
# answers -c with the status given, and anything else by printing what it was asked
FAKE = """#!/bin/sh
if [ "$1" = -c ]; then echo "$2" >> asked; exit {status}; fi
echo "ran $@"
"""


def make(folder: Path, status: int, *flags: str) -> str:
    shutil.copy(ROOT / "Makefile", folder)
    for name in ("pyproject.toml", "setup.py", "constraints.txt"):
        (folder / name).touch()
    fake = folder / "fake"
    fake.write_text(FAKE.format(status=status))
    fake.chmod(0o755)
    env = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    done = subprocess.run(
        ["make", "PYTHON=./fake", *flags], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_python_with_a_gpu_runs_at_once(tmp_path):
    said = make(tmp_path, 0, "gpu-check", "ARGS=verify")
    assert said == "ran -m simulations gpu-check verify\n"
    asked = (tmp_path / "asked").read_text()
    assert "torch.cuda.is_available()" in asked and "jaxtyping" in asked


def test_otherwise_the_environment_is_made_and_used_and_other_targets_do_not_ask(tmp_path):
    said = make(tmp_path, 1, "-n", "gpu-check")
    assert "./fake -m venv .venv" in said and "pip install" in said
    assert said.splitlines()[-1].strip() == ".venv/bin/python -m simulations gpu-check"
    (tmp_path / "asked").unlink()
    make(tmp_path, 0, "-n", "lint")
    assert not (tmp_path / "asked").exists() and not (tmp_path / ".venv").exists()
