"""Tokens a call and the meter in the long run: rounds, weighed by how often they begin where."""

from typing import NamedTuple

import torch

from tests.markov.pair import Setting, TinyPair
from tests.markov.rounds import drafted_rounds

# lazy steps of the chain of rounds, after which its law has settled to rounding
STEPS = 4000


class Rates(NamedTuple):
    """What a long text without an end tends to."""

    tokens_per_call: float
    metered: float  # nats an emitted token


def long_run_rates(pair: TinyPair, setting: Setting) -> Rates:
    """Return the rates of rounds of K tokens; ``setting.length`` means nothing here."""
    states = torch.arange(len(pair.target))
    width = setting.num_draft_tokens
    rounds = drafted_rounds(pair, states, width, setting.policies, setting.judge)
    moves = torch.zeros(len(states), len(states), dtype=torch.float64)
    ended = states[:, None]
    for chance in rounds.ends:
        ended = pair.following[ended].flatten(1)
        moves.scatter_add_(1, ended, chance)
    weight = torch.zeros(len(states), dtype=torch.float64)
    weight[pair.start] = 1.0
    for _ in range(STEPS):
        weight = (weight + weight @ moves) / 2
    tokens = sum(float(weight @ mass.sum(1)) for mass in rounds.alive)
    nats = sum(
        float(weight @ torch.where(mass > 0, mass * charge, 0.0).sum(1))
        for mass, charge in zip(rounds.alive, rounds.charges, strict=False)
    )
    return Rates(tokens, nats / tokens)
