"""Every committed CSV has a command that works, and one that fails stops no other."""

import argparse
import contextlib
import importlib
import shlex
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from simulations import all_tables
from simulations.__main__ import COMMANDS, main
from simulations.all_tables import ENTRIES, Entry
from simulations.common.inputs import DATA
from simulations.common.results import read_csv
from tests.amounts import thorough

ROOT = Path(__file__).parents[2]
GPU = "gpu_"  # tables of a CUDA machine, or of what is compiled for one


def test_every_committed_table_has_one_entry() -> None:
    heads = {path.stem: read_csv(path)[1] for path in DATA.glob("*.csv")}
    ours = {name for name, head in heads.items() if " -m simulations" in head["command"]}
    committed = {name for name in ours if "of_commit" not in heads[name]}
    known = Counter(name for entry in ENTRIES for name in entry.names)
    assert set(known) == {name for name in committed if not name.startswith(GPU)}
    assert set(known.values()) == {1}


def test_the_commands_of_the_makefile_can_be_read() -> None:
    """No test runs ``make demo`` itself, so that a renamed flag would be seen by users alone."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.partition(" -m simulations ")[2] for line in text.splitlines()]
    commands = [shlex.split(line) for line in lines if line and "$" not in line]
    assert ["demo", "smollm", "bench"] == [words[0] for words in commands]
    for words in commands:
        parser = argparse.ArgumentParser(exit_on_error=False)
        importlib.import_module(f"simulations.{COMMANDS[words[0]][-1]}").add_arguments(parser)
        parser.parse_args(words[1:])


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.tables)
def test_its_commands_can_be_read_and_spare_what_is_committed(entry: Entry, quick: bool) -> None:
    words = entry.command(quick, Path("made"), Path("shared"))
    module = importlib.import_module(f"simulations.{COMMANDS[words[0]][-1]}")
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    given = parser.parse_args(words[1:])
    assert given.out is None or given.out.parts[0] == "made"


def in_this_process(command, stdout, **_) -> SimpleNamespace:
    with contextlib.redirect_stderr(stdout), contextlib.redirect_stdout(stdout):
        return SimpleNamespace(returncode=main(command[3:]))


def test_one_that_fails_stops_no_other(tmp_path: Path, capsys, monkeypatch) -> None:
    entries = (
        Entry("overspend", "--points 1", "--out {csv}"),
        Entry("overspend=t", "--points 3", "--out {made}/other.csv"),
        Entry("overspend acceptance_kl=overspend", "--points 3", "--out {csv}"),
        Entry("band_row", inputs="{shared}"),
        Entry("overspend", "--points 3", "--out {csv}"),
    )
    monkeypatch.setattr(all_tables, "ENTRIES", entries)
    monkeypatch.setattr(all_tables.subprocess, "run", in_this_process)
    given = ["all", "--quick", "--out", str(tmp_path), "--shared", str(tmp_path)]
    assert main(given) == 1
    told = [line.partition(" (")[0] for line in capsys.readouterr().out.splitlines()]
    assert told == [
        "overspend: failed: status 2, "
        "python -m simulations table: points: must be at least 2; got 1",
        "overspend: failed: no table overspend was made",
        "overspend acceptance_kl: failed: acceptance_kl has other columns than the committed table",
        f"band_row: left out, needs models in {tmp_path}",
        "overspend: done",
    ]
    assert {path.name for path in tmp_path.glob("*.csv")} == {"overspend.csv"}
    assert main([*given, "--only", "band_row"]) == 0


@thorough
def test_every_quick_command_works(tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("cvxpy")
    given = ["all", "--quick", "--out", str(tmp_path)]
    assert main([*given, "--only", "overspend"]) == 0  # in a process of its own, as users have it
    monkeypatch.setattr(all_tables.subprocess, "run", in_this_process)
    assert main(given) == 0
    for entry in ENTRIES:
        left_out = entry.needs_shared or all_tables.SMOLLM in entry.inputs
        made = [(tmp_path / f"{name}.csv").is_file() for name in entry.names]
        assert left_out or all(made)
