"""Newton and the sorted path give one answer, whole: edges, rows, prices and certificates."""

import pytest
import torch

from cactus_theory.divergences import FDivergence, read_divergence
from cactus_theory.optimum.batch_edges import searched_edges, solve_edges, sorted_edges
from cactus_theory.optimum.certificate import geometry_of
from tests.amounts import some
from tests.formulas import ALL
from tests.rows import pair

KINDS = (("smooth", "smooth"), ("spiky", "spiky"), ("smooth", "zeros"), ("zeros", "smooth"))
CLOSE, GAP = 1e-9, 1e-12
# an edge where little is cut may be off further than what it cuts
EDGE = 1e-6
SMOOTH = [s for s in ALL if getattr(read_divergence(s).generator, "smooth", False)]
PRICED = [s for s in SMOOTH if isinstance(read_divergence(s), FDivergence)]


def both(q, p, spec, knob, amount):
    geometry = geometry_of(q, p, read_divergence(spec))
    amounts = torch.full(q.shape[:1], amount, dtype=torch.float64)
    _, done = searched_edges(geometry, knob, amounts)
    ways = (way(geometry, knob, amounts) for way in (solve_edges, sorted_edges))
    return *map(geometry.measured, ways), done


def check_agree(mine, reference):
    for name in ("rows", "acceptance", "divergence"):
        one, other = getattr(mine, name), getattr(reference, name)
        torch.testing.assert_close(one, other, rtol=CLOSE, atol=CLOSE)
    torch.testing.assert_close(mine.price, reference.price, rtol=EDGE, atol=CLOSE)
    for name in ("lossless", "slack", "whole"):
        assert torch.equal(getattr(mine.edges, name), getattr(reference.edges, name)), name
    for name in ("lower", "upper"):
        one, other = getattr(mine.edges, name), getattr(reference.edges, name)
        torch.testing.assert_close(one, other, rtol=EDGE, atol=EDGE)
    assert (mine.gap.abs() <= GAP).all()


ASKED = [(spec, "delta", delta) for spec in SMOOTH for delta in (1e-5, 0.02, 0.5, 4.0)]
ASKED += [(spec, "price", price) for spec in PRICED for price in (0.05, 0.6, 3.0, 40.0)]


@pytest.mark.parametrize("spec, knob, amount", some(ASKED, 18))
@pytest.mark.parametrize("kinds", KINDS)
def test_on_rows_of_every_kind(spec, knob, amount, kinds):
    q, p = pair(12, 400, seed=21, kinds=kinds)
    mine, reference, _ = both(q, p, spec, knob, amount)
    check_agree(mine, reference)


def like_a_model(rows, vocab):
    """Return peaked targets and drafts that err by a unit of noise in the logits."""
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(rows, vocab, generator=generator, dtype=torch.float64)
    noise = torch.randn(rows, vocab, generator=generator, dtype=torch.float64)
    return logits.softmax(-1), (logits + noise).softmax(-1)


@pytest.mark.parametrize("spec", some(SMOOTH, 5))
def test_rows_of_a_model_need_no_sort(spec):
    rows = like_a_model(4, 20_000)
    for knob, amount in (("delta", 0.1), ("delta", 1e-3), ("price", 2.0), ("price", 0.3)):
        if knob == "price" and spec not in PRICED:
            continue
        mine, reference, done = both(*rows, spec, knob, amount)
        assert done.all(), (knob, amount)
        check_agree(mine, reference)


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_a_target_truncated_as_samplers_do_needs_no_sort(share):
    """Most tokens have q = 0 then, and the draft has mass on some of them."""
    q, p = like_a_model(6, 2_000)
    cut = q.sort(-1, descending=True).values[:, int(2_000 * (1 - share))]
    q = torch.where(q >= cut[:, None], q, 0.0)
    q = q / q.sum(-1, keepdim=True)
    for spec, knob, amount in (("kl", "delta", 0.05), ("reverse_kl", "price", 3.0)):
        mine, reference, done = both(q, p, spec, knob, amount)
        assert done[~reference.edges.slack].all() and not mine.rows[q == 0].any()
        check_agree(mine, reference)
