"""Run the core tests of a copy in a process of its own, forked from one that has imported torch."""

import multiprocessing
import os
import sys
from pathlib import Path

from tests.mutation.core import files

COPIED = ("cactus_theory", "tests", "solvers", "simulations", "pyproject.toml")
# a mistake that makes the tests hang counts as noticed
MOST_SECONDS = 300
# what takes seconds to import is imported once; nothing of the package may be among it
FORKS = multiprocessing.get_context("forkserver")
IMPORTED = ["torch", "transformers", "hypothesis", "scipy.stats", "cvxpy", "beartype", "pytest"]


def warm_up() -> None:
    """Say what the process that the others fork from imports, before the first of them."""
    os.environ["OMP_NUM_THREADS"] = "1"
    FORKS.set_forkserver_preload(IMPORTED)


def run_tests(home: Path, changed: str = "") -> tuple[bool, str]:
    """Return whether the core tests of a copy pass, and the line that says what failed."""
    said = home / "said.txt"
    child = FORKS.Process(target=run_pytest, args=(str(home), files(changed), str(said)))
    child.start()
    child.join(MOST_SECONDS)
    if child.is_alive():
        child.kill()
        child.join()
        return False, f"no end within {MOST_SECONDS} s"
    lines = said.read_text(encoding="utf-8").strip().splitlines() or ["no output"]
    wrong = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return child.exitcode == 0, (wrong or lines[-1:])[0]


def run_pytest(home: str, chosen: list[str], said: str) -> None:
    """Run in a process of its own, in which nothing of the package is imported from here."""
    for name in [name for name in sys.modules if name.split(".")[0] in COPIED]:
        del sys.modules[name]
    os.chdir(home)
    sys.path.insert(0, home)
    os.environ["PYTHONPATH"] = home
    sys.dont_write_bytecode = True
    output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import pytest

    options = ["-q", "-x", "-m", "core", "-p", "no:cacheprovider"]
    # plugins of what was imported before pytest started
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    code = int(pytest.main([*options, *chosen]))
    sys.stdout.flush()
    os._exit(code)
