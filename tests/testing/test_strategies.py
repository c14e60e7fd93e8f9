"""What the strategies promise: valid rows, the hard cases among them, readable minima."""

import math
from fractions import Fraction

import hypothesis
import pytest
import torch
from hypothesis import find, given

import cactus_theory as ct
from cactus_theory.testing import families, strategies
from tests.amounts import thorough
from tests.formulas import by_hand

ROWS = {
    "distributions": strategies.distributions(),
    "one_hot": strategies.one_hot(),
    "dirichlet": strategies.dirichlet(),
    "zipf": strategies.zipf(),
    "near_ties": strategies.near_ties(),
    "subnormal_tails": strategies.subnormal_tails(),
}
PAIRS = {
    "pairs": strategies.pairs(),
    "over_proposing": strategies.over_proposing(),
    "float32_pairs": strategies.float32_pairs(),
    "any_pairs": strategies.any_pairs(),
}
SMALLEST_NORMAL = torch.finfo(torch.float64).tiny
SEARCH = hypothesis.settings(max_examples=200, database=None, deadline=None, derandomize=True)
DRAW = hypothesis.settings(
    SEARCH, phases=[hypothesis.Phase.generate], suppress_health_check=list(hypothesis.HealthCheck)
)


def valid(row, tolerance=1e-9):
    assert row.ndim == 1 and row.dtype == torch.float64 and bool((row >= 0).all())
    assert abs(row.sum().item() - 1) <= tolerance


def draws(strategy, count=200):
    """Return what a strategy draws, nothing made small."""
    found = []
    hypothesis.settings(DRAW, max_examples=count)(
        given(strategy)(lambda value: found.append(value))
    )()
    return found


def some(found, *conditions):
    for condition in conditions:
        assert any(bool(condition(value)) for value in found)


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_distributions(name):
    given(ROWS[name])(lambda row: valid(row))()


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_share_a_vocabulary(name):
    @given(PAIRS[name])
    def check(pair):
        for row in pair:
            valid(row, 1e-6)
        assert pair[0].shape == pair[1].shape

    check()


def test_the_hard_cases_occur():
    some(
        draws(strategies.subnormal_tails()), lambda row: ((row > 0) & (row < SMALLEST_NORMAL)).any()
    )
    some(
        draws(strategies.dirichlet()),
        lambda row: len(row) > 1 and row.max() > 1 - 1e-9,
        lambda row: len(row) > 3 and row.max() < 0.3,
    )
    some(draws(strategies.zipf()), lambda row: len(row) > 3 and row.max() / row.min() > 100)
    some(
        draws(strategies.near_ties()),
        lambda row: 0 < (row.max() - row.min()) / row.max() < 1e-14,
        lambda row: row.max() == row.min(),
    )
    some(
        draws(strategies.pairs()),
        lambda pair: len(pair[0]) > 1 and torch.equal(*pair),
        lambda pair: ((pair[0] == 0) & (pair[1] > 0)).any(),
    )
    some(
        draws(strategies.budgets()),
        lambda delta: delta == 0,
        lambda delta: delta == math.inf,
        lambda delta: 1e3 <= delta <= 1e6,
        lambda delta: 1e-13 <= delta <= 1e-10,
    )


def test_drafts_that_over_propose_break_per_proposal_budgets():
    rule = ct.policy("cactus_exact", delta=0.5)

    def overspends(pair):
        emitted = ct.emitted_law(rule, *pair)
        return float(ct.divergence("kl").value(emitted, pair[0])) > 1.0

    some(draws(strategies.over_proposing()), overspends)


@given(strategies.float32_pairs())
def test_float32_rows_are_float32_numbers(pair):
    for row in pair:
        assert torch.equal(row.float().double(), row)


@given(strategies.drafted())
def test_drafted_tokens_can_be_drafted(case):
    _, draft, n = case
    assert draft[n] > 0


@given(strategies.chains())
def test_chains_fit_the_verifier(chain):
    length = len(chain.draft_token_ids)
    assert chain.target_probs.shape[0] == length + 1 and chain.draft_probs.shape[0] == length
    verdict = ct.verify_chain(
        ct.policy("speculative"),
        chain.target_probs[None],
        chain.draft_probs[None],
        chain.draft_token_ids[None],
        generator=torch.Generator().manual_seed(0),
    )
    assert verdict.num_accepted[0] <= (chain.draft_token_ids >= 0).sum()


@thorough
def test_chains_may_be_short_or_empty():
    some(
        draws(strategies.chains(), 400),
        lambda chain: len(chain.draft_token_ids) == 0,
        lambda chain: 0 < (chain.draft_token_ids >= 0).sum() < len(chain.draft_token_ids),
        lambda chain: len(chain.draft_token_ids) == 4 and (chain.draft_token_ids >= 0).all(),
    )


@pytest.mark.parametrize("name", ["pairs", "any_pairs"])
def test_minima_are_readable(name):
    smallest = find(PAIRS[name], lambda pair: not torch.equal(*pair), settings=SEARCH)
    assert len(smallest[0]) <= 3
    for x in torch.cat(smallest).tolist():
        assert abs(Fraction(x).limit_denominator(20) - x) < 1e-12, smallest


@given(families.uniform_overlaps())
def test_uniform_overlaps(known):
    settle(known)


@given(families.two_token_pairs())
def test_two_token_pairs(known):
    settle(known)


def settle(known):
    overlap = torch.minimum(known.target, known.draft).sum().item()
    assert overlap == pytest.approx(known.speculative, abs=1e-12)
    assert by_hand("kl", known.draft, known.target) == pytest.approx(known.kl, abs=1e-12)


@given(families.two_token_optima())
def test_two_token_optima(known):
    best = ct.optimal_acceptance(known.target, known.draft, delta=known.delta)
    assert best.acceptance.item() == pytest.approx(known.acceptance, abs=1e-7)
    if known.delta > 1e-9:
        torch.testing.assert_close(best.target, known.emitted, rtol=0, atol=1e-7)
    rule = ct.policy("band", delta=known.delta)
    kept = (known.draft * rule.keep(known.target, known.draft)).sum().item()
    assert kept == pytest.approx(known.acceptance, abs=1e-7)
