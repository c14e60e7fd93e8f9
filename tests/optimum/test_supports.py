"""The optimum where rows have zeros, under both supports, and its certificate, rebuilt."""

import math

import pytest
import torch

import cactus_theory as ct
from tests.amounts import some
from tests.formulas import ALL, TEN
from tests.rows import pair, rows

CERTIFIED = 1e-8
FINITE = ("total_variation", "squared_hellinger", "jensen_shannon", "reverse_kl", "neyman_chi2")
SUPPORTS = ("target", "free")
ZEROS = {
    "in the target": ("zeros", "smooth"),
    "in the draft": ("smooth", "zeros"),
    "in both": ("zeros", "zeros"),
}


def sparse(*shape, seed, kinds):
    """Return rows some of whose entries are 0 and others as small as 1e-30."""
    q, p = pair(*shape, seed=seed, kinds=kinds)
    tiny = rows(*shape, seed=seed + 100, kind="tiny")
    q, p = q * tiny / tiny.amax(-1, keepdim=True), p * tiny.flip(-1)
    return q / q.sum(-1, keepdim=True), p / p.sum(-1, keepdim=True)


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("where", ZEROS)
@pytest.mark.parametrize("spec", some(ALL, 3))
def test_zeros_and_entries_of_1e_30_are_certified(spec, where, support):
    q, p = sparse(30, 40, seed=4, kinds=ZEROS[where])
    assert min(row[row > 0].min() for row in (q, p)) < 1e-28
    for delta in (1e-3, 0.1, 1.0):
        s = ct.optimal_acceptance(q, p, divergence=spec, delta=delta, support=support)
        assert s.gap.abs().max() <= CERTIFIED
        assert (s.divergence <= delta + 1e-9).all() and (s.target >= 0).all()
        torch.testing.assert_close(s.target.sum(-1), torch.ones(30).double(), rtol=0, atol=1e-12)
        accepted = torch.minimum(s.target, p).sum(-1)
        torch.testing.assert_close(s.acceptance, accepted, rtol=0, atol=1e-12)
        if support == "target":
            assert not s.target[q == 0].any()


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("where", ZEROS)
@pytest.mark.parametrize("spec", some(TEN, 3))
def test_a_batch_is_a_loop(spec, where, support):
    q, p = pair(6, 9, seed=9, kinds=ZEROS[where])
    delta = torch.tensor([0.0, 1e-3, 0.05, 0.4, 2.0, math.inf], dtype=torch.float64)
    together = ct.optimal_acceptance(q, p, divergence=spec, delta=delta, support=support)
    for i in range(6):
        alone = ct.optimal_acceptance(
            q[i], p[i], divergence=spec, delta=delta[i].item(), support=support
        )
        for field in vars(alone):
            mine, other = getattr(alone, field), getattr(together, field)[i]
            torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("spec", FINITE)
def test_free_support_leaks_only_what_pays(spec):
    q, p = (
        torch.tensor([0.6, 0.4, 0.0], dtype=torch.float64),
        torch.tensor([0.3, 0.2, 0.5], dtype=torch.float64),
    )
    kind = ct.divergence(spec)
    whole = kind.value(p, q).item()
    strict = ct.optimal_acceptance(q, p, divergence=spec, delta=whole * 0.9)
    free = ct.optimal_acceptance(q, p, divergence=spec, delta=whole * 0.9, support="free")
    assert strict.target[2] == 0 and free.target[2] > 0
    assert free.acceptance > strict.acceptance + 1e-3 and free.upper.isinf()
    if spec != "total_variation":
        price = 1 / (kind.slope_at_infinity - kind.slope(free.lower))
        torch.testing.assert_close(free.price, price)
    everything = ct.optimal_acceptance(q, p, divergence=spec, delta=whole + 1e-9, support="free")
    torch.testing.assert_close(everything.target, p)


def test_the_leak_is_split_as_the_draft_splits_it():
    q = torch.tensor([0.6, 0.4, 0.0, 0.0], dtype=torch.float64)
    p = torch.tensor([0.3, 0.2, 0.1, 0.4], dtype=torch.float64)
    s = ct.optimal_acceptance(q, p, divergence="squared_hellinger", delta=0.4, support="free")
    assert s.target[2] > 0
    torch.testing.assert_close(s.target[3] / s.target[2], torch.tensor(4.0, dtype=torch.float64))


def test_the_price_of_a_first_leak_under_total_variation_is_one():
    """Mass that moves from a token with q > p to one with q = 0 is gained whole."""
    q = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    p = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)
    spec = {"divergence": "total_variation", "support": "free"}
    prices = [ct.optimal_acceptance(q, p, delta=delta, **spec).price for delta in (0.0, 1e-6)]
    torch.testing.assert_close(torch.stack(prices), torch.ones(2, dtype=torch.float64))
