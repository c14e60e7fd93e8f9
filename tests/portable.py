"""Run the numerical tests under other code paths of torch, numpy and BLAS, in random order.

``python -m tests.portable [PATH …] [--seed N]``: one path after another, whatever the one before
said; a table at the end. The exit code is 1 if a test failed under any path.
"""

import argparse
import os
import re
import subprocess
import sys
import time

# what computes closed forms, decisions and laws
NUMERICAL = (
    "tests/optimum",
    "tests/verify",
    "tests/policies",
    "tests/solvers",
    "tests/testing",
    "tests/kits",
    "tests/traces",
    "tests/kernels",
    "tests/decoding/test_whole_texts.py",
    "tests/simulations/markov",
    "tests/test_divergences.py",
    "tests/test_emitted.py",
    "tests/test_law_theorems.py",
)
OLD_NUMPY = {"NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR"}
OLD_BLAS = {"OPENBLAS_CORETYPE": "Nehalem", "MKL_CBWR": "COMPATIBLE"}
PATHS = {
    "default": {},
    "torch-default": {"ATEN_CPU_CAPABILITY": "default"},
    "torch-avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "numpy-baseline": OLD_NUMPY,
    "blas-oldest": OLD_BLAS,
    "all-oldest": {"ATEN_CPU_CAPABILITY": "default", **OLD_NUMPY, **OLD_BLAS},
}


def run(path: str, seed: int) -> tuple[int, int, float, bool]:
    """Return how many passed and failed under a path, the seconds, and whether all is green."""
    # numpy warns where the machine lacks a feature that is disabled
    environment = {**os.environ, **PATHS[path], "PYTHONWARNINGS": "ignore::ImportWarning"}
    environment["CACTUS_THEORY_ORDER"] = str(seed)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *NUMERICAL]
    command += ["-n", "auto", "--maxprocesses", "4", "--dist", "worksteal"]
    start = time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    seconds = time.monotonic() - start
    lines = done.stdout.splitlines() or done.stderr.splitlines() or ["no output"]
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            print(f"{path}: {line}", flush=True)
    count = {what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|error)", lines[-1])}
    return count.get("passed", 0), count.get("failed", 0), seconds, done.returncode == 0


def main() -> int:
    """Run; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.portable", description=__doc__)
    parser.add_argument("paths", nargs="*", help=f"some of {', '.join(PATHS)}; all if none")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the tests")
    options = parser.parse_args()
    for path in options.paths:
        if path not in PATHS:
            parser.error(f"paths: must be among {', '.join(PATHS)}; got {path}")
    print(f"order of the tests: seed {options.seed}", flush=True)
    green = True
    print(f"{'path':16}{'passed':>8}{'failed':>8}{'seconds':>9}", flush=True)
    for path in options.paths or PATHS:
        passed, failed, seconds, fine = run(path, options.seed)
        said = "" if fine else "  RED"
        print(f"{path:16}{passed:8}{failed:8}{seconds:9.0f}{said}", flush=True)
        green = green and fine
    return 0 if green else 1


if __name__ == "__main__":
    sys.exit(main())
