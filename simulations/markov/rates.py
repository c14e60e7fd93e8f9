r"""How often each place of a draft is accepted in long texts, exactly.

Rounds of K drafted tokens begin in one of the S states of the models; where one ends the next
begins, a Markov chain with the transition matrix R, whose stationary law π weighs the rounds of
a long text without an end. With α_i(s) the probability that a round begun in s accepts at least
i tokens,

.. math:: \mathrm{marginal}_i = Σ_s π_s α_i(s), \qquad
          \mathrm{conditional}_i = \mathrm{marginal}_i/\mathrm{marginal}_{i-1}, \quad α_0 = 1.

The conditional rates are what an engine's synthetic acceptance takes to load-test as if it ran
this pair (vLLM: ``synthetic_conditional_rates``): the number of accepted tokens of a round then
has the same law, though rounds follow each other independently.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from .pair import Setting, TinyPair
from .rounds import Rounds, drafted_rounds

# how far π R may be from π, and a sum of probabilities from 1
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Rates:
    """Acceptance by place in a draft, in the long run.

    Attributes
    ----------
    marginal : (K,), Pr(token i is accepted) per draft.
    conditional : (K,), given that all before it are; NaN where none ever gets there.
    metered : what the meter charges per emitted token, nats.
    """

    marginal: list[float]
    conditional: list[float]
    metered: float

    @property
    def mean_acceptance_length(self) -> float:
        """Return tokens a call, the recovered or bonus token included: 1 + Σ marginal."""
        return 1 + sum(self.marginal)


def long_run_rates(pair: TinyPair, setting: Setting) -> Rates:
    """Return the rates of rounds of ``setting.num_draft_tokens`` tokens.

    ``setting.length`` and ``setting.end`` mean nothing here: texts go on.

    Raises
    ------
    RuntimeError
        A chain of states with more than one stationary law.
    """
    states = torch.arange(len(pair.target))
    width = setting.num_draft_tokens
    rounds = drafted_rounds(pair, states, width, setting.rules, setting.judge)
    weight = stationary(transitions(pair, rounds), pair.start)
    kept = torch.stack([weight @ own.sum(1) for own in rounds.alive]).tolist()
    spent = [
        float(weight @ torch.where(own > 0, own * cost, 0.0).sum(1))
        for own, cost in zip(rounds.alive, rounds.spent, strict=False)
    ]
    conditional = [
        own / before if before > 0 else float("nan")
        for before, own in zip(kept, kept[1:], strict=False)
    ]
    return Rates(kept[1:], conditional, sum(spent) / sum(kept))


def transitions(pair: TinyPair, rounds: Rounds) -> Float[Tensor, "states states"]:
    """Return the probability of the next round beginning in each state."""
    count = len(pair.target)
    found = torch.zeros(count, count, dtype=torch.float64)
    ended = torch.arange(count)[:, None]
    for chance in rounds.ends:
        ended = pair.following[ended].flatten(1)
        found.scatter_add_(1, ended, chance)
    return found


def stationary(moves: Float[Tensor, "states states"], start: int) -> Float[Tensor, "states"]:
    """Return π with π R = π among the states that can be reached from ``start``."""
    count = len(moves)
    reached = torch.zeros(count, dtype=torch.bool)
    reached[start] = True
    for _ in range(count):
        reached = reached | (moves[reached] > 0).any(0)
    own = reached.nonzero()[:, 0]
    inner = moves[own][:, own]
    drift = inner.T - torch.eye(len(own), dtype=torch.float64)
    balance = torch.cat([drift, inner.new_ones(1, len(own))])
    goal = torch.zeros(len(own) + 1, dtype=torch.float64)
    goal[-1] = 1.0
    if int(torch.linalg.matrix_rank(balance)) < len(own):
        raise RuntimeError("rates: the states have more than one stationary law")
    weight = torch.linalg.lstsq(balance, goal[:, None], driver="gelsd").solution[:, 0]
    if float((weight @ inner - weight).abs().max()) > TOLERANCE:
        raise RuntimeError("rates: no stationary law was found")
    return torch.zeros(count, dtype=torch.float64).index_put_((own,), weight.clamp(min=0.0))
