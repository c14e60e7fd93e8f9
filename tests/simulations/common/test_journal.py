"""Finished decodes survive a kill, and two runs are never mixed."""

from pathlib import Path

import pytest

from simulations.common.journal import Journal


def test_another_run_is_not_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path, {"seed": 0, "room": 5}) as journal:
        journal.add("a", {"seconds": 1.5})
    with Journal(path, {"room": 5, "seed": 0}) as journal:
        assert journal.results == {"a": {"seconds": 1.5}}
    with pytest.raises(ValueError, match="another seed"):
        Journal(path, {"seed": 1, "room": 5})


def test_a_half_written_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path, {}) as journal:
        journal.add("a", {"seconds": 1.5})
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"job":"b","sec')
    with Journal(path, {}) as journal:
        assert journal.results.keys() == {"a"}
    assert path.read_bytes() == whole
