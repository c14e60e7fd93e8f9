"""Programs whose divergences are one another under two names give one answer."""

import numpy as np
import pytest

from cactus_theory.divergences import divergences
from cactus_theory.divergences.definition import examples
from solvers import optimal, per_proposal
from tests.solvers.cases import DIVERGENCES

Q, P = np.array([0.4, 0.3, 0.2, 0.1, 0.0]), np.array([0.1, 0.15, 0.3, 0.4, 0.05])
PAIRS = [(2, "pearson_chi2", 0.5), (0.5, "squared_hellinger", 2.0), (-1, "neyman_chi2", 0.5)]


def test_every_divergence_is_compared():
    assert {spec.partition(":")[0] for spec in DIVERGENCES} == set(divergences())
    assert set(examples()) <= set(DIVERGENCES)


@pytest.mark.parametrize("support", optimal.SUPPORTS)
@pytest.mark.parametrize("order, name, share", PAIRS)
def test_the_optimal_program(order, name, share, support):
    one = optimal.solve(Q, P, name, delta=0.1, support=support)
    other = optimal.solve(Q, P, f"alpha:a={order}", delta=share * 0.1, support=support)
    assert one.acceptance == pytest.approx(other.acceptance, abs=1e-7)
    assert one.price == pytest.approx(share * other.price, rel=1e-3)
    np.testing.assert_allclose(one.target, other.target, atol=1e-4)


@pytest.mark.parametrize("order, name, share", PAIRS)
def test_the_per_proposal_program(order, name, share):
    one = per_proposal.solve(Q, 3, divergence=name, delta=0.1)
    other = per_proposal.solve(Q, 3, divergence=f"alpha:a={order}", delta=share * 0.1)
    assert one.raised == pytest.approx(other.raised, abs=1e-7)
    assert one.price == pytest.approx(share * other.price, rel=1e-3)
