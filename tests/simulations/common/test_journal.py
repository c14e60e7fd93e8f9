"""Finished decodes survive a kill, damage is named, and two runs are never mixed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cactus_theory.base.files import FolderLock
from simulations.common.grid import Config, Grid
from simulations.common.journal import Journal

# holds the lock of a folder until its input ends
HOLDER = """
import sys, filelock
held = filelock.FileLock(sys.argv[1])
held.acquire()
print(flush=True)
sys.stdin.read()
"""


def test_another_run_is_not_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path, {"seed": 0, "room": 5}) as journal:
        journal.add("a", {"seconds": 1.5})
    with Journal(path, {"room": 5, "seed": 0}) as journal:
        assert journal.results == {"a": {"seconds": 1.5}}
    with pytest.raises(ValueError, match="another seed"):
        Journal(path, {"seed": 1, "room": 5})
    with pytest.raises(ValueError, match="another room"):
        Journal(path, {"seed": 0})
    Journal(path, {"room": 5, "seed": 0}).close()  # a refusal leaves it unlocked


def test_a_line_is_on_the_disk_when_it_is_added(tmp_path: Path, monkeypatch) -> None:
    """Read by another while the file is open, and asked of the disk with all of the line in it."""
    path, sizes, fsync = tmp_path / "journal.jsonl", list[int](), os.fsync

    def spied(handle: int) -> None:
        sizes.append(os.fstat(handle).st_size)
        fsync(handle)

    with Journal(path, {"seed": 0}) as journal:
        monkeypatch.setattr(os, "fsync", spied)
        journal.add("a", {"seconds": 1.5})
        assert path.read_bytes() == b'{"seed":0}\n{"job":"a","seconds":1.5}\n'
        assert sizes == [path.stat().st_size]


def test_a_half_written_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path, {}) as journal:
        journal.add("a", {"seconds": 1.5})
    whole = path.read_bytes()
    for half in (b'{"job":"b","sec', b"{", b"\0\0\0"):
        path.write_bytes(whole + half)
        with Journal(path, {}) as journal:
            assert journal.results.keys() == {"a"}
        assert path.read_bytes() == whole
    path.write_bytes(b'{"seed":')
    Journal(path, {"seed": 1}).close()
    assert path.read_bytes() == b'{"seed":1}\n'


@pytest.mark.parametrize(
    "damage", [b'{"job":"b","sec\n', b"\xff\xfe\n", b"[1]\n", b"{}\n", b"\n", b"[" * 9999 + b"\n"]
)
def test_a_damaged_line_is_named(tmp_path: Path, damage) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path, {"seed": 0}) as journal:
        for key in "abc":
            journal.add(key, {"tokens": ord(key)})
    lines = path.read_bytes().splitlines(keepends=True)
    torn = b"".join([*lines[:2], damage, lines[3]])
    path.write_bytes(torn)
    with pytest.raises(ValueError, match=r"journal.jsonl, line 3: damaged; delete it and its"):
        Journal(path, {"seed": 0})
    assert path.read_bytes() == torn and names(tmp_path) == {path.name, "lock"}
    path.write_bytes(b'{"seed":\n' + lines[1])
    with pytest.raises(ValueError, match=r"line 1: damaged; it holds the settings of the run"):
        Journal(path, {"seed": 0})


def names(folder: Path) -> set[str]:
    return {own.name for own in folder.iterdir()}


def test_a_second_run_is_refused_and_a_dead_one_holds_nothing(tmp_path: Path) -> None:
    words, pipe = [sys.executable, "-c", HOLDER, str(tmp_path / "lock")], subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(ValueError, match=f"{tmp_path}: another run is writing to it"):
            Journal(tmp_path / "journal.jsonl", {})
        other.kill()
    with Journal(tmp_path / "journal.jsonl", {}) as journal:
        journal.add("a", {})
        with pytest.raises(ValueError, match="another run"):  # in one process, too
            FolderLock(tmp_path)
    FolderLock(tmp_path).close()
    assert names(tmp_path) == {"journal.jsonl", "lock"}


def test_a_folder_that_cannot_be_locked_is_named(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "lock").mkdir()
    with pytest.raises(OSError, match=f"{tmp_path}: must be a folder with a file 'lock' that can"):
        FolderLock(tmp_path)
    monkeypatch.setitem(sys.modules, "filelock", None)
    with pytest.raises(ModuleNotFoundError, match=r"cactus-theory\[llm\]"):
        FolderLock(tmp_path)


@pytest.mark.parametrize("kept", ['"seconds":0', '"seconds":"1"', '"seconds":NaN', '"second":1'])
def test_a_kept_decode_without_an_amount_is_named_before_the_next(tmp_path: Path, kept) -> None:
    grid = Grid([Config("plain", 0)], prompts=2, repeats=1, metered=0)
    first = next(iter(grid.jobs))
    record = f'{{"job":"{first}","tokens":3,{kept}}}\n'
    (tmp_path / "journal.jsonl").write_text(f'{{}}\n{{"job":"other"}}\n{record}')
    with (
        Journal(tmp_path / "journal.jsonl", {}) as journal,
        pytest.raises(ValueError, match=r"journal.jsonl, line 3, column seconds: must be above 0;"),
    ):
        grid.fill(lambda _: pytest.fail("a decode"), journal)
