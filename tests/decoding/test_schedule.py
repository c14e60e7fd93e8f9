"""A schedule changes the rule where it says, and nowhere else."""

import pytest
import torch

import cactus_theory as ct
from cactus_theory.decoding import (
    ModelDrafter,
    Schedule,
    Siblings,
    generate,
)
from cactus_theory.decoding.result import VerifiedRows

PROMPT = torch.tensor([[1, 5, 9]])


class Taking(Schedule):
    """Takes its policies in turns, and adds up what it is told of them."""

    def __init__(self, *specs):
        self.policies, self.taken, self.spent = tuple(map(ct.policy, specs)), [], 0.0

    def begin(self, prompt):
        return 0

    def advance(self, state, new_ids):
        return state + 1

    def choose(self, state, drafted):
        return (state + torch.arange(len(drafted))) % len(self.policies)

    def observe(self, state, rows):
        expected = self.choose(state, rows.draft_token_ids).tolist()
        assert rows.policies == tuple(self.policies[number] for number in expected)
        self.taken += rows.policies
        self.spent += float(rows.charges.sum())
        return state


BOTH = "band:price=0.5", "cactus:delta=1"


@pytest.mark.parametrize(
    ("verifier", "specs", "drafts"),
    [
        ("chain", BOTH, "sampled"),
        ("block", BOTH, "sampled"),
        ("block", ("band:price=0.4", "speculative"), "sampled"),
        ("block", ("band:price=0.4", "band:price=0.5,per_row=True"), "deterministic"),
        ("tree", ("band:price=0.5", "band:price=2"), "siblings"),
        ("tree:runs=chain", BOTH, "siblings"),
    ],
)
def test_a_schedule_is_told_what_the_meter_charges(tiny, verifier, specs, drafts):
    schedule = Taking(*specs)
    drafter = ModelDrafter(tiny[1], greedy=drafts == "deterministic")
    if drafts == "siblings":
        drafter = Siblings(drafter, 2)
    given = {"max_new_tokens": 30, "seed": 4, "verifier": verifier, "record_rows": True}
    found = generate(tiny[0], drafter, PROMPT, policy=schedule, **given)
    assert set(schedule.taken) == set(schedule.policies) and found.reading.emitted_divergence > 0.01
    assert schedule.spent == pytest.approx(
        found.reading.emitted_divergence, rel=1e-6
    )  # rows are float32
    assert float(found.rows.charges.sum()) == pytest.approx(
        found.reading.emitted_divergence, rel=1e-6
    )


def test_rows_of_another_making_have_no_charges(tiny):
    row = torch.full((1, 4), 0.25)
    rows = VerifiedRows(row, row, torch.tensor([0]), torch.tensor([True]))
    with pytest.raises(ValueError, match="charges need one for each of 1 rows; got 0"):
        rows.charges  # noqa: B018


def test_charges_are_those_of_rows_that_sum_to_one():
    """Rows of half precision miss 1 by some thousandths: they are divided by their sums."""
    q, p = torch.tensor([[0.2, 0.3, 0.5]]).double(), torch.tensor([[0.6, 0.3, 0.1]]).double()
    of = torch.tensor([0]), torch.tensor([True]), (ct.policy("band:price=1"),)
    exact = VerifiedRows(q, p, *of).charges
    assert float(exact) > 0.01
    assert torch.allclose(VerifiedRows(q * 1.002, p * 0.997, *of).charges, exact, rtol=1e-12)
