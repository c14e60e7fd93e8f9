"""Acceptance by place in long texts, against rounds spelled out and texts that get longer."""

import pytest
import torch

import cactus_theory as ct
from simulations.markov import Setting, enumerate_texts, long_run_rates, markov_pair
from simulations.markov.rounds import stationary
from tests.amounts import some
from tests.simulations.markov.by_hand import one_round

# sums of some hundred products; π solves equations of condition below 100
CLOSE = 1e-10
# what is left of the ends of texts of 14 tokens: 4e-3 of the meter, 6e-4 of the calls
ENDS = 8e-3
CASES = [
    (spec, width, options)
    for spec in ("cactus:delta=0.2", "typical", "speculative", "mixture:alpha=0.5")
    for width in (1, 3)
    for options in ({"vocab": 3}, {"vocab": 2, "order": 2}, {"vocab": 3, "zeros": 0.4})
]


def spelled_out(pair, spec, width):
    """Return marginal rates token by token: rounds from every state until their law settles."""
    rule, kl, count = ct.policy(spec), ct.divergence("kl"), len(pair.target)
    texts = {pair.start: ()}
    moves = torch.zeros(count, count, dtype=torch.float64)
    kept = torch.zeros(count, width, dtype=torch.float64)
    open_states = [pair.start]
    while open_states:
        state = open_states.pop()
        for new, mass, _ in one_round(pair, rule, kl, texts[state], width):
            after = state
            for token in new:
                after = int(pair.following[after, token])
            moves[state, after] += mass
            kept[state, : len(new) - 1] += mass
            if mass and after not in texts:
                texts[after] = (*texts[state], *new)
                open_states.append(after)
    weight = torch.zeros(count, dtype=torch.float64)
    weight[pair.start] = 1.0
    for _ in range(4000):
        weight = (weight + weight @ moves) / 2  # lazily, so that it settles
    return (weight @ kept).tolist()


@pytest.mark.parametrize(("spec", "width", "options"), some(CASES, 7))
def test_rates_are_those_of_rounds_spelled_out(spec, width, options):
    pair = markov_pair(**options, seed=4)
    found = long_run_rates(pair, Setting(spec, width, 2))
    expected = spelled_out(pair, spec, width)
    assert found.marginal == pytest.approx(expected, abs=CLOSE)


@pytest.mark.parametrize("verifier", ["chain", "block"])
def test_long_texts_tend_to_them(verifier):
    """Six more tokens, twice what most rounds emit: the ends of the texts cancel."""
    pair = markov_pair(2, seed=1, distance=2.0)
    found = long_run_rates(pair, Setting("band:price=0.7", 2, 2, verifier))
    texts = [
        enumerate_texts(pair, Setting("band:price=0.7", 2, length, verifier)) for length in (8, 14)
    ]
    calls = texts[1].calls.mean - texts[0].calls.mean
    spent = texts[1].meter.mean - texts[0].meter.mean
    assert 6 / calls == pytest.approx(found.mean_acceptance_length, rel=ENDS)
    assert spent / 6 == pytest.approx(found.metered, rel=ENDS)


def test_states_that_part_for_good_have_no_one_law():
    split = torch.tensor([[0.0, 0.5, 0.5], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]).double()
    with pytest.raises(RuntimeError, match="more than one stationary law"):
        stationary(split, 0)
    assert stationary(split, 1).tolist() == [0.0, 1.0, 0.0]
