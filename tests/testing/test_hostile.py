"""Rules that misbehave: ``check`` ends in time, with one report, and leaves no process behind."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.amounts import THOROUGH
from tests.testing.hostile import BESIDE, HOSTILE

# one of each kind that ends quickly
PLAIN = ("writes_q", "detaches_a_sleeper", "says_it_passed")
# seconds for any of them; a rule that swallows its alarm is waited for twice
MOST = 240.0 if THOROUGH else 60.0
MARK = "CACTUS_THEORY_HOSTILE"


def left_behind(mark: str) -> list[str]:
    """Return the processes that were started with the mark in their environment or arguments."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            said = (place / "environ").read_bytes() + (place / "cmdline").read_bytes()
            if mark.encode() in said and int(place.name) != os.getpid():
                found.append((place / "cmdline").read_text().replace("\0", " "))
        except (OSError, ValueError):
            continue
    return found


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are counted in /proc")
@pytest.mark.parametrize("name", list(HOSTILE) if THOROUGH else PLAIN)
def test_a_hostile_rule_ends_in_one_report(name: str, tmp_path: Path) -> None:
    (code, codes), mark = HOSTILE[name], f"{name}-{os.getpid()}-{time.monotonic_ns()}"
    for file, text in (BESIDE if name == "shadows" else {}).items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    (tmp_path / "mine.py").write_text(code.replace("MARK", mark), encoding="utf-8")
    command = [sys.executable, "-P", "-m", "cactus_theory.cli", "check", "mine.py:rule"]
    done = subprocess.run(
        [*command, "--timeout", "5", "--examples", "20", "--laws", LAWS],
        cwd=tmp_path, env=os.environ | {MARK: mark}, timeout=MOST, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode in codes, done.stdout + done.stderr
    assert "Traceback (most recent" not in done.stdout + done.stderr.replace("last printed", "")
    reports = done.stdout.count("worst margin")
    assert reports == (done.returncode != 2)
    assert not left_behind(mark)


LAWS = "answers,acceptance_is_a_probability,budget_holds,batch_equals_loop"


def test_there_are_enough_of_them() -> None:
    assert len(HOSTILE) >= 40
