import argparse
import re
from pathlib import Path

import pytest

from simulations.common.results import (
    provenance,
    publish,
    read_csv,
    write_csv,
)

ROWS = [
    {"policy": "cactus", "kl": 0.1 + 0.2, "ratio": None},
    {"policy": "a,b", "kl": 2, "ratio": 1.5},
]


def test_csv_round_trip(tmp_path):
    path = tmp_path / "deep" / "rows.csv"
    write_csv(path, ROWS, {"command": "python -m x --y 1: 2", "date": "2026-01-01"})
    assert path.read_bytes().decode() == (  # as a text, line ends would look alike
        "# command: python -m x --y 1: 2\n# date: 2026-01-01\n"
        'policy,kl,ratio\ncactus,0.3,\n"a,b",2,1.5\n'
    )
    rows, notes = read_csv(path)
    assert rows[1] == {"policy": "a,b", "kl": "2", "ratio": "1.5"}
    assert notes == {"command": "python -m x --y 1: 2", "date": "2026-01-01"}


@pytest.mark.parametrize(
    "rows, notes, message",
    [
        ([], {}, "rows: must hold at least one"),
        ([{"a": 1}, {"b": 1}], {}, r"rows: must share the columns \['a'\]; row 1 has \['b'\]"),
        ([{"a": 1}], {"k": "two\nlines"}, "provenance: entries must be one line"),
    ],
)
def test_bad_tables_are_refused(tmp_path, rows, notes, message):
    with pytest.raises(ValueError, match=message):
        write_csv(tmp_path / "x.csv", rows, notes)
    assert not list(tmp_path.iterdir())


def test_provenance_names_kind_of_machine_but_no_place():
    found = provenance("python -m simulations overspend")
    assert list(found) == ["command", "date", "python", "torch", "numpy", "machine"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"])
    assert re.fullmatch(r"\d+-core .+, \d+ threads?", found["machine"])
    assert "/" not in found["machine"]


def test_a_table_is_published_with_its_command_wherever_it_goes(tmp_path: Path) -> None:
    def declare(parser: argparse.ArgumentParser) -> None:
        for flag in ("--points", "--out", "--work"):
            parser.add_argument(flag)

    parser = argparse.ArgumentParser()
    declare(parser)
    words = ["--points", "3", "--out", str(tmp_path / "a.csv"), "--work", "w"]
    args = parser.parse_args(words, argparse.Namespace(command="curves", declare=declare))
    publish(args, ROWS, rows="two", args="none")
    rows, notes = read_csv(args.out)
    assert len(rows) == 2 and (notes["rows"], notes["args"]) == ("two", "none")
    assert notes["command"] == "python -m simulations curves --points 3"
    publish(args, ROWS, tmp_path / "b.csv")
    assert read_csv(tmp_path / "b.csv")[0] == rows and len(list(tmp_path.iterdir())) == 2
