"""Bounds at any multipliers: equal to the closed dual where that exists, beaten by no row."""

import numpy as np
import pytest
import torch

from cactus_theory.divergences import FDivergence, divergence
from solvers._constraints import CustomConstraint, Quantities
from solvers._dual import Lagrangian, lagrange_bound
from solvers._perspective import Scaled
from tests.solvers.cases import DIVERGENCES

cp = pytest.importorskip("cvxpy")

GENERATORS = [spec for spec in DIVERGENCES if isinstance(divergence(spec), FDivergence)]
EQUAL = 1e-10
ROWS = 400


def rows(seed, *shape):
    return np.random.default_rng(seed).dirichlet(np.ones(shape[-1]), size=shape[:-1])


@pytest.mark.parametrize("spec", GENERATORS)
def test_the_bound_is_the_closed_dual(spec):
    noise = np.random.default_rng(1)
    for q, p in zip(rows(2, 20, 9), rows(3, 20, 9), strict=True):
        price, level = float(noise.uniform(0.05, 3)), float(noise.uniform(-1, 1))
        lagrangian = Lagrangian.of(q, p)
        lagrangian.add_divergence(price, divergence(spec), 0.2)
        lagrangian.add_linear(level, 1.0, 1.0)
        closed = lagrange_bound(divergence(spec), q, p, 0.2, (price, level))
        assert lagrangian.bound() == pytest.approx(closed, abs=EQUAL)


@pytest.mark.parametrize("spec", GENERATORS)
def test_no_row_in_the_box_beats_the_bound(spec):
    q, p, cost = rows(4, 6), rows(5, 6), np.linspace(-1, 2, 6)
    kind, h = divergence(spec), 0.5 * rows(6, ROWS, 6) + 0.5 * rows(4, 6)
    inside = (h >= 0.3 * q).all(-1) & (h <= 2.5 * q).all(-1)
    assert inside.sum() > 20
    for seed, row in enumerate(h[inside][:20]):
        noise = np.random.default_rng(seed)
        price, level, dear = noise.uniform(0, 2), noise.uniform(-1, 1), noise.uniform(0, 1)
        spent = float(kind.value(torch.from_numpy(row), torch.from_numpy(q)))
        lagrangian = Lagrangian.of(q, p)
        lagrangian.narrow(0.3 * q, 2.5 * q)
        lagrangian.add_divergence(price, kind, spent)
        lagrangian.add_linear(dear, cost, float(cost @ row))
        lagrangian.add_linear(level, 1.0, 1.0)
        assert np.minimum(p, row).sum() <= lagrangian.bound() + EQUAL


def test_a_narrower_box_lowers_the_bound():
    q, p = rows(7, 5), rows(8, 5)
    bounds = []
    for ceiling in (3.0, 1.2):
        lagrangian = Lagrangian.of(q, p)
        lagrangian.narrow(0.0, ceiling * q)
        bounds.append(lagrangian.bound())
    assert bounds[0] == pytest.approx(np.minimum(p, 3 * q).sum())
    assert bounds[1] == pytest.approx(np.minimum(p, 1.2 * q).sum())


RULES = {
    "entropy": lambda v: cp.sum(cp.entr(v.h)) >= 1.2,
    "norm": lambda v: cp.norm(v.h - v.q, 2) <= 0.25,
    "several": lambda v: v.ratio <= 2.0,
    "divergence": lambda v: v.divergence("jensen_shannon") <= 0.05,
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_charged_by_its_tangent(name):
    q, p = rows(9, 5), rows(10, 5)
    of = Quantities(q, p, Scaled(q, p, cp.Variable(5, nonneg=True)))
    built = CustomConstraint(name, RULES[name]).build(of)
    (constraint,) = built.constraints

    def paid(h, dual):
        of.row.w.value = h / of.row.s
        return float(np.sum(dual * constraint.expr.value))

    for seed, at in enumerate(rows(12, 20, 5)):
        dual = np.random.default_rng(seed).uniform(0, 3, size=constraint.shape or None)
        constraint.dual_variables[0].save_value(dual)
        lagrangian = Lagrangian.of(q, p)
        assert built.charge(lagrangian, at)
        charged = lambda h: float(lagrangian.linear @ h) - lagrangian.constant  # noqa: B023, E731
        assert charged(at) == pytest.approx(paid(at, dual), abs=EQUAL)
        for h in rows(seed, 20, 5):  # a tangent of a convex function stays below it
            assert charged(h) <= paid(h, dual) + EQUAL
