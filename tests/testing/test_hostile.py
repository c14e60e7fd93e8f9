"""Rules that misbehave: ``check`` ends in time, with one report, and leaves no process behind."""

import os
import time
from pathlib import Path

import pytest

from cactus_theory.cli import main
from tests.amounts import thorough
from tests.testing.hostile import BESIDE, HOSTILE

LAWS = "answers,acceptance_is_a_probability"
# a rule that answers otherwise every time is caught where it is asked for the same twice
UNSTEADY = ("random_answers", "counts_its_calls")
# seconds for any of them on a busy machine; a rule that swallows its alarm is waited for twice
MOST = 600.0
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


@thorough
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are counted in /proc")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_rule_ends_in_one_report(name: str, tmp_path, monkeypatch, capfd) -> None:
    (code, codes), mark = HOSTILE[name], f"{name}-{os.getpid()}-{time.monotonic_ns()}"
    for file, text in (BESIDE if name == "shadows" else {}).items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    (tmp_path / "mine.py").write_text(code.replace("MARK", mark), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(MARK, mark)
    start = time.monotonic()
    laws = f"{LAWS},batch_equals_loop" if name in UNSTEADY else LAWS
    options = ("--timeout", "5", "--examples", "20", "--laws", laws)
    status = main(["check", "mine.py:rule", *options])
    out, err = capfd.readouterr()
    assert status in codes, out + err
    assert time.monotonic() - start < MOST
    assert "Traceback (most recent" not in out + err
    assert out.count("worst margin") == (status != 2)
    assert not left_behind(mark)


def test_there_are_enough_of_them() -> None:
    assert len(HOSTILE) >= 40
