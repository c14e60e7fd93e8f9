"""The cap holds on every answer, at every length, and is nearly reached."""

import itertools
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
    load_pair,
)
from cactus_theory.decoding.result import VerifiedRows
from cactus_theory.testing import assert_schedule_properties
from simulations.common.inputs import PAIR, PROMPTS, load_prompts
from simulations.markov import markov_pair
from tests.amounts import THOROUGH, amount, some
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


@pytest.mark.skipif(
    not THOROUGH, reason="500 answers of the shipped pair; run by make test-thorough"
)
@pytest.mark.parametrize("verifier", ["chain", "block"])
@pytest.mark.parametrize("cap", [0.02, 0.1])
def test_no_prefix_of_500_real_answers_is_over_its_cap(verifier, cap):
    pair, given = load_pair(PAIR / "target", PAIR / "draft"), load_prompts(PROMPTS, PAIR / "target")
    ids, mask = padded(given)
    shares = []
    while len(shares) < 500:
        result = generate(
            pair.target, pair.draft, ids, attention_mask=mask, policy=Ledger("band:price=0.5", cap),
            verifier=verifier, num_draft_tokens=4, max_new_tokens=32, seed=len(shares),
            eos_token_ids=(0, 199),
        )  # fmt: skip
        shares += check_cap(result, [cap] * len(given), [0.0] * len(given))
    assert sum(shares) / len(shares) > 0.7


def test_no_decode_of_a_tiny_model_is_over_the_cap():
    """Every draft, every number of accepted tokens, every next token, up to the last text."""
    pair, cap, length, width = markov_pair(2, seed=3, distance=2.0), 0.05, 6, 2
    ledger = Ledger("band:price=0.3", cap)
    begun, seen, most = [((), ledger.begin([0]), 0.0)], set(), 0.0
    while begun:
        text, state, spent = begun.pop()
        here = min(width, length - len(text) - 1)
        if (text, round(spent, 9)) in seen or len(text) >= length:
            continue
        seen.add((text, round(spent, 9)))
        for tokens in itertools.product(range(2), repeat=here):
            draft = torch.tensor(tokens, dtype=torch.int64)
            states = [0 if not text else text[-1], *draft[:-1].tolist()][:here]
            q, p = pair.target[states], pair.draft[states]
            choice = ledger.choose_by_rows(state, draft, q, p).tolist()
            charges = [
                float(KL.value(ledger.rules[own].emitted(*row), row[0]))
                for own, *row in zip(choice, q, p, strict=True)
            ]
            offered = dict(state.offered)
            for kept in range(here + 1):
                count = min(kept + 1, here)
                now = spent + sum(charges[:count])
                assert now <= cap * (len(text) + kept + 1)
                most = max(most, now / (cap * (len(text) + kept + 1)))
                rows = VerifiedRows(q[:count], p[:count], draft[:count], torch.ones(count).bool())
                for last in range(2):
                    state.offered.update(offered)
                    new = [*draft[:kept].tolist(), last]
                    after = ledger.advance(ledger.observe(state, rows), new)
                    begun.append(((*text, *new), after, now))
    assert len(seen) > 150 and most > 0.98


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
        (lambda: Ledger("soft_band:price=1", 0.1), "policy: a ledger needs .* got soft_band"),
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
