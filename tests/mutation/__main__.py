"""Make one mistake at a time in a copy of the package and see whether the core tests notice.

``python -m tests.mutation [--only TEXT]``: two copies, two processes, tests marked ``core``,
stopping at the first failure. The exit code is 1 if a mistake survives that is not explained
in ``mutations.py``, or if one no longer applies because the code has changed.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.mutation.core import CORE
from tests.mutation.mutations import EXPLAINED, MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("cactus_theory", "tests", "solvers", "simulations", "pyproject.toml")
PROCESSES = 2
# a mistake that makes the tests hang counts as noticed
MOST_SECONDS = 180


def copy_tree(home: Path) -> None:
    """Copy what the core tests need; ignore what was built."""
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, home / name, ignore=ignore)
        else:
            shutil.copy2(source, home / name)


def run_tests(home: Path) -> tuple[bool, str]:
    """Return whether the core tests of a copy pass, and the line that says what failed."""
    files = sorted({entry.split("::")[0] for entry in CORE})
    options = ["-q", "-x", "-m", "core", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": str(home),
    }
    try:
        done = subprocess.run(
            command, cwd=home, env=environment, capture_output=True, text=True, timeout=MOST_SECONDS
        )
    except subprocess.TimeoutExpired:
        return False, f"no end within {MOST_SECONDS} s"
    said = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    last = said[0] if said else (done.stdout.strip().splitlines() or ["no output"])[-1]
    return done.returncode == 0, last


def applies(mutation: Mutation) -> bool:
    """Return whether the code still reads as the mutation expects."""
    text = (ROOT / "cactus_theory" / mutation.file).read_text(encoding="utf-8")
    return mutation.old in text


def try_one(mutation: Mutation, homes: "SimpleQueue[Path]") -> tuple[bool, str, float]:
    """Return whether the mistake survived, what noticed it, and the seconds it took."""
    home = homes.get()
    path = home / "cactus_theory" / mutation.file
    original = path.read_text(encoding="utf-8")
    start = time.monotonic()
    try:
        path.write_text(original.replace(mutation.old, mutation.new), encoding="utf-8")
        survived, said = run_tests(home)
    finally:
        path.write_text(original, encoding="utf-8")
        homes.put(home)
    return survived, said, time.monotonic() - start


def main() -> int:
    """Run; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--only", default="", help="mutations whose file or text contains this")
    only = parser.parse_args().only
    chosen = [m for m in MUTATIONS if only in m.file or only in m.new]
    stale = [m for m in chosen if not applies(m)]
    begin = time.monotonic()
    survivors: list[Mutation] = []
    with tempfile.TemporaryDirectory() as folder:
        homes: SimpleQueue[Path] = SimpleQueue()
        for number in range(PROCESSES):
            home = Path(folder) / str(number)
            home.mkdir()
            copy_tree(home)
            homes.put(home)
        start = time.monotonic()
        first = homes.get()
        passes, said = run_tests(first)
        homes.put(first)
        print(f"without a mistake: {said} ({time.monotonic() - start:.0f} s)", flush=True)
        if not passes:
            return 1
        with ThreadPoolExecutor(PROCESSES) as pool:
            runs = [(m, pool.submit(try_one, m, homes)) for m in chosen if m not in stale]
            for mutation, run in runs:
                survived, said, seconds = run.result()
                word = "SURVIVED" if survived else "noticed "
                print(f"{word} {seconds:5.0f} s  {mutation.file}: {mutation.new.strip()}")
                print(f"                  {said[:150]}", flush=True)
                survivors += [mutation] if survived else []
    for mutation in stale:
        print(f"no longer applies: {mutation.file}: {mutation.old}")
    unexplained = [m for m in survivors if m.new not in EXPLAINED]
    for mutation in survivors:
        why = EXPLAINED.get(mutation.new, "NOT EXPLAINED")
        print(f"survivor: {mutation.file}: {mutation.new}: {why}")
    minutes = (time.monotonic() - begin) / 60
    count = len(chosen) - len(stale)
    print(f"{count} mistakes, {count - len(survivors)} noticed, {minutes:.1f} minutes")
    return 1 if stale or unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
