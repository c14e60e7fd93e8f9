"""A schedule changes the rule where it says, and nowhere else."""

import pytest
import torch

import cactus_theory as ct
from cactus_theory.decoding import (
    Between,
    ByPosition,
    ModelDrafter,
    Schedule,
    Siblings,
    generate,
)
from cactus_theory.decoding.result import VerifiedRows

PROMPT = torch.tensor([[1, 5, 9]])


def test_positions_count_new_tokens():
    steps = ByPosition([(0, "speculative"), (3, "typical"), (5, "cactus:delta=1")])
    assert steps.begin([1, 2, 3]) == 0
    assert steps.choose(steps.advance(0, [9]), torch.zeros(6).long()).tolist() == [0, 0, 1, 1, 2, 2]


class Taking(Schedule):
    """Takes its policies in turns, and adds up what it is told of them."""

    def __init__(self, *specs):
        self.rules, self.taken, self.spent = tuple(map(ct.policy, specs)), [], 0.0

    def begin(self, prompt):
        return 0

    def advance(self, state, new_ids):
        return state + 1

    def choose(self, state, drafted):
        return (state + torch.arange(len(drafted))) % len(self.rules)

    def observe(self, state, rows):
        expected = self.choose(state, rows.draft_token_ids).tolist()
        assert rows.policies == tuple(self.rules[number] for number in expected)
        self.taken += rows.policies
        self.spent += float(rows.charges.sum())
        return state


BOTH = "band:price=0.5", "cactus:delta=1"


@pytest.mark.parametrize(
    ("verifier", "specs", "drafts"),
    [
        ("chain", BOTH, "sampled"),
        ("block", BOTH, "sampled"),
        ("block", ("soft_band:price=0.4", "speculative"), "sampled"),
        ("block", ("soft_band:price=0.4", "band:price=0.5"), "certain"),
        ("tree", ("band:price=0.5", "band:price=2"), "siblings"),
        ("tree:runs=chain", BOTH, "siblings"),
    ],
)
def test_a_schedule_is_told_what_the_meter_charges(tiny, verifier, specs, drafts):
    schedule = Taking(*specs)
    drafter = ModelDrafter(tiny[1], greedy=drafts == "certain")
    if drafts == "siblings":
        drafter = Siblings(drafter, 2)
    given = {"max_new_tokens": 30, "seed": 4, "verifier": verifier, "record_rows": True}
    found = generate(tiny[0], drafter, PROMPT, policy=schedule, **given)
    assert set(schedule.taken) == set(schedule.rules) and found.reading.emitted_divergence > 0.01
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


class Cautious(Schedule):
    """A state along the block: relaxed at a token only if the rows up to it are flat enough."""

    rules = (ct.policy("speculative"), ct.policy("cactus:delta=1"))

    def begin(self, prompt):
        return None

    def advance(self, state, new_ids):
        return None

    def choose(self, state, drafted):
        raise AssertionError("choose_by_rows is asked instead")

    def choose_by_rows(self, state, drafted, target_probs, draft_probs):
        assert target_probs.shape == draft_probs.shape and len(target_probs) == len(drafted)
        return (target_probs.amax(-1).cummax(0).values < 0.3).long()


def test_a_schedule_may_go_by_the_rows(tiny):
    found = generate(*tiny, PROMPT, policy=Cautious(), max_new_tokens=60, seed=5, record_rows=True)
    sharp = found.rows.target_probs.amax(-1) >= 0.3
    law = ct.emitted_law(
        ct.policy("cactus:delta=1"), found.rows.target_probs, found.rows.draft_probs
    )
    most = ct.divergence("kl").value(law, found.rows.target_probs)
    assert 0 < found.reading.emitted_divergence <= float(most[~sharp].sum()) + 1e-9
    assert sharp.any()


def test_a_schedule_that_never_changes_is_its_rule(tiny):
    options = {"max_new_tokens": 30, "seed": 3, "record_rows": True}
    for spec in ("cactus:delta=0.5", "band:delta=0.2"):
        alone = generate(*tiny, PROMPT, policy=spec, **options)
        steps = ByPosition([(0, spec), (1000, "speculative")])
        scheduled = generate(*tiny, PROMPT, policy=steps, **options)
        assert scheduled.output_token_ids.tolist() == alone.output_token_ids.tolist()
        assert scheduled.reading.emitted_divergence == pytest.approx(
            alone.reading.emitted_divergence, rel=1e-9
        )


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Between("typical", opening=3, closing=3), "closing: must differ .* token 3"),
        (lambda: Between("typical", opening=(), closing=3), "opening: must name at least one"),
        (lambda: Between("typical", opening=-1, closing=3), "opening: must be an integer .* -1"),
        (lambda: ByPosition([(1, "typical")]), r"steps: positions must start at 0 .* \(1,\)"),
        (lambda: ByPosition([(0, "typical"), (0, "typical")]), r"steps: .*\(0, 0\)"),
    ],
)
def test_refuses_schedules_that_make_no_sense(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_refuses_a_policy_of_no_kind(tiny):
    with pytest.raises(TypeError, match="policy: must be a spec, a Policy or a Schedule; got 3"):
        generate(*tiny, PROMPT, policy=3, max_new_tokens=4)
