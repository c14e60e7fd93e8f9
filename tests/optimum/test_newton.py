"""The band's edges without a sort: the same edges, and found without falling back on the sort."""

import pytest
import torch

import cactus_theory as ct
from cactus_theory.divergences import FDivergence, divergence
from cactus_theory.optimum import solve
from cactus_theory.optimum.geometry import geometry_of
from cactus_theory.optimum.newton import newton_edges
from tests.amounts import some
from tests.formulas import ALL
from tests.rows import pair

SMOOTH = [
    spec for spec in ALL if isinstance(divergence(spec), FDivergence) and spec != "total_variation"
]
# rows, and edges: where little is cut an edge may be off further than what it cuts
CLOSE, EDGE = 1e-8, 1e-6
KINDS = (("smooth", "smooth"), ("spiky", "smooth"))


def sorted_band(q, p, kind, knob, amount):
    """Return the bands by the reference, whatever Newton would have edges."""
    amounts = torch.full(q.shape[:1], amount, dtype=torch.float64)
    geometry = geometry_of(q, p, kind)
    return solve.Band(geometry, solve._sorted(geometry, knob, amounts))


@pytest.mark.parametrize("spec", SMOOTH)
@pytest.mark.parametrize("delta", [1e-3, 0.05])
def test_a_budget(spec, delta):
    q, p = pair(20, 30, seed=8)
    reference = sorted_band(q, p, divergence(spec), "delta", delta)
    best = reference.edges
    edges, settled = newton_edges(
        q, p, divergence(spec), "delta", torch.full((20,), delta).double()
    )
    # a step may hop to and fro over a ratio: a few rows are left to the sort
    assert settled.double().mean() > 0.4
    assert settled.any()
    for edge, expected in ((edges.lower, best.lower), (edges.upper, best.upper)):
        torch.testing.assert_close(edge[settled], expected[settled], rtol=EDGE, atol=0)
    rows = ct.policy("band", delta=delta, divergence=spec).target(q, p)
    torch.testing.assert_close(rows, reference.rows(), rtol=0, atol=CLOSE)


@pytest.mark.parametrize("spec", some(SMOOTH, 3))
@pytest.mark.parametrize("price", some([0.3, 1.0, 2.0, 7.0], 2))
@pytest.mark.parametrize("kinds", KINDS)
def test_a_price(spec, price, kinds):
    q, p = pair(20, 30, seed=8, kinds=kinds)
    kind = divergence(spec)
    edges, done = newton_edges(q, p, kind, "price", torch.full((20,), price).double())
    assert done.all()
    on_path = sorted_band(q, p, kind, "price", price)
    assert torch.equal(edges.whole[done], on_path.edges.whole[done])
    inside = done & ~edges.whole
    width = kind.slope(edges.upper) - kind.slope(edges.lower)
    torch.testing.assert_close(width[inside] * price, torch.ones_like(width[inside]))
    rows = ct.policy("band", price=price, divergence=spec).target(q, p)
    torch.testing.assert_close(rows, on_path.rows(), rtol=0, atol=CLOSE)
