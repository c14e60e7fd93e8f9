"""The band's edges without a sort: the same edges, and found without falling back on the sort."""

import pytest
import torch

import cactus_theory as ct
from cactus_theory.optimum.newton import newton_for_budget, newton_for_price
from cactus_theory.divergences import FDivergence, divergence
from tests.formulas import ALL
from tests.rows import pair

SMOOTH = [
    spec for spec in ALL if isinstance(divergence(spec), FDivergence) and spec != "total_variation"
]
# rows, and edges: where little is cut an edge may be off further than what it cuts
CLOSE, EDGE = 1e-8, 1e-6
KINDS = (("smooth", "smooth"), ("spiky", "smooth"))


@pytest.mark.parametrize("spec", SMOOTH)
@pytest.mark.parametrize("delta", [1e-3, 0.05])
def test_a_budget(spec, delta):
    q, p = pair(20, 30, seed=8)
    best = ct.optimal_acceptance(q, p, divergence=spec, delta=delta)
    found = edges_for_budget(q, p, divergence(spec), torch.full((20,), delta).double())
    # a step may hop to and fro over a ratio: a few rows are left to the sort
    assert found.done.double().mean() > 0.4
    settled = found.done & torch.isfinite(found.upper)
    assert settled.any()
    for edge, expected in ((found.lower, best.lower), (found.upper, best.upper)):
        torch.testing.assert_close(edge[settled], expected[settled], rtol=EDGE, atol=0)
    rows = ct.policy("band", delta=delta, divergence=spec).target(q, p)
    torch.testing.assert_close(rows, best.target, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("price", [0.3, 1.0, 2.0, 7.0])
@pytest.mark.parametrize("kinds", KINDS)
def test_a_price(price, kinds):
    q, p = pair(20, 30, seed=8, kinds=kinds)
    best = ct.optimal_acceptance(q, p, price=price)
    found = edges_for_kl_price(q, p, price)
    assert found.done.all()
    inside = best.price > 0
    torch.testing.assert_close((found.upper / found.lower).log() * price, torch.ones(20).double())
    assert not inside.any() or (best.price[inside] - price).abs().max() < 1e-7 * price
    rows = ct.policy("band", price=price).target(q, p)
    torch.testing.assert_close(rows, best.target, rtol=0, atol=CLOSE)
