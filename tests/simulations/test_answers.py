"""Expected lengths of Markov texts: exact, and what the table of them says."""

import pytest
import torch

from cactus_theory.divergences import divergence
from cactus_theory.policies import policy
from cactus_theory.tuning.families import TOLERANCE, families
from simulations.__main__ import main
from simulations.answers import END, ending_pair, expected, own_length, solved
from simulations.common.results import read_csv
from simulations.markov import Setting, enumerate_texts

# texts of more than 11 tokens have less mass than 1e-9 where half of all tokens end them
CUT = 1e-6


@pytest.mark.parametrize("spec", ["speculative", "band:price=0.5", "cactus:delta=0.2"])
def test_means_are_those_of_enumerated_texts(spec: str) -> None:
    pair = ending_pair(3, seed=1, length=1.15)
    made = expected(pair, policy(spec), 2)
    texts = enumerate_texts(pair, Setting(spec, 2, 12, end=END))
    assert made.tokens == pytest.approx(texts.tokens, abs=CUT)
    assert made.calls == pytest.approx(texts.calls.mean, abs=CUT)
    assert made.meter == pytest.approx(texts.meter.mean, abs=CUT)
    assert (made.raised > 1e-3) == (spec != "speculative")


def test_lossless_texts_are_as_long_as_the_targets_own() -> None:
    pair = ending_pair(5, seed=3, length=40)
    assert own_length(pair.target) == pytest.approx(40)
    made = expected(pair, policy("speculative"), 3)
    assert made.tokens == pytest.approx(40) and abs(made.meter) < 1e-12


def test_where_every_draft_is_accepted_three_tokens_are_the_drafts_and_one_the_targets() -> None:
    pair = ending_pair(5, seed=3, length=40)
    made = expected(pair, policy("lenience:lenience=1e-12"), 3)
    law, tokens = torch.zeros(5, dtype=torch.float64), 0.0
    law[END] = 1.0  # the state that texts start in
    for place in range(2000):
        tokens += float(law.sum())
        law = law @ (pair.target if place % 4 == 3 else pair.draft)
        law[END] = 0.0
    assert made.tokens == pytest.approx(tokens)


def test_a_length_by_hand() -> None:
    # after 0: 0 ends with 0.25; after 1 it ends with 0.5
    rows = torch.tensor([[0.25, 0.75], [0.5, 0.5]], dtype=torch.float64)
    assert own_length(rows) == pytest.approx(1 + 0.75 * 2)


def test_knobs_are_solved_for_the_level() -> None:
    pair = ending_pair(4, seed=0, length=30)
    (kind,) = (one for one in families(divergence("kl"), ["cactus:delta"]) if not one.lossless)
    rule, made = solved(pair, kind, 2, 0.03)
    assert made.meter / made.tokens == pytest.approx(0.03, rel=TOLERANCE)
    assert expected(pair, rule, 2) == made


def test_the_command_writes_a_row_a_model_policy_and_level(tmp_path, capsys) -> None:
    out = tmp_path / "lengths.csv"
    small = "--vocab 3 --num-draft-tokens 1 --models 2 --level 0.01 --policies band:price"
    small += " band:price,head=0.2"
    assert main(["table", "answers", *small.split(), "--out", str(out)]) == 0
    rows, _ = read_csv(out)
    assert [row["model"] for row in rows] == ["0", "0", "1", "1"]
    band, head = rows[:2]
    assert head["policy"].endswith(",head=0.2") and head["family"] == "band:price,head=0.2"
    raised = [float(row["raised_off_head_per_1000"]) for row in (band, head)]
    assert raised[0] >= raised[1] and raised[1] < 1e-9
    assert all(float(row["kl_per_token"]) == pytest.approx(0.01, rel=TOLERANCE) for row in rows)
    assert capsys.readouterr().out == f"written to {out}\n"
    assert main(["table", "answers", "--models", "1", "--out", str(out)]) == 2
