"""Planted faults: verifiers that are wrong in one way each, and the property that sees it.

A fault overrides one step of ``Plain``, which has every property; of its law too unless said.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

import cactus_theory as ct
from cactus_theory.policies import Declaration, FixedTarget
from cactus_theory.policies._decisions import Path
from cactus_theory.verify import Chain, Fly, Verdict, VerdictLaw, Verifier
from cactus_theory.verify._emitted import Emitted
from cactus_theory.verify.draw import pick
from tests.testing.plain_verifier import Plain


class TokenWise(Plain):
    def accepted(self, passed):
        return passed.long().cumprod(-1).sum(-1)


class FirstPassing(Plain):
    def accepted(self, passed):
        places = torch.arange(1, passed.shape[-1] + 1)
        first = torch.where(passed, places, 99).amin(-1)
        return torch.where(first < 99, first, 0)


class UnscaledResidual(Plain):
    def left(self, alive, h, p, before):
        return (h - p).clamp(min=0)


class PreviousRow(Plain):
    def left(self, alive, h, p, before):
        return (alive[:, None] * h - before).clamp(min=0)


class KeepValueAtTheEnd(Plain):
    def last_value(self, alive, missing):
        return self.value(alive, missing)


class RatioEverywhere(Plain):
    def value(self, alive, missing):
        return alive


class Uncapped(Plain):
    def ratio(self, mass, p):
        return torch.where(p > 0, mass / p.clamp(min=1e-300), 0.0)


class DividesByZero(Plain):
    def value(self, alive, missing):
        return missing / (missing + 1 - alive)


class AddsOneFirst(Plain):
    def value(self, alive, missing):
        sure = (alive == 1).double()
        return torch.where(missing > 0, missing / (missing + 1 - alive), sure)


class BonusFromTheRow(Plain):
    def bonus(self, q, p, policy):
        alive = torch.ones(len(q), dtype=torch.float64)
        return policy.target(q, p, Path(alive))


class BlindToThePath(Plain):
    def path(self, alive):
        return Path(torch.ones_like(alive))


class FirstPolicy(Plain):
    def policy(self, assigned, place):
        return torch.zeros(1, dtype=torch.int64)


class PolicyOfTheRow(Plain):
    """One policy for a whole draft."""

    def policy(self, assigned, place):
        return super().policy(assigned, 0)


class NeverReset(Plain):
    """The ratio of a row goes on from that of the row before it in the batch."""

    carried: Any = None

    def start(self, rows):
        return torch.ones(rows).double() if self.carried is None else self.carried

    def walk(self, assigned, q, draft):
        self.carried = None
        alive = super().walk(assigned, q, draft)[0]
        ends = alive[torch.arange(len(alive)), torch.as_tensor(draft.counts)]
        self.carried = torch.cat([torch.ones(1).double(), ends[:-1]])
        return super().walk(assigned, q, draft)


class ReadsBeyond(Plain):
    def lengths(self, draft):
        return torch.full((len(draft.token_ids),), draft.token_ids.shape[1])


class UniformForDeterministic(Plain):
    def deterministic(self, ids, q):
        return torch.full_like(q[:, :-1], 1 / q.shape[-1])


class AtMost(Plain):
    """In verify alone."""

    def passes(self, coin, value):
        return coin <= value


class AtMostPositive(Plain):
    """In verify alone, and only where the value is not 0."""

    def passes(self, coin, value):
        return (coin <= value) & (value > 0)


class OtherCoins(Plain):
    """In verify alone: coins are compared with P."""

    def verify(self, assigned, target_probs, draft, accept, draw):
        alive, _, rows, _ = self.walk(assigned, target_probs, draft)
        accepted = self.accepted(accept < alive[:, 1:])
        last = pick(rows[torch.arange(len(rows)), accepted], draw)
        return Verdict(draft.token_ids, accepted, last)


class SlightlyOff(Plain):
    """In verify alone: values are off by a millionth."""

    def passes(self, coin, value):
        return coin < value * (1 - 1e-6)


class OtherAlive(Plain):
    """In verify alone: the ratio that is reported is that of the next row."""

    def verify(self, assigned, target_probs, draft, accept, draw):
        found = super().verify(assigned, target_probs, draft, accept, draw)
        alive = self.walk(assigned, target_probs, draft)[0]
        return Verdict(found.draft_token_ids, found.num_accepted, found.last, alive=alive[:, 1:])


class SharedCoin(Plain):
    """In verify alone: the next token is drawn with the first acceptance coin."""

    def verify(self, assigned, target_probs, draft, accept, draw):
        draw = accept[:, 0] if accept.shape[1] else draw
        return super().verify(assigned, target_probs, draft, accept, draw)


class AliveIsOne(Plain):
    def law(self, assigned, target_probs, draft):
        found = super().law(assigned, target_probs, draft)
        alive = torch.ones_like(found.alive)
        return VerdictLaw(found.stop, found.last, alive, found.emitted)


class ChargesTheTarget(Plain):
    def emitted(self, policy, target_probs, draft_probs, path):
        return Emitted(policy, target_probs, draft_probs, path, lambda q, p, path: q)


class Coarse(Plain):
    def walk(self, assigned, q, draft):
        if q.dtype == torch.float32:
            q = q.bfloat16()
        return super().walk(assigned, q, draft)


class Boast(Chain):
    name = "boast"
    reaches_all_it_can = True


class ShorterWindow(Fly):
    """In verify alone: one token ahead where the law says two."""

    def verify(self, *given):
        return Fly(window=1).verify(*given)


class ForgivesTheImpossible(Fly):
    """Tokens that the target excludes are accepted, too, if what follows is."""

    def _conditions(self, assigned, q, draft):
        law, turns, window, _ = super()._conditions(assigned, q, draft)
        return law, turns, window, self.unsure(q[:, : draft.token_ids.shape[1]])


class CountsTheChain(Fly):
    """The alive ratios are those of the chain: overrides are forgotten."""

    def law(self, assigned, target_probs, draft):
        found = super().law(assigned, target_probs, draft)
        chain = Chain().law(assigned, target_probs, draft)
        return replace(found, alive=chain.alive)


class KnownByMemory(Plain):
    """The law of draft rows is known by where they lie."""

    def __init__(self):
        self.known = {}

    def law(self, assigned, target_probs, draft):
        place = draft.probs.data_ptr()
        if place not in self.known:
            self.known[place] = super().law(assigned, target_probs, draft)
        return self.known[place]


class VerdictsByMemory(Plain):
    """The same of verdicts, of as many coins."""

    def __init__(self):
        self.known = {}

    def verify(self, assigned, target_probs, draft, accept, draw):
        place = draft.probs.data_ptr(), accept.shape
        if place not in self.known:
            found = super().verify(assigned, target_probs, draft, accept, draw)
            self.known[place] = found
        return self.known[place]


class RefusesMore(Fly):
    """What was accepted is refused where the token after it is not accepted."""

    def law(self, assigned, target_probs, draft):
        found = super().law(assigned, target_probs, draft)
        moved = found.stop / 2
        moved[:, 0] += 0.5
        return replace(found, stop=moved, alive=moved.flip(-1).cumsum(-1).flip(-1))


@dataclass(frozen=True)
class Fault:
    """One planted fault, the property that must see it, and the policy to see it with."""

    title: str
    verifier: Verifier
    prop: str
    policy: str | ct.Policy = "speculative"


@dataclass(frozen=True)
class Fading(FixedTarget):
    """Closer to the draft the likelier the path is alive."""

    name = "fading"
    declares = Declaration(support="free")

    def target(self, q, p, path=None):
        if path is None:
            return q
        share = (path.alive / 2)[..., None]
        return share * p.double() + (1 - share) * q.double()


MIXED = "mixture:alpha=0.3"
FAULTS = (
    Fault("a token-wise stop inside the block", TokenWise(), "next_token_has_the_law"),
    Fault("the first passing place, not the last", FirstPassing(), "next_token_has_the_law"),
    Fault("the residual of h, not of P h", UnscaledResidual(), "next_token_has_the_law"),
    Fault("the residual of the row before", PreviousRow(), "next_token_has_the_law"),
    Fault("the keep value at the last place too", KeepValueAtTheEnd(), "next_token_has_the_law"),
    Fault("P in place of the keep value", RatioEverywhere(), "next_token_has_the_law"),
    Fault("P not capped at 1", Uncapped(), "counts_have_a_law"),
    Fault("R + 1 − P in the denominator", DividesByZero(), "counts_have_a_law"),
    Fault("1 added before P is taken off", AddsOneFirst(), "what_is_sure_is_accepted"),
    Fault("a bonus from h", BonusFromTheRow(), "next_token_has_the_law", MIXED),
    Fault("a path that is always alive", BlindToThePath(), "next_token_has_the_law", Fading()),
    Fault("the first policy everywhere", FirstPolicy(), "each_token_has_its_own_policy"),
    Fault("the first token's policy", PolicyOfTheRow(), "each_token_has_its_own_policy"),
    Fault("P goes on from row to row", NeverReset(), "a_row_alone_equals_the_batch"),
    Fault("rows after a draft's end are read", ReadsBeyond(), "a_row_alone_equals_the_batch"),
    Fault(
        "rows known by their memory",
        KnownByMemory(),
        "laws_are_exact_while_p_changes_between_rounds",
    ),
    Fault(
        "verdicts known by the memory of rows",
        VerdictsByMemory(),
        "laws_are_exact_while_p_changes_between_rounds",
    ),
    Fault(
        "deterministic drafts as uniform rows",
        UniformForDeterministic(),
        "deterministic_drafts_are_one_hot_rows",
    ),
    Fault("coin <= value", AtMost(), "impossible_tokens_are_never_emitted"),
    Fault("coin <= value above 0", AtMostPositive(), "a_coin_at_its_value_does_not_pass"),
    Fault("coins compared with P", OtherCoins(), "coins_decide_as_stated"),
    Fault("values off by a millionth", SlightlyOff(), "coins_decide_as_stated"),
    Fault("the alive ratio of the next row", OtherAlive(), "coins_decide_as_stated"),
    Fault("one coin to accept and to draw", SharedCoin(), "draws_follow_the_stated_law"),
    Fault("the same, seen by frequencies", SharedCoin(), "frequencies_follow_the_stated_law"),
    Fault("alive ratios of 1", AliveIsOne(), "alive_is_the_chance_of_passing"),
    Fault("the meter is given q", ChargesTheTarget(), "charged_rows_are_emitted", MIXED),
    Fault("float32 rows as bfloat16", Coarse(), "single_precision_agrees"),
    Fault("a window shorter than stated", ShorterWindow(window=2), "coins_decide_as_stated"),
    Fault("q = 0 overridden", ForgivesTheImpossible(), "impossible_tokens_are_never_emitted"),
    Fault("alive without overrides", CountsTheChain(), "looking_ahead_only_overrides_refusals"),
    Fault("refuses what is accepted", RefusesMore(), "looking_ahead_only_overrides_refusals"),
    Fault("a chain that says it reaches all", Boast(), "reaches_every_node_as_often_as_possible"),
)
