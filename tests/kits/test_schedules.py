"""Good schedules pass; look-ahead and memory between texts are noticed."""

import pytest
import torch

import cactus_theory as ct
from cactus_theory.decoding import Between, ByPosition, Schedule
from cactus_theory.verify import Draft
from cactus_theory.verify.contract import find_verifier
from tests.kits.schedules import assert_schedule_properties

RULES = (ct.policy("speculative"), ct.policy("cactus:delta=1"))


class Base(Schedule):
    policies = RULES

    def begin(self, prompt):
        return 0

    def advance(self, state, new_ids):
        return state + len(new_ids)

    def choose(self, state, drafted):
        return torch.full_like(drafted, int(state < 6))


class Spender(Base):
    """Carries a state along the block, and from block to block by the rows it is shown."""

    def begin(self, prompt):
        return 1.5

    def advance(self, state, new_ids):
        return state

    def observe(self, state, nodes):
        return state - sum(float(node.q.max()) for node in nodes) / 4

    def choose_by_rows(self, state, drafted, target_probs, draft_probs):
        return (state - target_probs.amax(-1).cumsum(0) / 4 > 0).long()


class LooksAtItsToken(Base):
    def choose(self, state, drafted):
        return drafted % 2


class LooksAtLaterRows(Base):
    def choose_by_rows(self, state, drafted, target_probs, draft_probs):
        return torch.full_like(drafted, int(target_probs[-1].argmax() % 2))


class NeverReset(Base):
    def __init__(self):
        self.seen = 0

    def advance(self, state, new_ids):
        self.seen += len(new_ids)
        return state

    def choose(self, state, drafted):
        return torch.full_like(drafted, self.seen // 3 % 2)


class OutOfRange(Base):
    def choose(self, state, drafted):
        return torch.full_like(drafted, 2)


class CountsCalls(Base):
    def advance(self, state, new_ids):
        return state + 1

    def choose(self, state, drafted):
        return torch.full_like(drafted, state % 2)


GOOD = (
    Base(),
    Spender(),
    Between("cactus:delta=1", opening=7, closing=(8, 9)),
    ByPosition([(0, "speculative"), (3, "typical")]),
)
BAD = {
    LooksAtItsToken: "token 0 must not depend on that token",
    LooksAtLaterRows: "must not depend on that token, on later ones or on later rows",
    NeverReset: "begin: a text's choices must not depend on other texts",
    OutOfRange: "choose: must return 6 numbers below 2",
    CountsCalls: "advance: tokens one by one",
}


@pytest.mark.parametrize("schedule", GOOD)
def test_good_schedules_pass(schedule):
    assert_schedule_properties(schedule)


@pytest.mark.parametrize("kind", BAD)
def test_bad_ones_are_noticed(kind):
    with pytest.raises(AssertionError, match=BAD[kind]):
        assert_schedule_properties(kind())


class Tilting(Base):
    policies = ct.policy("speculative"), ct.policy("band:price=1,tilt=0.5")

    def choose(self, state, drafted):
        return torch.ones_like(drafted)


@pytest.mark.parametrize("parents", [None, torch.tensor([[-1]])])
def test_the_policy_of_an_undrafted_token_is_chosen_in_chains_and_trees(parents):
    """A text without room for a drafted token emits one from the chosen policy's row."""
    draft = Draft(torch.tensor([[0]]), [0], None, parents)
    q = torch.full((1, 2, 4), 0.25, dtype=torch.float64)
    choice, _ = Tilting().choose_by_nodes(0, q, draft, find_verifier("tree"))
    assert int(choice[0]) == 1
