"""What the strategies promise: valid rows, the hard cases among them, readable minima."""

import math
from fractions import Fraction

import hypothesis
import pytest
import torch
from hypothesis import find, given

import cactus_theory as ct
from cactus_theory.testing import strategies

ROWS = {
    "distributions": strategies.distributions(),
    "one_hot": strategies.one_hot(),
    "near_ties": strategies.near_ties(),
    "subnormal_tails": strategies.subnormal_tails(),
}
PAIRS = {
    "pairs": strategies.pairs(),
    "over_proposing": strategies.over_proposing(),
    "any_pairs": strategies.any_pairs(),
}
SMALLEST_NORMAL = torch.finfo(torch.float64).tiny
SEARCH = hypothesis.settings(max_examples=200, database=None, deadline=None, derandomize=True)
DRAW = hypothesis.settings(
    SEARCH, phases=[hypothesis.Phase.generate], suppress_health_check=list(hypothesis.HealthCheck)
)


def draws(strategy, count=200):
    found = []
    hypothesis.settings(DRAW, max_examples=count)(
        given(strategy)(lambda value: found.append(value))
    )()
    return found


@pytest.mark.parametrize("name", [*ROWS, *PAIRS])
def test_rows_are_distributions_and_pairs_share_a_vocabulary(name):
    @given((ROWS | PAIRS)[name])
    def check(drawn):
        rows, tolerance = ((drawn,), 1e-9) if name in ROWS else (drawn, 1e-6)
        for row in rows:
            assert row.ndim == 1 and row.dtype == torch.float64 and bool((row >= 0).all())
            assert row.shape == rows[0].shape and abs(row.sum().item() - 1) <= tolerance

    check()


def overspends(pair):
    """Return whether a budget of half a nat a proposal lets the emitted law spend more than one."""
    emitted = ct.emitted_law(ct.policy("cactus_exact", delta=0.5), *pair)
    return float(ct.divergence("kl").value(emitted, pair[0])) > 1.0


HARD = {
    "subnormal_tails": [lambda row: ((row > 0) & (row < SMALLEST_NORMAL)).any()],
    "distributions": [
        lambda row: len(row) > 1 and row.max() > 1 - 1e-9,
        lambda row: len(row) > 3 and row.max() < 0.3,
        lambda row: len(row) > 3 and row.max() / row.min() > 100,
    ],
    "near_ties": [
        lambda row: 0 < (row.max() - row.min()) / row.max() < 1e-14,
        lambda row: row.max() == row.min(),
    ],
    "pairs": [
        lambda pair: len(pair[0]) > 1 and torch.equal(*pair),
        lambda pair: ((pair[0] == 0) & (pair[1] > 0)).any(),
    ],
    "over_proposing": [overspends],
    "budgets": [
        lambda delta: delta == 0,
        lambda delta: delta == math.inf,
        lambda delta: 1e3 <= delta <= 1e6,
        lambda delta: 1e-13 <= delta <= 1e-10,
    ],
}


@pytest.mark.parametrize("name", HARD)
def test_the_hard_cases_occur(name):
    found = draws(getattr(strategies, name)())
    for holds in HARD[name]:
        assert any(bool(holds(value)) for value in found)


@pytest.mark.parametrize("name", ["pairs", "any_pairs"])
def test_minima_are_readable(name):
    smallest = find(PAIRS[name], lambda pair: not torch.equal(*pair), settings=SEARCH)
    assert len(smallest[0]) <= 3
    for x in torch.cat(smallest).tolist():
        assert abs(Fraction(x).limit_denominator(20) - x) < 1e-12, smallest
