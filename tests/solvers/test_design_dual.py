"""Large designs by their dual: what a conic solver finds, proven, in no time."""

import numpy as np
import pytest

from cactus_theory.divergences import FDivergence, read_divergence
from solvers import _design_dual
from solvers.design import Design
from tests.amounts import some
from tests.solvers.cases import DIVERGENCES

pytest.importorskip("cvxpy")

SMOOTH = [
    spec
    for spec in DIVERGENCES
    if isinstance(read_divergence(spec), FDivergence) and read_divergence(spec).smooth
]
# a conic solver's own
VALUE, PRICE = 1e-6, 2e-3


def rows(size, seed=3, sharpness=1.5):
    noise = np.random.default_rng(seed)
    logits = sharpness * noise.standard_normal(size)
    moved = np.exp(np.stack([logits, logits + noise.standard_normal(size)]))
    return (*(moved / moved.sum(-1, keepdims=True)), noise.standard_normal(size))


def designed(spec, size=40):
    q, p, values = rows(size)
    limited = Design(q, p).cap(3.0).protect([1, 2]).floor({3: 1.5 * q[3]})
    expected = limited.expect(values, at_most=float(values @ q) - 0.05, name="first")
    return expected.expect(values**2, at_least=0.1, name="second").budget(spec, 0.01)


@pytest.mark.parametrize("spec", some(SMOOTH, 4))
def test_it_is_what_a_conic_solver_finds(monkeypatch, spec):
    conic = designed(spec).solve()
    monkeypatch.setattr(_design_dual, "SMALL", 1)
    row = designed(spec).solve()
    assert (row.solver, row.proof) == ("lagrange dual", "dual bound")
    assert abs(row.gap) < VALUE / 100 and conic.solver == "CLARABEL"
    assert row.acceptance == pytest.approx(conic.acceptance, abs=VALUE)
    for name, price in conic.duals.items():
        assert row.duals[name] == pytest.approx(price, rel=PRICE, abs=PRICE)


def test_a_real_vocabulary_takes_no_conic_solver():
    q, p, values = rows(20_000, sharpness=3.0)
    limit = float(values @ q) - 0.1
    row = Design(q, p).budget("kl", 0.1).expect(values, at_most=limit).solve()
    assert row.solver == "lagrange dual" and abs(row.gap) < VALUE / 100
    assert row.target @ values <= limit + 1e-7 and row.duals["expectation"] > 0


def test_a_wrong_dual_is_noticed_and_a_conic_solver_follows(monkeypatch):
    monkeypatch.setattr(_design_dual, "SMALL", 1)
    right = _design_dual.Dual.solve

    def wrong(dual):
        multipliers, h = right(dual)
        return 1.1 * multipliers, h

    monkeypatch.setattr(_design_dual.Dual, "solve", wrong)
    assert designed("kl").solve().solver == "CLARABEL"


def test_a_budget_without_end_needs_no_dual(monkeypatch):
    monkeypatch.setattr(_design_dual, "SMALL", 1)
    q, p, values = rows(20)
    row = Design(q, p).budget("kl", np.inf).expect(values, at_most=0.5).solve()
    assert row.solver == "HIGHS"
