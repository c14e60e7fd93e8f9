"""That nothing feasible beats the band, by means that know nothing of bands."""

import numpy as np
import pytest
import torch
from scipy.optimize import brentq

import cactus_theory as ct
from tests.amounts import some
from tests.formulas import ALL, by_hand
from tests.rows import pair

# by-hand divergences cancel: a competitor may overspend by this much and gain in proportion
BY_HAND = 1e-9
REFERENCE = 1e-7

FINITE = ("total_variation", "squared_hellinger", "jensen_shannon", "reverse_kl", "neyman_chi2")


@pytest.mark.parametrize("spec", [s for s in ALL if hasattr(ct.divergence(s), "smooth")])
def test_the_certificate_bounds_every_row(spec):
    # the bound is Lagrange's only if u = clip(ρ, a, b) is the best u for its λ and μ
    kind = ct.divergence(spec)
    if not kind.smooth:
        return
    q, p = pair(6, 8, seed=12)
    s = ct.optimal_acceptance(q, p, divergence=spec, delta=0.05)
    price = s.price[:, None]
    level = -price * kind.slope(s.lower)[:, None]
    gain = lambda u: torch.minimum(p / q, u) - price * kind.f(u) - level * u  # noqa: E731
    best = gain(torch.minimum(torch.maximum(p / q, s.lower[:, None]), s.upper[:, None]))
    for u in torch.logspace(-3, 3, 601, dtype=torch.float64):
        assert (gain(u.expand_as(q)) <= best + BY_HAND).all()
    bound = s.price * 0.05 + level[:, 0] + (q * best).sum(-1)
    torch.testing.assert_close(bound, s.acceptance, rtol=0, atol=BY_HAND)


def path_row(q, p, rejected):
    """Return clip(p, aq, bq) with this rejection, the edges found by bracketing."""
    lift = lambda a: np.maximum(a * q - p, 0).sum() - rejected  # noqa: E731
    cut = lambda b: np.maximum(p - b * q, 0).sum() - rejected  # noqa: E731
    a = brentq(lift, 0, 1, xtol=1e-15)
    b = brentq(cut, 1, (p / q).max(), xtol=1e-14)
    return np.clip(p, a * q, b * q)


@pytest.mark.parametrize("spec", some(ALL, 9))
def test_the_path_by_plain_bracketing(spec):
    rows = pair(4, 9, seed=13)
    for delta in (0.01, 0.1):
        for q, p in zip(*(row.numpy() for row in rows), strict=True):
            most = np.maximum(p - q, 0).sum()
            low, high = 1e-9 * most, most * (1 - 1e-9)
            over = lambda e: by_hand(spec, path_row(q, p, e), q) - delta  # noqa: B023, E731
            expected = 1 - (brentq(over, low, high, xtol=1e-15) if over(low) > 0 else 0.0)
            s = ct.optimal_acceptance(q, p, divergence=spec, delta=delta)
            assert s.acceptance == pytest.approx(expected, abs=REFERENCE)


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
