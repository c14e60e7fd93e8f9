"""The command: its grid, its table, what it keeps, what it refuses."""

import json
import re
from pathlib import Path

import pytest

from cactus_theory.base import terminal
from cactus_theory.traces import replay
from simulations.__main__ import main
from simulations.common.results import read_csv
from simulations.markov import Setting, markov_pair
from simulations.markov.command import measured
from simulations.sweep.command import TRACE
from simulations.sweep.tasks import record
from tests.simulations.sweep.cluster import table

pytest.importorskip("safetensors")
MARKOV = "sweep --in-process --kind markov --policies speculative band:price --knobs 0.5 2".split()
MARKOV += "--length 3 --num-draft-tokens 2 --seeds 0 1 --distance 0.5".split()
BROKEN = """
from dataclasses import dataclass
import cactus_theory as ct

@dataclass(frozen=True)
class Broken(ct.PerProposal):
    delta: float = 0.5

    def raised(self, q_n):
        raise ArithmeticError("no\\nnumber")
"""


def test_replays_are_those_of_the_library(tmp_path: Path) -> None:
    policies = ["--policies", "typical", "band:price=2.0", "--num-draft-tokens", "2", "1"]
    assert main(["sweep", "--in-process", *policies, "--out", str(tmp_path)]) == 0
    rows, notes = read_csv(tmp_path / "sweep.csv")
    names = ("policy", "verifier", "num_draft_tokens")
    expected = [("typical", "chain"), ("band:price=2.0", "chain"), ("band:price=2.0", "block")]
    cells = [(*cell, width) for cell in expected for width in "21"]
    assert [tuple(row[name] for name in names) for row in rows] == cells
    for row, (policy, verifier, width) in zip(rows, cells, strict=True):
        own = replay(TRACE, policy, verifier, num_draft_tokens=int(width))
        assert row["tokens_per_call"] == f"{own.tokens_per_call.value:.12g}"
        assert row["kl_per_token_se"] == f"{own.divergence_per_token().standard_error:.12g}"
        assert row["trace"] == "trace"
    assert notes["command"] == f"python -m simulations sweep {' '.join(policies)}"


def test_enumerated_texts_are_those_of_the_library(tmp_path: Path) -> None:
    assert main([*MARKOV, "--out", str(tmp_path)]) == 0
    rows, _ = read_csv(tmp_path / "sweep.csv")
    assert [row["seed"] for row in rows] == ["0"] * 6 + ["1"] * 6
    assert [row["policy"] for row in rows[::2]] == 2 * [
        "speculative", "band:price=0.5", "band:price=2.0",
    ]  # fmt: skip
    pair = markov_pair(3, seed=1, distance=0.5)
    own = measured(pair, Setting("band:price=2", 2, 3, "block"))
    assert rows[-1]["kl"] == f"{own['kl']:.12g}" and float(own["kl"]) > 0


def test_decodes_add_up_and_depend_on_their_seed(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    flags = "--kind decode --policies band:price=1 --verifiers chain --num-prompts 1".split()
    flags += "--max-new-tokens 12 --num-draft-tokens 2 --seeds 0 1".split()
    assert main(["sweep", "--in-process", *flags, "--out", str(tmp_path)]) == 0
    rows, _ = read_csv(tmp_path / "sweep.csv")
    assert len({row["kl_per_token"] for row in rows}) == 2  # seeds are other texts
    for row in rows:
        tokens, calls, per_call, accepted = (
            float(row[name])
            for name in ("tokens", "target_calls", "tokens_per_call", "accepted_per_call")
        )
        assert 2 <= tokens <= 12 and tokens / calls == pytest.approx(per_call)
        assert 0 < float(row["kl_per_token"]) <= float(row["largest_row_kl"]) * calls / tokens * 2
        assert accepted <= 2


def test_what_is_there_is_not_computed_again(tmp_path: Path, capsys) -> None:
    assert main([*MARKOV, "--out", str(tmp_path / "whole")]) == 0
    assert main([*MARKOV, "--out", str(tmp_path / "part")]) == 0
    shards = sorted((tmp_path / "part" / "shards").iterdir())
    assert len(shards) > 2
    shards[0].unlink()
    (tmp_path / "part" / "sweep.csv").unlink()
    (shards[0].parent / f".{shards[0].name}.half").write_bytes(b'{"task":')
    capsys.readouterr()
    assert main([*MARKOV, "--out", str(tmp_path / "part")]) == 0
    there = 12 - int(re.search(r": (\d+) tasks in", capsys.readouterr().out)[1])
    assert 0 < there < 12
    assert table(tmp_path / "part") == table(tmp_path / "whole")
    (tmp_path / "part" / "sweep.csv").unlink()
    assert main([*MARKOV, "--out", str(tmp_path / "part")]) == 0
    assert "12 were there already" in capsys.readouterr().out
    assert table(tmp_path / "part") == table(tmp_path / "whole")


def test_a_failing_task_is_told_and_tried_again(tmp_path: Path, capsys) -> None:
    file = tmp_path / "broken.py"
    file.write_text(BROKEN)
    spec = f"{file}:Broken"
    flags = [*MARKOV[:4], "--length", "3", "--policies", "speculative", spec, "cactus:delta=0.1"]
    flags += ["--verifiers", "chain", "--out", str(tmp_path / "out")]
    for _ in range(2):
        assert main(flags) == 1
        said = capsys.readouterr()
        assert "ArithmeticError: no number" in said.err and "policy=broken.py:Broken" in said.err
    rows, notes = read_csv(tmp_path / "out" / "sweep.csv")
    assert [row["policy"] for row in rows] == ["speculative", "cactus:delta=0.1"]
    assert notes["failed"] == "1 of 3 tasks, which are left out"
    (told,), _ = read_csv(tmp_path / "out" / "errors.csv")
    assert told["error"] == "ArithmeticError: no number"
    assert str(tmp_path) not in (tmp_path / "out" / "errors.csv").read_text()


def test_a_grid_file_is_the_same_as_flags(tmp_path: Path) -> None:
    grid = {"kind": "markov", "policies": ["speculative", "band:price"], "knobs": [0.5, 2],
            "length": 3, "num_draft_tokens": [2], "seeds": [0, 1], "distance": 0.5}  # fmt: skip
    file = tmp_path / "grid.json"
    file.write_text(json.dumps(grid))
    given = ["sweep", "--in-process", "--grid", str(file), "--out", str(tmp_path / "file")]
    assert main(given) == 0
    assert main([*MARKOV, "--out", str(tmp_path / "flags")]) == 0
    assert table(tmp_path / "file") == table(tmp_path / "flags")


@pytest.mark.parametrize("content", ['["kind"]', "{", '{"knob": 1}', '{"seeds": ["a"]}'])
def test_a_broken_grid_file_is_one_line(tmp_path: Path, capsys, content: str) -> None:
    (tmp_path / "grid.json").write_text(content)
    given = ["sweep", "--grid", str(tmp_path / "grid.json"), "--out", str(tmp_path / "out")]
    assert main(given) == 2
    err = capsys.readouterr().err
    assert "grid.json must hold flags of a grid by name" in err and len(err.splitlines()) == 1
    assert main([*given, "--kind", "markov"]) == 2
    assert "--grid: must be given without --kind" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--policies", "bandd"], "bandd"),
        (["--policies", "band:price"], "--knobs: must hold values for band:price"),
        (["--policies", "typical", "--verifiers", "block"], "one must be able to follow typical"),
        (["--verifiers", "knot"], "must be among"),
        (["--num-draft-tokens", "2", "5"], "at most the 4 that trace logged; got 5"),
        (["--num-draft-tokens", "0"], "--num-draft-tokens: must be at least 1; got 0"),
        (["--trace", "nowhere"], "no such folder"),
        (["--seeds", "0", "1"], "--seeds: is a flag of --kind markov; got replay"),
        (["--max-new-tokens", "3"], "--max-new-tokens: is a flag of --kind decode; got replay"),
        (["--kind", "markov", "--trace", "x"], "--trace: is a flag of --kind replay; got markov"),
        (["--kind", "markov", "--seeds", "-1"], "--seeds: must be at least 0; got -1"),
        (["--kind", "decode", "--target", "a", "b"], "--draft: must be one per --target, 2; got 1"),
        (["--kind", "decode", "--target", "."], "--target: must be the folder of a model; got ."),
        (["--workers", "0"], "--workers: must be at least 1; got 0"),
        (["--scheduler", "here"], "--scheduler: must be as tcp://host:8786; got 'here'"),
    ],
)
def test_bad_flags_are_one_line(tmp_path: Path, capsys, flags: list[str], said: str) -> None:
    assert main(["sweep", *flags, "--out", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_an_interruption_says_how_to_go_on(tmp_path: Path, capsys, monkeypatch) -> None:
    def stopped(tasks, pools, keep, **others) -> None:
        keep([record(tasks[3].key, rows=[dict(tasks[3].case)])])
        raise KeyboardInterrupt

    monkeypatch.setattr("simulations.sweep.command.drive", stopped)
    assert main([*MARKOV, "--out", str(tmp_path)]) == 130
    said = capsys.readouterr().err
    assert "interrupted; 1 of 12 tasks are kept" in said and "the same command goes on" in said
    assert len(list((tmp_path / "shards").iterdir())) == 1


def test_every_finished_task_is_shown(tmp_path: Path, monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(
        terminal.Progress, "update", lambda self, done, note="": seen.append((self.total, done))
    )
    assert main([*MARKOV, "--out", str(tmp_path)]) == 0
    assert {total for total, _ in seen} == {12} and seen[-1] == (12, 12)
    assert seen == sorted(seen) and len(seen) == len(list((tmp_path / "shards").iterdir()))
