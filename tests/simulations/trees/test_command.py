"""The experiment on trees: what is logged is what smaller shapes judge, tables, break-even."""

import argparse

import pytest
import torch

from cactus_theory.decoding import load_pair
from simulations.__main__ import main
from simulations.common.grid import configs
from simulations.common.inputs import PAIR
from simulations.common.results import read_csv
from simulations.trees import command
from tests.amounts import thorough


@thorough
def test_shapes_of_one_round_share_its_rows():
    pair = load_pair(PAIR / "target", PAIR / "draft")
    args = argparse.Namespace(num_draft_tokens=[3, 2], siblings=[2, 1], max_new_tokens=12)
    prompt = torch.tensor([pair.tokenizer("def f(")["input_ids"]])
    rounds = command.logged(pair, prompt, args, {"temperature": 1.0, "seed": 1})
    assert rounds
    for trunk, rows in rounds:
        assert trunk.lengths == [3] and trunk.probs.shape[1] == 3
        with torch.inference_mode():
            for text, q in rows.items():
                ids = torch.cat([prompt, torch.tensor([[*text]], dtype=torch.int64)], 1)
                own = pair.target(input_ids=ids).logits[0, -1].softmax(-1)
                assert (own - q).abs().max() < 1e-4
        break  # later rounds have longer texts before them
    sums = {
        own: command.totals(rounds, own, "speculative", 3)
        for own in [(3, 0, "block"), (3, 2, "tree"), (2, 1, "tree")]
    }
    assert len({rounds for rounds, *_ in sums.values()}) == 1
    # lossless, the same coins: a tree emits what the block does, and more where it catches
    assert sums[3, 2, "tree"][1] >= sums[3, 0, "block"][1]
    count, tokens, nats = command.totals(rounds, (3, 2, "tree"), "band:price=0.5", 3)
    assert count <= tokens <= 4 * count and nats > 0


def test_what_a_pass_may_cost():
    """Twice the tokens pay up to the same seconds a token: a pass of 2 + (2 − 1) · 3 others."""

    class Twice:
        value, standard_error = 2.0, 0.1

        def __truediv__(self, other):
            return self

    seconds = {(4, 0, "block"): (40.0, 10.0), (4, 1, "tree"): (80.0, 50.0)}
    row = command._row((4, 1, "tree"), "speculative", 0.0, [Twice(), Twice()], seconds)
    assert row["pays_below"] == 5.0 and row["times_block_pass"] == 5.0
    assert row["tokens_per_second"] == 25.0 and row["block_tokens_per_second"] == 50.0


def test_throughput_gives_siblings_to_the_walk_alone():
    lines = configs(["plain"], ["speculative"], [4], [1], ["chain", "tree"], 2)
    assert [line.siblings for line in lines] == [0, 0, 2]
    assert lines[2].key == "speculative@tree with 2 siblings|K=4|batch=1"
    assert "siblings" not in lines[1].settings and lines[2].settings["siblings"] == 2


@thorough
def test_the_command_writes_its_tables(tmp_path, capsys):
    line = "trees --num-prompts 2 --max-new-tokens 24 --num-draft-tokens 4 2 --siblings 2"
    more = ["--prices", "4", "0.5", "--temperature", "1", "--out", str(tmp_path)]
    assert main([*line.split(), *more]) == 0
    rows = read_csv(tmp_path / "trees.csv")[0]
    assert {row["policy"] for row in rows} >= {"speculative", "band:price=4", "band:price=0.5"}
    assert "trees give more tokens a second" in capsys.readouterr().out
    passes = read_csv(tmp_path / "trees_passes.csv")[0]
    assert {row["nodes"] for row in passes} == {"5", "13", "3", "7"}
    assert float(passes[0]["times_path"]) == pytest.approx(1)
