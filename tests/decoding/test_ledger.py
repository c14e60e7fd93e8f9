"""The cap holds on every answer, at every length, and is nearly reached."""

import math

import pytest
import torch

import cactus_theory as ct
from cactus_theory.decoding import (
    Between,
    ByPosition,
    Ledger,
    ModelDrafter,
    generate,
)
from cactus_theory.testing import assert_schedule_properties
from tests.amounts import amount, some
from tests.decoding.test_ragged import padded, prompts

KL = ct.divergence("kl")
ENDS = (7, 13, 15)
OPTIONS = {"max_new_tokens": 24, "num_draft_tokens": 5, "eos_token_ids": ENDS}
# made-up rounds are booked in another order than the ledger's own sums
ROUNDING = 1e-12


def check_cap(result, caps, bursts):
    """Every prefix of every answer, without a tolerance; return the shares of the caps used."""
    shares = []
    rows = zip(result.token_charges, result.row_lengths, caps, bursts, strict=True)
    for costs, length, cap, burst in rows:
        allowed = cap * torch.arange(1, length + 1, dtype=torch.float64) + burst
        assert bool((costs[:length].cumsum(0) <= allowed).all())
        shares.append(float(costs.sum() / allowed[-1]))
    assert result.reading.emitted_divergence == pytest.approx(
        float(result.token_charges.sum()), abs=ROUNDING * 1e3
    )
    return shares


CASES = [("chain", False), ("block", False), ("chain", True), ("block", True)]


@pytest.mark.parametrize(("verifier", "certain"), some(CASES, 3))
def test_no_prefix_of_an_answer_is_over_its_cap(tiny, verifier, certain):
    """Rows of a batch with policies, caps and bursts of their own; most end by themselves."""
    caps = [0.02, 0.05, 0.1, 0.3, 0.05, 0.1, 0.02]
    bursts = [0.0, 0.0, 0.0, 0.0, 0.2, 0.05, 0.0]
    specs = ["band:price=0.3", "cactus:delta=1", "band:delta=0.3", "mixture:alpha=0.7"]
    kinds = [ByPosition([(0, "band:price=0.4"), (9, "cactus:delta=0.5")]), *specs, *specs[:2]]
    policies = [Ledger(k, c, burst=b) for k, c, b in zip(kinds, caps, bursts, strict=True)]
    shares, lengths, free = [], set(), 0.0
    for trial in range(amount(2, 20)):
        ids, mask = padded(prompts(seed=trial))
        given = {"attention_mask": mask, "verifier": verifier, "seed": trial, **OPTIONS}
        drafter = ModelDrafter(tiny[1], greedy=certain)
        result = generate(tiny[0], drafter, ids, policy=policies, **given)
        shares += check_cap(result, caps, bursts)
        lengths |= set(result.row_lengths)
        free += generate(
            tiny[0], drafter, ids, policy="cactus:delta=1", **given
        ).reading.emitted_divergence
    assert len(lengths) > 4 and free > 1
    assert max(shares) > 0.95 and sum(shares) / len(shares) > 0.4


def test_without_a_cap_to_spend_it_is_lossless(tiny):
    for verifier in ("chain", "block"):
        ids, mask = padded(prompts(seed=1))
        given = {"attention_mask": mask, "verifier": verifier, "seed": 5, **OPTIONS}
        strict = generate(*tiny, ids, policy="speculative", **given)
        capped = generate(*tiny, ids, policy=Ledger("band:price=0.3", 0.0), **given)
        assert capped.output_token_ids.tolist() == strict.output_token_ids.tolist()
        assert not capped.token_charges.any()


@pytest.mark.parametrize("policy", ["cactus:delta=0.5", "band:price=1"])
def test_with_enough_to_spend_it_is_the_policy(tiny, policy):
    ids, mask = padded(prompts(seed=1))
    given = {"attention_mask": mask, "seed": 5, **OPTIONS}
    free = generate(*tiny, ids, policy=policy, **given)
    capped = generate(*tiny, ids, policy=Ledger(policy, 1.0, burst=100.0), **given)
    assert capped.output_token_ids.tolist() == free.output_token_ids.tolist()
    assert capped.reading.emitted_divergence == pytest.approx(
        free.reading.emitted_divergence, rel=1e-9
    )


@pytest.mark.parametrize("verifier", ["chain", "block"])
def test_a_ledger_inside_a_section_spends_nothing_outside(tiny, verifier):
    section = Between("band:price=0.3", opening=[3, (9, 4)], closing=[11, (8,)])
    ids, mask = padded(prompts(seed=4))
    cap = 0.03
    result = generate(
        *tiny, ids, attention_mask=mask, policy=Ledger(section, cap), verifier=verifier,
        num_draft_tokens=5, max_new_tokens=60, seed=2,
    )  # fmt: skip
    check_cap(result, [cap] * len(ids), [0.0] * len(ids))
    rows = zip(ids, mask, result.output_token_ids.tolist(), result.token_charges, strict=True)
    for prompt, shown, new, costs in rows:
        state = section.begin(prompt[shown.bool()].tolist())
        for token, cost in zip(new, costs.tolist(), strict=True):
            assert state.open or cost == 0.0
            state = section.advance(state, [token])
    assert result.reading.emitted_divergence > 0.1


def test_it_looks_at_nothing_that_it_must_not_know():
    for ledger in (
        Ledger("band:price=0.5", 0.05),
        Ledger(Between("cactus:delta=1", opening=[7, (3, 4)], closing=(8, 9)), 0.1, burst=0.3),
    ):
        assert_schedule_properties(ledger, examples=amount(4, 50))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Ledger("band:price=1", -0.1), "cap: must lie in .* got -0.1"),
        (lambda: Ledger("band:price=1", math.inf), "cap: must be finite; got inf"),
        (lambda: Ledger("band:price=1", 0.1, burst=-1), "burst: must lie in .* got -1"),
    ],
)
def test_refuses_ledgers_that_keep_no_books(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    "schedule",
    [Ledger("band:price=1", 0.1), Between("band:price=1", opening=3, closing=4)],
)
def test_refuses_bonus_tokens_that_it_has_not_seen(tiny, schedule):
    with pytest.raises(ValueError, match="needs bonus tokens from the target's row"):
        generate(
            *tiny, torch.tensor([[1, 5]]), policy=schedule, max_new_tokens=4,
            verifier="block:bonus=policy",
        )  # fmt: skip
