"""A policy between markers: where it starts and ends, and that nothing is spent outside."""

import math

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.decoding import (
    Between,
    Callbacks,
    ModelDrafter,
    Schedule,
    Siblings,
    generate,
)
from cactus_theory.verify import Chain
from cactus_theory.verify.node import Node
from tests.amounts import amount, some
from tests.decoding.test_ragged import padded, prompts
from tests.kits.schedules import assert_schedule_properties

# (3, 9, 4) ends where (9, 4) ends, which then counts
OPENING, CLOSING = [(7, 7), 5, (3, 9, 4), (3, 9, 3)], [(9, 4), 8]
MARKED = Between("cactus:delta=5", opening=OPENING, closing=CLOSING)


def by_definition(text):
    """For each token: is the latest marker that ends before it an opening one?"""
    flags = []
    for length in range(len(text)):
        inside = False
        for end in range(length, 0, -1):
            ends = [
                [1 for m in kind if tuple(text[: end][-size(m):]) == ids(m) and end >= size(m)]
                for kind in (OPENING, CLOSING)
            ]  # fmt: skip
            if ends[0] or ends[1]:
                inside = not ends[1]
                break
        flags.append(inside)
    return flags


def ids(marker):
    return (marker,) if isinstance(marker, int) else marker


def size(marker):
    return len(ids(marker))


def test_markers_of_several_tokens_rule_by_their_definition():
    """However a text is cut into prompt, rounds and a draft."""
    source = torch.Generator().manual_seed(0)
    inside = 0
    for _ in range(amount(60, 1000)):
        text = torch.randint(3, 10, (12,), generator=source)
        expected = by_definition(text.tolist())
        cuts = torch.randint(0, 13, (2,), generator=source).sort().values.tolist()
        state = MARKED.begin(text[: cuts[0]].tolist())
        chosen = MARKED.choose(state, text[cuts[0] :]).tolist()
        assert chosen == [int(own) for own in expected[cuts[0] :]]
        state = MARKED.advance(state, text[cuts[0] : cuts[1]].tolist())
        assert MARKED.choose(state, text[cuts[1] :]).tolist() == chosen[cuts[1] - cuts[0] :]
        inside += sum(chosen)
    assert inside > 100


class Drafts:
    """Counts drafts in which a closing marker stands with drafted tokens after it."""

    def __init__(self):
        self.closed_inside = 0

    def __call__(self, q, draft, places, before):
        for row, count in enumerate(draft.lengths):
            drafted = draft.token_ids[row, : max(count - 1, 0)].tolist()
            self.closed_inside += any(token in (11, 8, 14) for token in drafted)


CASES = [
    (verifier, policy, deterministic)
    for verifier in ("chain", "block")
    for policy in ("band:price=0.3", "cactus:delta=2")
    for deterministic in (False, True)
]


@pytest.mark.parametrize(("verifier", "policy", "deterministic"), some(CASES, 3))
def test_tokens_outside_are_the_targets_and_cost_exactly_nothing(
    tiny, verifier, policy, deterministic
):
    """The meter's own charge of every token, and ln h against ln q, both without a tolerance."""
    section = Between(policy, opening=[3, 9, (4, 4), 5, 17], closing=[11, (8,), 14])
    drafts, inside, outside = Drafts(), 0.0, 0
    for trial in range(amount(1, 20)):
        given, mask = padded(prompts(seed=trial))
        result = generate(
            tiny[0], ModelDrafter(tiny[1], greedy=deterministic), given, attention_mask=mask,
            policy=section, verifier=verifier, num_draft_tokens=6, max_new_tokens=40, seed=trial,
            log_probs=True, callbacks=Callbacks(on_rows=drafts),
        )  # fmt: skip
        for row, (prompt, shown) in enumerate(zip(given, mask, strict=True)):
            state = section.begin(prompt[shown.bool()].tolist())
            for place, token in enumerate(result.output_token_ids[row].tolist()):
                cost = float(result.token_charges[row, place])
                if state.open:
                    inside += cost
                else:
                    scored = result.log_probs
                    assert cost == 0.0 and scored.target[row, place] == scored.emitted[row, place]
                    outside += 1
                state = section.advance(state, [token])
    assert inside > 0.5 and outside > 25 and drafts.closed_inside > amount(0, 10)


def test_it_looks_at_nothing_that_it_must_not_know():
    assert_schedule_properties(MARKED, examples=amount(20, 200))


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

    def observe(self, state, nodes):
        judged = [node for node in nodes if node.drafted]
        expected = self.choose(state, torch.arange(len(judged))).tolist()
        policies = tuple(node.policy for node in judged)
        assert policies == tuple(self.policies[number] for number in expected)
        self.taken += policies
        self.spent += math.fsum(node.charge().spent for node in nodes)
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
        ("tree", BOTH, "siblings"),
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
    assert math.fsum(node.charge().spent for node in found.rows) == pytest.approx(
        found.reading.emitted_divergence, rel=1e-12
    )


def test_charges_are_those_of_rows_that_sum_to_one():
    """Rows of half precision miss 1 by some thousandths: they are divided by their sums."""
    q, p = np.array([0.2, 0.3, 0.5]), np.array([0.6, 0.3, 0.1])
    band = Chain(), ct.policy("band:price=1")
    exact, near = (
        Node(*band, *rows, 0).charge().spent for rows in ((q, p), (q * 1.002, p * 0.997))
    )
    assert exact > 0.01 and near == pytest.approx(exact, rel=1e-12)
