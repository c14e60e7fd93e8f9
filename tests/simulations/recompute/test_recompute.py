"""Every committed CSV has a command that works, and one that fails stops no other."""

import argparse
import importlib
from collections import Counter
from pathlib import Path

import pytest

from simulations import recompute
from simulations.__main__ import COMMANDS, main
from simulations.common.inputs import DATA
from simulations.common.results import read_csv
from simulations.recompute import ENTRIES, Entry
from tests.amounts import THOROUGH

PLACES = {"csv": "made/t.csv", "made": "made", "root": ".", "shared": "shared"}
# tables of a CUDA machine, which no other one can make again, and of what is compiled for one
GPU = "gpu_"
# quoted from others, not made here
NOT_OURS = {"published"}
SMALL = "table overspend --points 3 --out {csv}"


def test_every_committed_table_has_one_entry() -> None:
    committed = {path.stem for path in DATA.glob("*.csv")}
    known = Counter(name for entry in ENTRIES for name in entry.names)
    assert set(known) == {name for name in committed - NOT_OURS if not name.startswith(GPU)}
    assert set(known.values()) == {1}


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_its_commands_can_be_read_and_spare_what_is_committed(entry: Entry, quick: bool) -> None:
    for words in entry.commands(quick, **PLACES):
        module = importlib.import_module(f"simulations.{COMMANDS[words[0]][0]}")
        parser = argparse.ArgumentParser()
        module.add_arguments(parser)
        given = parser.parse_args(words[1:])
        for out in filter(None, (given.out, getattr(given, "publish", None))):
            assert out.parts[0] == "made"


def test_full_settings_are_those_of_the_committed_table() -> None:
    """Each flag of the command in the provenance is one of the entry's, paths aside."""
    for entry in ENTRIES:
        (*_, words) = entry.commands(False, **PLACES)
        for name in entry.names:
            said = read_csv(DATA / f"{name}.csv")[1]["command"].split()[3:]
            known = {Path(word).name for word in words} | {"pair16", "stories16"}
            assert {Path(word).name for word in said} - known <= {"cactus:delta=1.0"}, name


def test_one_that_fails_stops_no_other(tmp_path: Path, capsys, monkeypatch) -> None:
    entries = (
        Entry("overspend=t", SMALL.replace("3", "1"), SMALL.replace("3", "1")),
        Entry("policies", SMALL, SMALL.replace("{csv}", "{made}/other.csv")),
        Entry("acceptance_kl=t", SMALL, SMALL),
        Entry("band_row", "{shared}", "{shared}"),
    )
    monkeypatch.setattr(recompute, "ENTRIES", entries)
    monkeypatch.setattr(recompute, "_run", in_this_process)
    given = ["all", "--quick", "--out", str(tmp_path), "--shared", str(tmp_path)]
    assert main(given) == 1
    rows, notes = read_csv(tmp_path / "seconds.csv")
    assert [row["state"] for row in rows] == ["failed", "failed", "done", "left out"]
    told = [row["note"] for row in rows]
    assert told[0] == "status 2: python -m simulations table: points: must be at least 2; got 1"
    assert told[1] == "policies: no such table was made"
    assert told[2] == "acceptance_kl: columns are not those of the committed table"
    assert (tmp_path / "acceptance_kl.csv").is_file() and not (tmp_path / "overspend.csv").exists()
    assert notes["command"] == "python -m simulations all --quick"
    assert "left out" in capsys.readouterr().out
    assert main([*given, "--only", "acceptance_kl", "band_row"]) == 0


def in_this_process(words, log: Path) -> int:
    import contextlib

    with log.open("a") as file, contextlib.redirect_stderr(file), contextlib.redirect_stdout(file):
        return main(list(words))


def test_the_commands_are_listed(capsys) -> None:
    assert main(["all", "--list"]) == 0
    said = capsys.readouterr().out
    for entry in ENTRIES:
        assert " ".join(entry.names) in said
    assert "python -m simulations bench theory --out OUT.csv" in said
    assert said.count("[not in a clone: ") == sum(entry.needs_shared for entry in ENTRIES) > 0
    assert main(["all", "--only", "nothing"]) == 2
    assert "--only: must be among acceptance_kl, band_row" in capsys.readouterr().err


@pytest.mark.skipif(not THOROUGH, reason="takes minutes; run by make test-thorough")
def test_every_quick_command_works(tmp_path: Path) -> None:
    pytest.importorskip("cvxpy")
    assert main(["all", "--quick", "--out", str(tmp_path)]) == 0
    for entry in ENTRIES:
        assert entry.needs_shared or all(
            (tmp_path / f"{name}.csv").is_file() for name in entry.names
        )
