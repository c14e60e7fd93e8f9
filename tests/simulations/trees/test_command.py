"""The experiment on trees: tables, break-even, paths at equal time, the columns of throughput."""

import pytest

from simulations.__main__ import main
from simulations.common.grid import configs
from simulations.common.results import read_csv
from simulations.trees import command
from tests.amounts import thorough


def test_what_a_pass_may_cost():
    """Twice the tokens pay up to the same seconds a token: a pass of 2 + (2 − 1) · 3 others."""

    class Twice:
        value, standard_error = 2.0, 0.1

        def __truediv__(self, other):
            return self

    row = command.against(Twice(), Twice(), (80.0, 50.0), (40.0, 10.0))  # type: ignore[arg-type]
    assert row["pays_below"] == 5.0 and row["times_block_pass"] == 5.0
    assert row["tokens_per_second"] == 25.0 and row["block_tokens_per_second"] == 50.0


def test_paths_of_equal_time_lie_between_those_timed():
    paths = {2: 1.0, 4: 2.0, 8: 1.5, 16: 6.0}  # that of 8 tokens was lucky
    assert command.equal_time(1.5, paths) == 3
    assert command.equal_time(4.0, paths) == 12
    assert command.equal_time(6.1, paths) is None
    assert command.equal_time(0.9, paths) is None


def test_throughput_gives_siblings_to_the_walk_alone():
    lines = configs(["plain"], ["speculative"], [4], [1], ["chain", "tree"], 2)
    assert [line.siblings for line in lines] == [0, 0, 2]
    assert lines[2].key == "speculative@tree with 2 siblings|K=4|batch=1"
    assert "siblings" not in lines[1].settings and lines[2].settings["siblings"] == 2


def test_the_walk_is_timed_beside_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(command.verify, "VOCAB", 300)
    monkeypatch.setattr(command, "WALK", (4, 4, ("speculative", "band:price=1"), 3))
    rows = command._walk(None, None, [])["trees_walk"]  # type: ignore[arg-type]
    assert len(rows) == 2 * len(command.verify.NOISES)
    for row in rows:
        assert (row["batch"], row["num_draft_tokens"], row["siblings"]) == (8, 4, 4)
        assert 0 < row["ratio_low"] <= row["ratio"] <= row["ratio_high"]


@thorough
def test_the_command_writes_its_tables(tmp_path, capsys):
    line = "trees --num-prompts 2 --max-new-tokens 12 --num-draft-tokens 4 2 --siblings 2"
    more = ["--path-lengths", "8", "--prices", "4", "0.5", "--temperature", "1"]
    parts = ["--parts", "shapes", "ideas", "--out", str(tmp_path)]
    assert main([*line.split(), *more, *parts]) == 0
    rows = read_csv(tmp_path / "trees.csv")[0]
    assert {row["policy"] for row in rows} >= {"speculative", "band:price=4", "band:price=0.5"}
    for row in rows:
        assert (row["equal_time_k"] == "") or row["siblings"] == "2"
        assert (row["ratio_to_equal_time"] == "") == (row["equal_time_k"] == "")
    assert "trees give more tokens a second" in capsys.readouterr().out
    passes = read_csv(tmp_path / "trees_passes.csv")[0]
    assert {row["nodes"] for row in passes} == {"5", "13", "3", "7", "9"}
    assert float(passes[0]["times_path"]) == pytest.approx(1)
    by_idea = {row["idea"]: row for row in read_csv(tmp_path / "trees_ideas.csv")[0]}
    known, plain = (float(by_idea[name]["ratio"]) for name in ("placed by known q", "4 a place"))
    assert known >= plain == 1
