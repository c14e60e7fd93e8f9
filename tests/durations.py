"""Run the suite and write its 50 slowest tests, machine and day: ``make durations``."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from simulations.common.results import provenance, write_csv

OUT = Path(__file__).with_suffix(".csv")
MOST = 50
# set-ups and tests of less than this are not added up, in seconds
LEAST = 0.05
LINE = re.compile(r"^([\d.]+)s (?:call|setup|teardown) +(tests/.*)$", flags=re.M)


def main(options: list[str]) -> int:
    """Run pytest with these options; return its exit code."""
    command = [sys.executable, "-m", "pytest", "-q", "--durations=0", f"--durations-min={LEAST}"]
    done = subprocess.run([*command, *options], stdout=subprocess.PIPE, text=True)
    seconds: Counter[str] = Counter()
    for found, test in LINE.findall(done.stdout):
        seconds[test] += float(found)
    rows = [{"seconds": f"{own:.2f}", "test": test} for test, own in seconds.most_common(MOST)]
    notes = provenance("make durations") | {"suite": done.stdout.splitlines()[-1]}
    write_csv(OUT, rows, notes)
    print(f"{notes['suite']}: {OUT.name}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
