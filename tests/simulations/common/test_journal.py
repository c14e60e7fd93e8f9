"""Finished decodes survive a kill, damage is named, and two runs are never mixed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cactus_theory.base import files
from cactus_theory.base.files import FolderLock
from simulations.common.journal import Journal

# holds the lock of a folder until its input ends, with nothing but the lock's own file
HOLDER = """
import importlib.util, pathlib, sys
spec = importlib.util.spec_from_file_location("lock", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
held = module.FolderLock(pathlib.Path(sys.argv[2]))
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
    Journal(path, {"room": 5, "seed": 0}).close()  # a refusal leaves it unlocked


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
def test_a_damaged_line_is_named_and_set_aside_when_asked(tmp_path: Path, capsys, damage) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path, {"seed": 0}) as journal:
        for key in "abc":
            journal.add(key, {"tokens": ord(key)})
    lines = path.read_bytes().splitlines(keepends=True)
    torn = b"".join([*lines[:2], damage, lines[3]])
    path.write_bytes(torn)
    with pytest.raises(ValueError, match=r"journal.jsonl, line 3: damaged; --set-aside-damaged"):
        Journal(path, {"seed": 0})
    assert path.read_bytes() == torn and [own.name for own in tmp_path.iterdir()] == [path.name]
    with Journal(path, {"seed": 0}, set_aside=True) as journal:
        assert journal.results == {"a": {"tokens": 97}, "c": {"tokens": 99}}
        journal.add("b", {"tokens": 98})
    assert "1 damaged lines are now in" in capsys.readouterr().err
    assert path.read_bytes() == b"".join([*lines[:2], lines[3], lines[2]])
    assert (tmp_path / "journal.jsonl.damaged").read_bytes() == damage


def test_damaged_settings_are_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"seed":\n{"job":"a"}\n')
    for set_aside in (False, True):
        with pytest.raises(ValueError, match=r"line 1: damaged, and it holds the settings"):
            Journal(path, {"seed": 0}, set_aside)
    assert not (tmp_path / "lock").exists()


def test_a_second_run_is_told_who_holds_the_folder_and_a_dead_one_holds_nothing(tmp_path) -> None:
    words = [sys.executable, "-S", "-c", HOLDER, files.__file__, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(ValueError) as found:
            Journal(tmp_path / "journal.jsonl", {})
        said = str(found.value)
        assert f"{tmp_path}: another run is writing to it (process {other.pid} on " in said
        assert " since 20" in said and "\n" not in said
        assert (tmp_path / "lock").exists()
        other.kill()
    assert (tmp_path / "lock").exists()  # what a kill leaves
    with Journal(tmp_path / "journal.jsonl", {}) as journal:
        journal.add("a", {})
        with pytest.raises(ValueError, match="another run"):  # in one process, too
            FolderLock(tmp_path)
    assert [own.name for own in tmp_path.iterdir()] == ["journal.jsonl"]


def test_a_folder_without_locks_is_said_to_be_one(tmp_path: Path, capsys, monkeypatch) -> None:
    def none(*_) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(files.fcntl, "flock", none)
    with Journal(tmp_path / "journal.jsonl", {}) as journal:
        journal.add("a", {})
    said = capsys.readouterr().err
    assert "no locks here (Operation not supported); start no other run on it" in said
    assert json.loads((tmp_path / "journal.jsonl").read_text().splitlines()[1]) == {"job": "a"}


def test_a_lock_taken_away_between_opening_and_taking_is_taken_again(tmp_path, monkeypatch) -> None:
    opened = FolderLock._opened
    times = []

    def late(self):
        file = opened(self)
        times.append(file)
        if len(times) == 1:
            self.path.unlink()  # its last holder ends just now
        return file

    monkeypatch.setattr(FolderLock, "_opened", late)
    with FolderLock(tmp_path):
        assert len(times) == 2
        with pytest.raises(ValueError, match="another run"):
            FolderLock(tmp_path)
