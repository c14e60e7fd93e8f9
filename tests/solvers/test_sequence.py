"""One budget over many positions: the program finds what one price on all rows reaches."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cactus_theory as ct
from solvers import optimal, sequence
from tests.amounts import amount, some
from tests.solvers.cases import DIVERGENCES, pairs

# a conic solver's own, of a value and of what it keeps; a dual value has half the digits
VALUE, KEPT, PRICE = 1e-6, 1e-7, 1e-3
SUMMED = tuple(s for s in DIVERGENCES if not s.startswith(("renyi", "max")))
PRICED = tuple(s for s in SUMMED if s != "total_variation")
Q = np.array([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]])
P = np.array([[0.2, 0.7, 0.1], [0.2, 0.2, 0.6]])


def batches():
    """Return lists of pairs padded with zeros to one vocabulary, as two arrays."""
    return st.lists(pairs(), min_size=1, max_size=4).map(_stacked)


def _stacked(rows):
    width = max(len(q) for q, _ in rows)
    return tuple(
        np.stack([np.pad(row[side], (0, width - len(row[side]))) for row in rows])
        for side in (0, 1)
    )


@pytest.mark.parametrize("spec", some(PRICED, 3))
@settings(max_examples=amount(3, 100))
@given(batches(), st.floats(0.02, 1.0))
def test_the_best_split_pays_one_price_everywhere(spec, rows, delta):
    q, p = rows
    program = sequence.solve(q, p, spec, delta=delta)
    bands = ct.pooled_acceptance(q, p, divergence=spec, delta=delta / len(q))
    assert program.total_acceptance == pytest.approx(len(q) * bands.mean_acceptance, abs=VALUE)
    assert program.total_divergence <= delta + KEPT and abs(program.gap) <= VALUE
    assert program.target.sum(-1) == pytest.approx(np.ones(len(q)), abs=1e-12)
    assert not program.target[q == 0].any()
    if bands.price > 1e-3 and len(q) * bands.mean_divergence > delta - KEPT:
        assert program.price == pytest.approx(bands.price, rel=PRICE)
        np.testing.assert_allclose(program.divergence, bands.divergence, atol=1e-3)


@pytest.mark.parametrize("spec", ["kl", "reverse_kl"])
def test_a_deterministic_draft_at_one_position_leaves_the_others_their_reward(spec):
    q = np.array([[1.0, 0.0, 0.0], [0.0, 0.5, 0.5]])
    p = np.array([[1.0, 0.0, 0.0], [0.0, 0.7, 0.3]])
    both = sequence.solve(q, p, spec, delta=0.01)
    alone = sequence.solve(q[1:], p[1:], spec, delta=0.01)
    assert both.total_acceptance == pytest.approx(1 + alone.total_acceptance, abs=VALUE)


def test_a_small_price_has_its_digits():
    """Read off the first answer, whose bound is tight to 6e-10, it is 0.2 % off."""
    q, p = np.array([[3.34145418e-4, 3.5924018e-3, 0.9960734527]]), np.array([[0.0, 7e-4, 0.9993]])
    bands = ct.pooled_acceptance(q, p, divergence="neyman_chi2", delta=0.02, normalise=True)
    assert 1e-3 < bands.price < 2e-3
    q, p = (row / row.sum() for row in (q, p))
    program = sequence.solve(q, p, "neyman_chi2", delta=0.02)
    assert program.price == pytest.approx(bands.price, rel=PRICE)


def test_total_variation_buys_the_same_wherever_it_is_spent():
    noise = np.random.default_rng(6)
    q, p = (noise.dirichlet(np.ones(6), size=4) for _ in range(2))
    program = sequence.solve(q, p, "total_variation", delta=0.3)
    lossless = np.minimum(q, p).sum()
    assert program.total_acceptance == pytest.approx(lossless + 0.3, abs=1e-9)
    assert program.price == pytest.approx(1) and program.solver == "HIGHS"


@pytest.mark.parametrize("spec", SUMMED)
def test_one_position_is_the_optimal_program(spec):
    q, p = np.array([0.5, 0.3, 0.2, 0.0]), np.array([0.2, 0.5, 0.2, 0.1])
    one = optimal.solve(q, p, spec, delta=0.05)
    program = sequence.solve(q[None], p[None], spec, delta=0.05)
    assert program.total_acceptance == pytest.approx(one.acceptance, abs=VALUE)
    assert program.price == pytest.approx(one.price, rel=PRICE, abs=1e-6)


def test_the_ends():
    strict = sequence.solve(Q, P, delta=0)
    np.testing.assert_allclose(strict.target, Q, rtol=1e-15)
    assert (strict.price, strict.gap, strict.solver) == (math.inf, 0.0, "identity")
    assert sequence.solve(Q, Q, delta=0).price == 0
    for delta in (9.0, math.inf):
        whole = sequence.solve(Q, P, delta=delta)
        assert whole.total_acceptance == pytest.approx(2, abs=VALUE)
        assert whole.price == pytest.approx(0, abs=VALUE)
