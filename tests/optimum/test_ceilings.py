"""Edges of the best row under a ceiling c on each token's h/q, against the program as posed."""

import math

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.optimum.edges import edges
from tests.formulas import by_hand
from tests.rows import pair

# of the interior-point solver, in the acceptance and in what it costs
PROGRAM = 1e-7
ROUNDING = 1e-12
TIGHT = dict.fromkeys(("tol_gap_abs", "tol_gap_rel", "tol_feas"), 1e-9)
DELTAS, PRICES = (0.0, 0.01, 0.3, 50.0), (0.0, 0.05, 0.4, 2.0, math.inf)


def rows(count: int = 4):
    """Return q with zeros, p, and ceilings of 1, of ∞ and between."""
    q, p = pair(count, 6, seed=4, kinds=("zeros", "smooth"))
    source = torch.Generator().manual_seed(9)
    between = 1 + 2 * torch.rand(q.shape, generator=source, dtype=torch.float64)
    which = torch.randint(3, q.shape, generator=source)
    return q, p, torch.where(which == 0, 1.0, torch.where(which == 1, math.inf, between))


def capped(q, p, lower, upper, ceiling):
    """Return clip(p, aq, min(b, c)q), nothing where q = 0."""
    most = torch.where(q > 0, torch.minimum(upper, ceiling) * torch.where(q > 0, q, 1.0), 0.0)
    return torch.minimum(torch.maximum(p, lower * q), most)


def by_program(q, p, c, spec, delta, price):
    """Return Σ min(p, h), or that less price × divergence, at its largest."""
    cp = pytest.importorskip("cvxpy")
    inside = q > 0
    q, p, c = q[inside], p[inside], c[inside]
    h = cp.Variable(len(q), nonneg=True)
    spent = cp.sum(cp.kl_div(h, q) if spec == "kl" else cp.power((h - q) / np.sqrt(q), 2))
    accepted = cp.sum(cp.minimum(p, h))
    limited = np.isfinite(c)
    limits = [cp.sum(h) == 1, h[limited] <= (c * q)[limited]]
    gain = accepted if price is None else accepted - price * spent
    limits += [spent <= delta] if price is None else []
    cp.Problem(cp.Maximize(gain), limits).solve(solver=cp.CLARABEL, **TIGHT)
    return float(gain.value)


@pytest.mark.parametrize("alive", [1.0, 0.4])
@pytest.mark.parametrize("spec", ["kl", "pearson_chi2"])
@pytest.mark.parametrize("knob", [{"delta": d} for d in DELTAS] + [{"price": v} for v in PRICES])
def test_no_row_under_the_ceiling_is_better(spec, knob, alive):
    """At a node that is reached with the alive ratio P, too, of p/P."""
    q, p, ceiling = rows()
    ratios = torch.full(q.shape[:1], alive, dtype=torch.float64)
    ends = edges(q, p, spec, **knob, ceiling=ceiling, alive=ratios)
    p = p / alive
    h = capped(q, p, *ends, ceiling)
    assert (h.sum(-1) - 1).abs().max() <= ROUNDING and (h <= ceiling * q + ROUNDING)[q > 0].all()
    delta, price = knob.get("delta"), knob.get("price")
    accepted, spent = torch.minimum(p, h).sum(-1).numpy(), by_hand(spec, h.numpy(), q.numpy())
    if delta == 0 or price == math.inf:
        assert h.equal(q)
        return
    if delta is not None:
        assert (spent <= delta + ROUNDING).all()
    gained = accepted if price is None else accepted - price * spent
    for row, gain in enumerate(gained):
        best = by_program(*(each[row].numpy() for each in (q, p, ceiling)), spec, delta, price)
        assert gain == pytest.approx(best, abs=PROGRAM)


@pytest.mark.parametrize("knob", [{"price": 0.0}, {"delta": math.inf}])
def test_without_a_limit_the_row_is_the_capped_end_and_not_the_draft(knob):
    q, p = (torch.tensor([row], dtype=torch.float64) for row in ([0.5, 0.3, 0.2], [0.1, 0.2, 0.7]))
    ceiling = torch.tensor([[math.inf, 1.0, 2.0]], dtype=torch.float64)
    h = capped(q, p, *edges(q, p, "kl", **knob, ceiling=ceiling), ceiling)
    # token 2 stops at 0.4; the 0.6 left is a(0.5 + 0.3) = 0.6 on the others
    assert h[0].tolist() == pytest.approx([0.375, 0.225, 0.4], abs=ROUNDING)


@pytest.mark.parametrize("knob", [{"price": 0.0}, {"price": 0.4}, {"delta": 0.3}])
def test_where_no_token_may_rise_the_row_is_the_target(knob):
    q, p, ceiling = rows()
    ceiling = torch.where(p > q, 1.0, ceiling)
    h = capped(q, p, *edges(q, p, "kl", **knob, ceiling=ceiling), ceiling)
    assert (h - q).abs().max() <= ROUNDING


def test_a_constant_ceiling_without_a_limit_is_lenience():
    q, p, _ = rows()
    ceiling = torch.full_like(q, 1.25)
    h = capped(q, p, *edges(q, p, "kl", price=0.0, ceiling=ceiling), ceiling)
    lenient = ct.emitted_law(ct.policy("lenience", lenience=0.8), q, p)
    assert torch.minimum(p, h).sum(-1).numpy() == pytest.approx(
        torch.minimum(p, lenient).sum(-1).numpy(), abs=ROUNDING
    )
