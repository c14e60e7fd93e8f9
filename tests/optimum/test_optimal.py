"""That nothing feasible beats the band, by means that know nothing of bands."""

import numpy as np
import pytest
import torch
from scipy.optimize import brentq

import cactus_theory as ct
from tests.amounts import some
from tests.formulas import ALL, TEN, by_hand
from tests.rows import pair

# a grid of 1/300 over three tokens misses the optimum by at most a few of its steps
GRID = 300
MISSED = 4 / GRID
# by-hand divergences cancel: a competitor may overspend by this much and gain in proportion
BY_HAND = 1e-9
REFERENCE = 1e-7
COMPETITORS = 4000

FINITE = ("total_variation", "squared_hellinger", "jensen_shannon", "reverse_kl", "neyman_chi2")
FAR = {
    "total_variation": 0.5,
    "squared_hellinger": 1.0,
    "jensen_shannon": np.log(2) / 2,
    "reverse_kl": 0.0,
    "neyman_chi2": 1.0,
}


def simplex() -> np.ndarray:
    i, j = np.meshgrid(np.arange(GRID + 1), np.arange(GRID + 1), indexing="ij")
    inside = i + j <= GRID
    return np.stack([i[inside], j[inside], (GRID - i - j)[inside]], -1) / GRID


def charged(spec, h, q):
    """Return D(h‖q), charging mass on tokens with q = 0 at f′(∞)."""
    inside = q > 0
    if inside.all() or spec not in FAR:
        return by_hand(spec, h, q)
    f = ct.divergence(spec).f
    ratio = torch.as_tensor(h[..., inside] / q[inside])
    inner = (f(ratio).numpy() * q[inside]).sum(-1)
    return inner + FAR[spec] * h[..., ~inside].sum(-1)


ROWS = {
    "ordinary": ([0.5, 0.3, 0.2], [0.2, 0.2, 0.6]),
    "lopsided": ([0.9, 0.07, 0.03], [0.1, 0.3, 0.6]),
    "certain draft": ([0.5, 0.3, 0.2], [0.0, 1.0, 0.0]),
    "zero in the target": ([0.6, 0.4, 0.0], [0.2, 0.3, 0.5]),
}


@pytest.mark.parametrize("spec", some(ALL, 9))
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("support", ["target", "free"])
def test_no_point_of_a_grid_is_better(spec, name, support):
    q, p = (np.array(row) for row in ROWS[name])
    h = simplex()
    with np.errstate(all="ignore"):
        spent = charged(spec, h, q)
    if support == "target":
        spent = np.where(h[:, q == 0].sum(-1) > 0, np.inf, spent)
    accepted = np.minimum(h, p).sum(-1)
    for delta in (0.02, 0.2):
        s = ct.optimal_acceptance(q, p, divergence=spec, delta=delta, support=support)
        best = accepted[spent <= delta].max()
        assert best <= s.acceptance + BY_HAND
        assert s.acceptance <= best + MISSED
        assert abs(s.gap) <= BY_HAND
        with np.errstate(all="ignore"):
            assert charged(spec, s.target, q) <= delta + BY_HAND


@pytest.mark.parametrize("spec", TEN)
def test_no_feasible_neighbour_is_better(spec):
    q, p = (row.numpy() for row in pair(6, 8, seed=12))
    delta = 0.05
    s = ct.optimal_acceptance(q, p, divergence=spec, delta=delta)
    generator = np.random.default_rng(0)
    for scale in (1e-1, 1e-3, 1e-5):
        move = generator.normal(size=(COMPETITORS, 6, 8)) * scale
        h = np.abs(s.target * (1 + move))
        h /= h.sum(-1, keepdims=True)
        # pull back towards q: by convexity that lowers every divergence
        h = h + generator.uniform(size=(COMPETITORS, 6, 1)) * scale * (q - h)
        feasible = by_hand(spec, h, q) <= delta
        assert feasible.any()
        accepted = np.where(feasible, np.minimum(h, p).sum(-1), 0.0)
        assert (accepted.max(0) <= s.acceptance + BY_HAND).all()


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


@pytest.mark.parametrize("spec", ["kl", "pearson_chi2", "renyi:a=2", "max_divergence"])
def test_free_support_changes_nothing_where_zeros_cost_the_earth(spec):
    q, p = pair(20, 6, seed=3, kinds=("zeros", "smooth"))
    for delta in (0.05, 3.0):
        one, other = (
            ct.optimal_acceptance(q, p, divergence=spec, delta=delta, support=support)
            for support in ("target", "free")
        )
        torch.testing.assert_close(one.target, other.target, rtol=0, atol=1e-12)
