"""The pace learns the right K and never stays with the slower kind of round."""

import pytest
import torch

from cactus_theory.decoding import generate
from cactus_theory.decoding.pace import LOOK_AGAIN, PROBE, AdaptivePace, Gate, Pace, Round

PROMPT = torch.tensor([[1, 5, 9]])


def speculative_round(width, acceptance, draft=0.2, target=1.0, seconds=None):
    """One row's round in which the same share of tokens is kept every time."""
    kept = round(width * acceptance, 6)
    return Round(
        drafted=width,
        accepted=kept,
        refused=1 - acceptance if acceptance < 1 else 0,
        emitted=kept + 1,
        steps=width,
        draft_seconds=draft * width,
        target_seconds=target,
        seconds=draft * width + target if seconds is None else seconds,
    )


def settled(acceptance, draft, most=12):
    pace = AdaptivePace(most)
    for _ in range(300):
        width = pace.width()
        # a geometric draft: so many are kept before one is refused
        kept = acceptance / (1 - acceptance)
        pace.note(Round(width, kept, 1, kept + 1, width, draft * width, 1.0, 1.0))
    return pace


@pytest.mark.parametrize("acceptance", [0.2, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("draft", [0.02, 0.2, 0.7])
def test_the_adaptive_width_is_the_best_one(acceptance, draft):
    pace = settled(acceptance, draft)
    assert pace.acceptance == pytest.approx(acceptance, abs=0.01)
    assert pace.cost_ratio == pytest.approx(draft, rel=1e-6)
    speeds = {
        width: sum(acceptance**i for i in range(width + 1)) / (width * draft + 1)
        for width in range(1, 13)
    }
    assert speeds[pace.width()] == pytest.approx(max(speeds.values()), rel=1e-3)


def run_gate(rounds, plain_seconds, speculative_seconds, tokens=2):
    """Feed a gate rounds of given cost; return which kinds it took."""
    gate = Gate(Pace(4))
    kinds = []
    for number in range(rounds):
        drafting = gate.width() > 0
        kinds.append(drafting)
        cost = speculative_seconds(number) if drafting else plain_seconds(number)
        count = tokens if drafting else 1
        width = 4 if drafting else 0
        gate.note(Round(width, count - 1, 0, count, 4, 0.1, 0.1, cost))
    return kinds


def test_the_gate_measures_both_kinds_and_takes_the_faster():
    for fast, slow in ((1.0, 1.5), (1.0, 2.9)):
        kinds = run_gate(400, lambda _, fast=fast: fast, lambda _, slow=slow: slow)
        expected = slow / 2 < fast
        assert kinds[: PROBE + 1] == [True] * (PROBE + 1)
        assert kinds[PROBE + 1 : 2 * PROBE + 2] == [False] * (PROBE + 1)
        # beside rare looks at the other kind, all rounds are of the faster one
        assert sum(kind == expected for kind in kinds) > 400 - 6 * (PROBE + 1)


def test_the_gate_leaves_a_kind_that_becomes_slower():
    turning = 150
    kinds = run_gate(1200, lambda _: 1.0, lambda number: 1.0 if number < turning else 4.0)
    assert all(kinds[2 * PROBE + 2 : LOOK_AGAIN])
    after = kinds[turning:]
    assert after.count(False) > len(after) - 40  # gone within a few rounds, then rare looks
    back = run_gate(1200, lambda _: 1.0, lambda number: 4.0 if number < turning else 1.0)
    assert back[-1]


def test_adaptive_decodes_stay_within_the_limit_and_greedy_texts_stay_the_same(tiny):
    options = {"policy": "speculative", "max_new_tokens": 60, "temperature": 0.0}
    fixed = generate(*tiny, PROMPT, num_draft_tokens=3, **options)
    for given in ({"adaptive": True}, {"gate": True}, {"adaptive": True, "gate": True}):
        paced = generate(*tiny, PROMPT, num_draft_tokens=6, **given, **options)
        assert paced.output_token_ids.tolist() == fixed.output_token_ids.tolist()
        assert max(drafted for drafted, _, _ in paced.rounds) <= 6
    gated = generate(*tiny, PROMPT, num_draft_tokens=6, gate=True, **options)
    assert any(drafted == 0 for drafted, _, _ in gated.rounds)
