"""The module that starts vLLM's server on a CPU starts a program by its name or by its path."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STARTED = 'import os, sys; print(sys.executable); print(os.environ["PYTHONPATH"])'


def start(program, folder):
    asked = [sys.executable, "-m", "tests.vllm_engine.plugin", program, "-c", STARTED]
    own = os.environ | {"TMPDIR": str(folder)}
    return subprocess.run(asked, cwd=ROOT, env=own, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("program", [Path(sys.executable).name, sys.executable])
def test_a_program_starts_with_the_plugin_known(tmp_path, program):
    ended = start(program, tmp_path)
    executable, paths = ended.stdout.splitlines()
    assert ended.returncode == 0 and executable == sys.executable
    (known,) = (path for path in paths.split(os.pathsep) if path.startswith(str(tmp_path)))
    assert list(Path(known).glob("*.dist-info/entry_points.txt"))


def test_a_program_that_is_not_there_is_named(tmp_path):
    ended = start("no/python", tmp_path)
    assert ended.returncode == 1 and ended.stderr.startswith("no/python: must be a program beside")
