"""Make one mistake at a time in a copy of the package and see whether the core tests notice.

``python -m tests.mutation [--only TEXT …] [--processes N]``: the mistakes of ``mutations.py``, made
on the syntax tree; tests marked ``core``, those beside the changed file first, stopping at the
first failure. The exit code is 1 if a mistake survives that is not explained in the list, or if
one no longer applies because the code has changed.
"""

import argparse
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.mutation.mutations import MUTATIONS, ROOT, Mutation
from tests.mutation.run import COPIED, run_tests, warm_up

PROCESSES = 2


def copy_tree(home: Path) -> None:
    """Copy what the core tests need; ignore what was built."""
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, home / name, ignore=ignore)
        else:
            shutil.copy2(source, home / name)


def try_one(mutation: Mutation, homes: "SimpleQueue[Path]") -> tuple[bool, str, float]:
    """Return whether the mistake survived, what noticed it, and the seconds it took."""
    home = homes.get()
    path = home / "cactus_theory" / mutation.file
    original = path.read_text(encoding="utf-8")
    start = time.monotonic()
    try:
        path.write_text(mutation.mutated() or original, encoding="utf-8")
        survived, said = run_tests(home, mutation.file)
    finally:
        path.write_text(original, encoding="utf-8")
        homes.put(home)
    return survived, said, time.monotonic() - start


def try_all(chosen: list[Mutation], homes: "SimpleQueue[Path]", processes: int) -> list[Mutation]:
    """Try the mistakes, say what noticed each, and return those that nothing noticed."""
    survivors: list[Mutation] = []
    with ThreadPoolExecutor(processes) as pool:
        runs = [(mutation, pool.submit(try_one, mutation, homes)) for mutation in chosen]
        for mutation, run in runs:
            survived, said, seconds = run.result()
            print(f"{'SURVIVED' if survived else 'noticed '} {seconds:5.0f} s  {mutation}")
            print(f"                  {said[:150]}", flush=True)
            survivors += [mutation] if survived else []
    return survivors


def without_a_mistake(homes: "SimpleQueue[Path]") -> bool:
    """Return whether the core tests pass as the package is."""
    start, home = time.monotonic(), homes.get()
    passes, said = run_tests(home)
    homes.put(home)
    print(f"without a mistake: {said} ({time.monotonic() - start:.0f} s)", flush=True)
    return passes


def main() -> int:
    """Run; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument(
        "--only", nargs="*", default=[""], help="mistakes whose file, function or edit says so"
    )
    parser.add_argument("--processes", type=int, default=PROCESSES, help="copies at once")
    options = parser.parse_args()
    chosen = [m for m in MUTATIONS if any(text in str(m) for text in options.only)]
    stale = [m for m in chosen if m.mutated() is None]
    warm_up()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        homes: SimpleQueue[Path] = SimpleQueue()
        for number in range(options.processes):
            home = Path(folder) / str(number)
            home.mkdir()
            copy_tree(home)
            homes.put(home)
        if not without_a_mistake(homes):
            return 1
        tried = [m for m in chosen if m not in stale]
        survivors = try_all(tried, homes, options.processes)
    for mutation in stale:
        print(f"no longer applies: {mutation}")
    for mutation in survivors:
        print(f"survivor: {mutation}: {mutation.unseen or 'NOT EXPLAINED'}")
    minutes = (time.monotonic() - begin) / 60
    print(f"{len(tried)} mistakes, {len(tried) - len(survivors)} noticed, {minutes:.1f} minutes")
    return 1 if stale or any(not m.unseen for m in survivors) else 0


if __name__ == "__main__":
    sys.exit(main())
