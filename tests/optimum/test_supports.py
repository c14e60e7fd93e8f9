"""The optimum where rows have zeros, under both supports; and one divergence in two names."""

import math

import numpy as np
import pytest
import torch

import cactus_theory as ct
from tests.amounts import some
from tests.formulas import ALL, TEN
from tests.rows import pair, rows

CERTIFIED = 1e-8
SUPPORTS = ("target", "free")
ZEROS = {
    "in the target": ("zeros", "smooth"),
    "in the draft": ("smooth", "zeros"),
    "in both": ("zeros", "zeros"),
}
LADDER = torch.logspace(-6, 1, 24, dtype=torch.float64)[:, None]


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
        kept = torch.minimum(s.target, p).sum(-1)
        torch.testing.assert_close(s.acceptance, kept, rtol=0, atol=1e-12)
        if support == "target":
            assert not s.target[q == 0].any()


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("where", ZEROS)
@pytest.mark.parametrize("spec", some(ALL, 3))
def test_the_frontier_rises_and_bends_down(spec, where, support):
    q, p = pair(12, 15, seed=8, kinds=ZEROS[where])
    ladder = LADDER.expand(24, 12)
    s = ct.optimal_acceptance(
        q.expand(24, 12, 15), p, divergence=spec, delta=ladder, support=support
    )
    assert (s.acceptance.diff(dim=0) >= -1e-12).all()
    curve = ct.frontier(q, p, divergence=spec, points=25, support=support)
    assert (curve.acceptance.diff(dim=-1) >= -1e-12).all()
    assert (curve.delta.diff(dim=-1) >= -1e-12).all()
    if ct.divergence(spec).concave_frontier:
        chords = s.acceptance.diff(dim=0) / ladder.diff(dim=0)
        assert (chords.diff(dim=0) <= 1e-6 * (1 + chords[:-1])).all()
        bought = s.acceptance[0] - torch.minimum(q, p).sum(-1)
        assert (bought / ladder[0] >= chords[0] - 1e-6).all()


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


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize(
    "order, name, share",
    [(2, "pearson_chi2", 0.5), (0.5, "squared_hellinger", 2.0), (-1, "neyman_chi2", 0.5)],
)
def test_alpha_and_its_other_name_have_one_optimum(order, name, share, support):
    q, p = pair(20, 9, seed=10, kinds=("zeros", "smooth"))
    for delta in (0.01, 0.2):
        one = ct.optimal_acceptance(q, p, divergence=name, delta=delta, support=support)
        other = ct.optimal_acceptance(
            q, p, divergence=f"alpha:a={order}", delta=share * delta, support=support
        )
        for field in ("target", "acceptance", "lower", "upper"):
            torch.testing.assert_close(
                getattr(one, field), getattr(other, field), rtol=1e-9, atol=1e-11
            )
        torch.testing.assert_close(one.price, share * other.price, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(share * one.divergence, other.divergence, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "order, name, share",
    [(2, "pearson_chi2", 0.5), (0.5, "squared_hellinger", 2.0), (-1, "neyman_chi2", 0.5)],
)
def test_alpha_and_its_other_name_raise_a_token_alike(order, name, share):
    q_n = torch.tensor([1e-6, 0.01, 0.3, 0.9, 0.999], dtype=torch.float64)
    one = ct.policy("cactus_exact", delta=0.1, divergence=name)
    other = ct.policy("cactus_exact", delta=share * 0.1, divergence=f"alpha:a={order}")
    np.testing.assert_allclose(one.gamma(q_n), other.gamma(q_n), rtol=1e-10)
