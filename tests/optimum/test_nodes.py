"""The band of p/P is a row, and the best one."""

import math

import numpy as np
import pytest
import torch

from cactus_theory.divergences import FDivergence, read_divergence
from cactus_theory.optimum.bands import Bands
from tests.amounts import amount, some
from tests.formulas import by_hand
from tests.rows import KINDS, pair

SPECS = ("kl", "reverse_kl", "pearson_chi2", "squared_hellinger", "jensen_shannon", "alpha:a=0.5")
PRICES = (1e-3, 0.3, 1.0, 8.0, 1e3)
MIXED = [(a, b) for a in KINDS for b in KINDS]
# where f′(∞) is finite, an edge of 1e16 and one of ∞ have the same f′ in float64
NOT_TINY = [pair for pair in MIXED if "tiny" not in pair]
# sums of a few float64 terms
ROUNDING = 1e-12
# where two float64 edges of one row have nearly the same f′
ROW = 1e-6
# edges near 500 (price 0.001) leave this of the best gain
FAR_GAIN, FLAT_GAIN = 1e-5, 1e-9
# of the interior-point solver, whose rows are as near as the root of its gap
PROGRAM = 1e-5
TIGHT = dict.fromkeys(("tol_gap_abs", "tol_gap_rel", "tol_feas"), 1e-11)
# masses moved from token to token; a slope that is off by gain/moved is seen
MOVED = (1e-2, 1e-4, 1e-6)
# the objective is of order one (times the price)
GAIN = 1e-14


def kind_of(spec: str) -> FDivergence:
    kind = read_divergence(spec)
    assert isinstance(kind, FDivergence)
    return kind


def objective(h, q, p, alive, spec, price):
    """Return Σ min(p, Ph) − ν P D(h‖q) of rows (..., V) by hand."""
    spent = by_hand(spec, h, np.broadcast_to(q, h.shape))
    return np.minimum(p, alive * h).sum(-1) - price * alive * spent


def best_exchange(h, q, p, alive, spec, price) -> float:
    """Return the most that moving mass from one token to another gains; q = 0 stays out.

    The objective is concave and a sum over tokens: a row is the best one iff no exchange gains.
    """
    tokens = np.flatnonzero(q > 0)
    changed = []
    for moved in MOVED:
        for giver in tokens[h[tokens] > moved]:
            for taker in tokens[tokens != giver]:
                row = h.copy()
                row[giver] -= moved
                row[taker] += moved
                changed.append(row)
    if not changed:
        return -math.inf
    inner = np.stack(changed)[:, tokens]
    before = objective(h[None, tokens], q[tokens], p[tokens], alive, spec, price)
    return float((objective(inner, q[tokens], p[tokens], alive, spec, price) - before).max())


def solved(q, p, alive, spec, price):
    ratios = torch.as_tensor(alive, dtype=torch.float64).expand(len(q))
    return Bands(kind_of(spec), price=price).laws(q, p, ratios)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("kinds", some(NOT_TINY, 3))
def test_no_exchange_of_mass_improves_it(spec: str, kinds: tuple[str, str]) -> None:
    q, p = pair(2, 4, seed=7, kinds=kinds)
    cases = [(v, a) for v in PRICES for a in (1.0, 0.6, 0.05, 1e-9)]
    for price, alive in some(cases, 7):
        h = solved(q, p, alive, spec, price)
        assert torch.allclose(h.sum(-1), torch.ones(2, dtype=torch.float64), atol=ROUNDING)
        assert not bool((h[q == 0] != 0).any())
        for h_row, q_row, p_row in zip(h.numpy(), q.numpy(), p.numpy(), strict=True):
            gain = best_exchange(h_row, q_row, p_row, alive, spec, price)
            steep = kind_of(spec).slope_at_infinity == math.inf
            most = GAIN * max(1.0, price) if steep else FLAT_GAIN
            most = FAR_GAIN if price < 0.01 else most
            assert gain <= most, (price, alive, gain)


# by hand, 0 below the least value of f′
INVERSE_SLOPES = {
    "kl": lambda y: math.exp(min(y - 1, 700)),
    "pearson_chi2": lambda y: max(0.0, 1 + y / 2),
}


def by_formula(q, p, alive, slopes, spec, price):
    """Return g/P of Theorem 13(4), q > 0, from a multiplier by bisection; slopes are (r_j, s_j)."""
    edge = INVERSE_SLOPES[spec]

    def row(mu):
        raised = [np.minimum(edge((s - mu) / price) * q, r * p / alive) for r, s in slopes]
        return np.max([edge(-mu / price) * q, *raised], axis=0)

    low, high = -100.0, 100.0
    for _ in range(80):
        mu = (low + high) / 2
        low, high = (mu, high) if row(mu).sum() > 1 else (low, mu)
    return row(high)


@pytest.mark.parametrize("spec", ["kl", "pearson_chi2"])
def test_the_formula_of_later_tokens_is_the_program(spec: str) -> None:
    """Theorem 13(4) with a φ of three slopes: what later tokens are worth, for any that is learned.

    The program sees φ as masses that each slope pays for, and no edges. With one slope it is the
    band of a node.
    """
    cp = pytest.importorskip("cvxpy")
    slopes, price, apart = [(0.3, 2.5), (0.6, 1.8), (1.0, 1.3)], 0.7, []
    for q, p in zip(*(each.numpy() for each in pair(amount(2, 20), 4, seed=5)), strict=True):
        for alive in (0.4, 1.0):
            g, paid = cp.Variable(4, nonneg=True), cp.Variable((3, 4), nonneg=True)
            kl, chi = cp.kl_div(g, alive * q), (g - alive * q) / np.sqrt(alive * q)
            spent = cp.sum(kl) if spec == "kl" else cp.sum_squares(chi)
            gain = np.array([s for _, s in slopes]) @ cp.sum(paid, axis=1) - price * spent
            widths = np.diff([0.0, *(r for r, _ in slopes)])[:, None]
            limits = [cp.sum(g) == alive, cp.sum(paid, axis=0) <= g, paid <= widths * p]
            cp.Problem(cp.Maximize(gain), limits).solve(solver=cp.CLARABEL, **TIGHT)
            expected = by_formula(q, p, alive, slopes, spec, price)
            np.testing.assert_allclose(g.value / alive, expected, rtol=0, atol=PROGRAM)
            one = by_formula(q, p, alive, [(1.0, 1.0)], spec, price)
            row = solved(torch.tensor(q)[None], torch.tensor(p)[None], alive, spec, price)[0]
            np.testing.assert_allclose(row, one, rtol=0, atol=ROW)
            apart.append(abs(one - expected).max())
    assert max(apart) > 100 * PROGRAM  # what later tokens are worth moves rows


def test_deterministic_rows() -> None:
    sure, other = torch.eye(3, dtype=torch.float64)[[0, 1]]
    even = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q, p = torch.stack([sure, sure, even]), torch.stack([sure, other, sure])
    for alive in (1.0, 0.3):
        h = solved(q, p, alive, "kl", 1.0)
        assert h[:2].equal(torch.stack([sure, sure]))
        assert 0.5 < h[2, 0] < 1 and torch.allclose(h[2, 1] / h[2, 2], even[1] / even[2])
    unreached = solved(q, p, 0.0, "kl", 1.0)  # taken for P = 1
    assert unreached.equal(solved(q, p, 1.0, "kl", 1.0))


def test_where_the_target_excludes_most_of_the_draft() -> None:
    """By hand: with f′(∞) = 0 and a = ν = 0.1 at the least, 0.5 + 0.8 a = 1 asks for a = 0.625."""
    q, p = (torch.tensor([row], dtype=torch.float64) for row in ([0.2, 0.8, 0], [0.5, 0.02, 0.48]))
    h = solved(q, p, 1.0, "reverse_kl", 0.1)
    assert h[0].tolist() == pytest.approx([0.5, 0.5, 0.0], abs=1e-12)
