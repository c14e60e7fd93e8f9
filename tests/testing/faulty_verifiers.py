"""Planted faults: verifiers that are wrong in one way each, and the property that sees it.

A fault overrides one step of ``Plain``, which has every property; of its law too unless said.
"""

from dataclasses import dataclass
from typing import Any

import torch

import cactus_theory as ct
from cactus_theory.policies import Declaration, FixedTarget
from cactus_theory.policies.policy import PathState
from cactus_theory.verify import Chain, Verdict, VerdictLaw, Verifier
from cactus_theory.verify.draw import pick
from tests.testing.plain_verifier import Plain


def plain(**steps) -> Verifier:
    return type("Planted", (Plain,), steps)()


def first_passing(self, passed):
    first = torch.where(passed, torch.arange(1, passed.shape[-1] + 1), 99).amin(-1)
    return torch.where(first < 99, first, 0)


def sure_first(self, alive, missing):
    return torch.where(missing > 0, missing / (missing + 1 - alive), (alive == 1).double())


class TokenWise(Plain):
    def accepted(self, passed):
        return passed.long().cumprod(-1).sum(-1)


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


def coins_against_alive(self, assigned, target_probs, draft, accept, draw):
    alive, _, rows, _ = self.walk(assigned, target_probs, draft)
    accepted = self.accepted(accept < alive[:, 1:])
    last = pick(rows[torch.arange(len(rows)), accepted], draw)
    return Verdict(draft.token_ids, accepted, last)


def alive_of_the_next_row(self, assigned, target_probs, draft, accept, draw):
    found = Plain.verify(self, assigned, target_probs, draft, accept, draw)
    alive = self.walk(assigned, target_probs, draft)[0]
    return Verdict(found.draft_token_ids, found.num_accepted, found.last, alive=alive[:, 1:])


def shared_coin(self, assigned, target_probs, draft, accept, draw):
    draw = accept[:, 0] if accept.shape[1] else draw
    return Plain.verify(self, assigned, target_probs, draft, accept, draw)


def alive_is_one(self, assigned, target_probs, draft):
    found = Plain.law(self, assigned, target_probs, draft)
    return VerdictLaw(found.stop, found.last, torch.ones_like(found.alive), found.emitted)


def coarse(self, assigned, q, draft):
    return Plain.walk(self, assigned, q.bfloat16() if q.dtype == torch.float32 else q, draft)


class Boast(Chain):
    name = "boast"
    reaches_all_it_can = True


class ByMemory(Plain):
    """What is known of draft rows is kept by where they lie: of their law, or of verdicts."""

    def __init__(self, of):
        self.of, self.known = of, {}

    def law(self, assigned, target_probs, draft):
        known = self.known if self.of == "laws" else {}
        place = draft.probs.data_ptr()
        return known.get(place) or known.setdefault(
            place, super().law(assigned, target_probs, draft)
        )

    def verify(self, assigned, target_probs, draft, accept, draw):
        known = self.known if self.of == "verdicts" else {}
        place = draft.probs.data_ptr(), accept.shape
        return known.get(place) or known.setdefault(
            place, super().verify(assigned, target_probs, draft, accept, draw)
        )


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


@dataclass(frozen=True)
class Fault:
    """One planted fault, the property that must see it, and the policy to see it with."""

    title: str
    verifier: Verifier
    prop: str
    policy: str | ct.Policy = "speculative"


MIXED, OF_COINS = "mixture:alpha=0.3", "laws_are_exact_while_p_changes_between_rounds"
# fmt: off
FAULTS = (
    Fault("a token-wise stop inside the block", TokenWise(), "next_token_has_the_law"),
    Fault("the first passing place, not the last", plain(accepted=first_passing),
          "next_token_has_the_law"),
    Fault("the residual of h, not of P h",
          plain(left=lambda self, alive, h, p, before: (h - p).clamp(min=0)),
          "next_token_has_the_law"),
    Fault("the residual of the row before",
          plain(left=lambda self, alive, h, p, before: (alive[:, None] * h - before).clamp(min=0)),
          "next_token_has_the_law"),
    Fault("the keep value at the last place too", plain(last_value=Plain.value),
          "next_token_has_the_law"),
    Fault("P in place of the keep value", plain(value=Plain.last_value), "next_token_has_the_law"),
    Fault("P not capped at 1",
          plain(ratio=lambda self, mass, p: torch.where(p > 0, mass / p.clamp(min=1e-300), 0.0)),
          "counts_have_a_law"),
    Fault("R + 1 − P in the denominator",
          plain(value=lambda self, alive, missing: missing / (missing + 1 - alive)),
          "counts_have_a_law"),
    Fault("1 added before P is taken off", plain(value=sure_first), "what_is_sure_is_accepted"),
    Fault("a bonus from h",
          plain(bonus=lambda self, q, p, policy:
                policy.target(q, p, PathState(q[:, 0].double() ** 0))),
          "next_token_has_the_law", MIXED),
    Fault("a path that is always alive",
          plain(path=lambda self, alive: PathState(torch.ones_like(alive))),
          "next_token_has_the_law", Fading()),
    Fault("the first policy everywhere",
          plain(policy=lambda self, assigned, place: torch.zeros(1, dtype=torch.int64)),
          "each_token_has_its_own_policy"),
    Fault("the first token's policy",
          plain(policy=lambda self, assigned, place: Plain.policy(self, assigned, 0)),
          "each_token_has_its_own_policy"),
    Fault("P goes on from row to row", NeverReset(), "a_row_alone_equals_the_batch"),
    Fault("rows after a draft's end are read",
          plain(lengths=lambda self, draft: torch.full(
              (len(draft.token_ids),), draft.token_ids.shape[1])),
          "a_row_alone_equals_the_batch"),
    Fault("rows known by their memory", ByMemory("laws"), OF_COINS),
    Fault("verdicts known by the memory of rows", ByMemory("verdicts"), OF_COINS),
    Fault("deterministic drafts as uniform rows",
          plain(deterministic=lambda self, ids, q: torch.full_like(q[:, :-1], 1 / q.shape[-1])),
          "deterministic_drafts_are_one_hot_rows"),
    Fault("coin <= value", plain(passes=lambda self, coin, value: coin <= value),
          "impossible_tokens_are_never_emitted"),
    Fault("coin <= value above 0",
          plain(passes=lambda self, coin, value: (coin <= value) & (value > 0)),
          "a_coin_at_its_value_does_not_pass"),
    Fault("coins compared with P", plain(verify=coins_against_alive), "coins_decide_as_stated"),
    Fault("values off by a millionth",
          plain(passes=lambda self, coin, value: coin < value * (1 - 1e-6)),
          "coins_decide_as_stated"),
    Fault("the alive ratio of the next row", plain(verify=alive_of_the_next_row),
          "coins_decide_as_stated"),
    Fault("one coin to accept and to draw", plain(verify=shared_coin),
          "draws_follow_the_stated_law"),
    Fault("alive ratios of 1", plain(law=alive_is_one), "alive_is_the_chance_of_passing"),
    Fault("the meter is given q",
          plain(emitted=lambda self, policy, q, p, path: q), "charged_rows_are_emitted", MIXED),
    Fault("float32 rows as bfloat16", plain(walk=coarse), "single_precision_agrees"),
    Fault("a chain that says it reaches all", Boast(), "reaches_every_node_as_often_as_possible"),
)
# fmt: on
