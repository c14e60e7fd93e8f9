"""Expectation of one round of the decode loop from given states, over all coins and drafts."""

from dataclasses import dataclass
from typing import Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

import cactus_theory as ct
from cactus_theory.policies import Policy
from cactus_theory.verify.contract import Verifier
from cactus_theory.verify.draft import Assignment, Draft
from tests.markov.pair import Setting, TinyPair

KL = ct.divergence("kl")


@dataclass(frozen=True)
class Rounds:
    """The law of one round of w drafted tokens from each of N states, float64.

    Texts y of i tokens are counted with the first one slowest, V^i of them. ``ends`` comes
    from where the verifier stops and what it draws there, the others from how far it gets and
    what it emits next: two descriptions of the same law.
    """

    # for i = 1..w + 1, the probability that the round emits exactly y
    ends: list[Float[Tensor, "states texts"]]
    # for i = 0..w, that at least i drafted tokens are accepted, and are y
    alive: list[Float[Tensor, "states texts"]]
    # for i = 0..w, the law of the next token there; the target's row for the bonus, and where no
    # decode gets
    following: list[Float[Tensor, "states texts vocab"]]
    # for i = 0..w − 1, KL in nats of that law from the target's row, which the meter charges
    charges: list[Float[Tensor, "states texts"]]

    @property
    def width(self) -> int:
        return len(self.charges)

    def cut(self, end: int) -> Self:
        """Return the rounds of texts that stop at their first token ``end``."""
        vocab = self.following[0].shape[-1]
        ended = [torch.zeros(1, dtype=torch.bool)]
        for _ in self.ends:
            last = torch.arange(vocab) == end
            ended.append((ended[-1][:, None] | last).flatten())
        ends = []
        longer = torch.zeros_like(self.ends[-1])
        for before, exactly in zip(reversed(ended[:-1]), reversed(self.ends), strict=True):
            at_least = exactly + longer
            stops = (torch.arange(vocab) == end).repeat(len(before))
            ends.append(torch.where(stops, at_least, exactly) * ~before.repeat_interleave(vocab))
            longer = at_least.unflatten(1, (-1, vocab)).sum(-1)
        alive = [mass * ~over for mass, over in zip(self.alive, ended[:-1], strict=True)]
        return type(self)(ends[::-1], alive, self.following, self.charges)


# the rounds that begin after a number of tokens, and the index of each text's round among them
Start = tuple[Rounds, Int[Tensor, "texts"]]


def every_round(pair: TinyPair, setting: Setting) -> list[Start]:
    """Return for t = 0..T − 1 the rounds that begin after t tokens, one for each state there."""
    starts: list[Start] = []
    last: tuple[int, list[int]] | None = None
    for written, states_of_texts in enumerate(pair.prefixes(setting.length - 1)):
        states, index = states_of_texts.unique(return_inverse=True)
        key = setting.width(written), states.tolist()
        rounds = starts[-1][0] if key == last else _rounds(pair, setting, states, key[0])
        starts.append((rounds, index))
        last = key
    return starts


def _rounds(pair: TinyPair, setting: Setting, states: Int[Tensor, "states"], width: int) -> Rounds:
    if width:
        rounds = drafted_rounds(pair, states, width, setting.policies, setting.judge)
    else:
        rounds = plain_rounds(pair, states)
    return rounds if setting.end is None else rounds.cut(setting.end)


def plain_rounds(pair: TinyPair, states: Int[Tensor, "states"]) -> Rounds:
    q = pair.target[states]
    return Rounds([q], [torch.ones_like(q[:, :1])], [q[:, None]], [])


def drafted_rounds(
    pair: TinyPair,
    states: Int[Tensor, "states"],
    width: int,
    policies: tuple[Policy, ...],
    verifier: Verifier,
) -> Rounds:
    """Return rounds of ``width`` ≥ 1 drafted tokens, sampled from the draft's rows.

    Of several policies each judges the token at its own place.
    """
    count, vocab = len(states), pair.vocab
    drafts = torch.cartesian_prod(*[torch.arange(vocab)] * width).reshape(-1, width)
    ids = drafts.repeat(count, 1)
    walked = [states.repeat_interleave(len(drafts))]
    for place in range(width):
        walked.append(pair.following[walked[-1], ids[:, place]])
    path = torch.stack(walked, 1)
    q, p = pair.target[path], pair.draft[path[:, :-1]]
    choice = torch.arange(width).expand(ids.shape) if len(policies) > 1 else None
    verdicts = verifier.law(Assignment(policies, choice), q, Draft(ids, [width] * len(ids), p))
    chance = p.gather(-1, ids[..., None])[..., 0].prod(-1)

    def by_prefix(values: Tensor, length: int) -> Tensor:
        """Return values as (N, drafts with these first tokens, the others, ...)."""
        shape = (count, vocab**length, vocab ** (width - length))
        return values.reshape(*shape, *values.shape[1:])

    ends, alive, following, charges = [], [], [], []
    for place in range(width + 1):
        ended = (chance * verdicts.stop[:, place])[:, None] * verdicts.last[:, place]
        ends.append(by_prefix(ended, place).sum(2).flatten(1))
        alive.append(by_prefix(chance * verdicts.alive[:, place], place).sum(2))
    for place in range(width):
        # what follows depends on the path to it alone: any of the drafts beginning so
        target = by_prefix(q[:, place], place)[:, :, 0]
        law = by_prefix(verdicts.emitted[:, place], place)[:, :, 0]
        following.append(torch.where(alive[place][..., None] > 0, law, target))
        charges.append(KL.value(following[-1], target))
    following.append(by_prefix(q[:, width], width)[:, :, 0])
    return Rounds(ends, alive, following, charges)
