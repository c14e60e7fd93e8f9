"""The soft band is a row, the best one, and the same in torch and in numpy."""

import math

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.divergences import FDivergence, divergence
from cactus_theory.optimum.soft import LOWEST, ONE_TOKEN, Pieces, Worth, soft_rows
from cactus_theory.optimum.soft_row import SoftRow
from cactus_theory.policies import policy
from tests.amounts import amount, some
from tests.formulas import by_hand
from tests.rows import KINDS, pair, rows

THREE = Worth((0.3, 0.6, 1.0), (2.5, 1.8, 1.3))
# ties, and a last piece that is worth nothing
ODD = Worth((0.2, 0.5, 0.9, 1.0), (3.0, 3.0, 1.0, 0.0))
WORTHS = (ONE_TOKEN, THREE, ODD)
SPECS = ("kl", "reverse_kl", "pearson_chi2", "squared_hellinger", "jensen_shannon", "alpha:a=0.5")
PRICES = (1e-3, 0.3, 1.0, 8.0, 1e3)
MIXED = [(a, b) for a in KINDS for b in KINDS]
# where f′(∞) is finite, an edge of 1e16 and one of ∞ have the same f′ in float64
NOT_TINY = [pair for pair in MIXED if "tiny" not in pair]
# sums of a few float64 terms
ROUNDING = 1e-12
# a float32 row whose edges are settled to 2e-5 in one part (see optimum.soft), and where f′ is
# so flat that a rounding moves an edge of some thousands
SINGLE, FLAT = 3e-6, 1e-4
# the same in float64: of a row, and of a ratio near 1
ROW, RATIO = 1e-5, 1e-3
# edges near 500 (price 0.001) leave this of the lower edge beside them, and of the best gain
FAR, FAR_GAIN, FLAT_GAIN = 1e-8, 1e-5, 1e-9
# masses moved from token to token; a slope that is off by gain/moved is seen
MOVED = (1e-2, 1e-4, 1e-6)
# the objective is of order one (times the price)
GAIN = 1e-14


def kind_of(spec: str) -> FDivergence:
    kind = divergence(spec)
    assert isinstance(kind, FDivergence)
    return kind


def worth_by_hand(worth: Worth, r: np.ndarray) -> np.ndarray:
    """Return φ as the least of its lines, capped at r = 1."""
    knots = np.array([0.0, *worth.knots])
    heights = np.concatenate([[0.0], np.cumsum(np.diff(knots) * worth.slopes)])
    lines = [
        height + slope * (np.minimum(r, 1.0) - knot)
        for knot, height, slope in zip(knots, heights, worth.slopes, strict=False)
    ]
    return np.min(lines, axis=0)


def objective(h, q, p, alive, worth, spec, price):
    """Return Σ p φ(Ph/p) − ν P D(h‖q) of rows (..., V) by hand."""
    on = p > 0
    gain = np.zeros(h.shape)
    mass = np.broadcast_to(alive * h, h.shape)
    drafted = np.broadcast_to(p, h.shape)
    on = drafted > 0
    gain[on] = drafted[on] * worth_by_hand(worth, mass[on] / drafted[on])
    return gain.sum(-1) - price * alive * by_hand(spec, h, np.broadcast_to(q, h.shape))


def best_exchange(h, q, p, alive, worth, spec, price) -> float:
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
    before = objective(h[None, tokens], q[tokens], p[tokens], alive, worth, spec, price)
    return float((objective(inner, q[tokens], p[tokens], alive, worth, spec, price) - before).max())


def solved(q, p, alive, worth, spec, price):
    ratios = torch.as_tensor(alive, dtype=torch.float64).expand(len(q))
    return soft_rows(q, p, ratios, [worth] * len(q), kind_of(spec), price)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("kinds", some(NOT_TINY, 3))
def test_no_exchange_of_mass_improves_it(spec: str, kinds: tuple[str, str]) -> None:
    q, p = pair(2, 4, seed=7, kinds=kinds)
    cases = [(w, v, a) for w in WORTHS for v in PRICES for a in (1.0, 0.6, 0.05, 1e-9)]
    for worth, price, alive in some(cases, 7):
        h = solved(q, p, alive, worth, spec, price)
        assert torch.allclose(h.sum(-1), torch.ones(2, dtype=torch.float64), atol=ROUNDING)
        assert not bool((h[q == 0] != 0).any())
        for h_row, q_row, p_row in zip(h.numpy(), q.numpy(), p.numpy(), strict=True):
            gain = best_exchange(h_row, q_row, p_row, alive, worth, spec, price)
            steep = kind_of(spec).slope_at_infinity == math.inf
            most = GAIN * max(1.0, price) if steep else FLAT_GAIN
            most = FAR_GAIN if price < 0.01 else most
            assert gain <= most, (worth, price, alive, gain)


# where f′ is a number, by hand: 0 below its least value, ∞ above its largest
INVERSE_SLOPES = {
    "kl": lambda y: math.exp(min(y - 1, 700)),
    "pearson_chi2": lambda y: max(0.0, 1 + y / 2),
    "squared_hellinger": lambda y: (1 - y) ** -2 if y < 1 else math.inf,
    "alpha:a=0.5": lambda y: (1 - y / 2) ** -2 if y < 2 else math.inf,
}


def by_formula(q, p, alive, worth, spec, price):
    """Return g/P of Theorem 13(4), q > 0, and its edge a, from a multiplier by bisection."""
    edge = INVERSE_SLOPES[spec]

    def row(mu):
        pieces = zip(worth.knots, worth.slopes, strict=True)
        raised = [np.minimum(edge((s - mu) / price) * q, r * p / alive) for r, s in pieces]
        return np.max([edge(-mu / price) * q, *raised], axis=0)

    low, high = -100.0, 100.0
    for _ in range(80):
        mu = (low + high) / 2
        low, high = (mu, high) if row(mu).sum() > 1 else (low, mu)
    return row(high), edge(-high / price)


@pytest.mark.parametrize(
    "spec", some(["pearson_chi2", "squared_hellinger", "alpha:a=0.5", "kl"], 2)
)
@pytest.mark.parametrize("worth", [ONE_TOKEN, THREE])
def test_the_soft_band_is_the_formula_at_its_multiplier(spec: str, worth: Worth) -> None:
    """Theorem 13(4), with the row where no a ≥ 0 has f′(u) − f′(a) = s/ν."""
    for q, p in (
        *zip(*(each.numpy() for each in pair(3, 4, seed=5)), strict=True),
        (np.array([0.273, 0.401, 0.326]), np.array([0.119, 0.855, 0.026])),
    ):
        for alive, price in ((0.341, 0.073), (0.8, 0.6), (1.0, 2.0)):
            both = torch.tensor(q)[None], torch.tensor(p)[None]
            row = solved(*both, alive, worth, spec, price)[0].numpy()
            expected, floor = by_formula(q, p, alive, worth, spec, price)
            np.testing.assert_allclose(row, expected, rtol=0, atol=ROW / 10)
            if spec == "pearson_chi2" and worth is ONE_TOKEN and len(q) == 3 and alive < 0.5:
                assert floor == 0.0


def test_another_row_would_be_improved() -> None:
    q, p = (row[0].numpy() for row in pair(1, 4, seed=7))
    for other in (q, p, (p + q) / 2):
        assert best_exchange(other, q, p, 0.6, THREE, "kl", 1.0) > 1e3 * GAIN


@pytest.mark.parametrize("spec", some(SPECS, 3))
@pytest.mark.parametrize("kinds", some(MIXED, 4))
def test_one_piece_at_the_root_is_the_band(spec: str, kinds: tuple[str, str]) -> None:
    q, p = pair(4, 30, seed=3, kinds=kinds)
    for price in some(PRICES, 3):
        band = ct.optimal_acceptance(q, p, divergence=spec, price=price)
        h = solved(q, p, 1.0, ONE_TOKEN, spec, price)
        assert float((h - band.target).abs().max()) <= FAR
        rule = policy("band", price=price, divergence=spec)
        assert float((h - rule.target(q, p)).abs().max()) <= FAR  # type: ignore[attr-defined]


def test_extreme_prices() -> None:
    q, p = pair(6, 30, seed=5)
    nearly_free, dear = (solved(q, p, 1.0, THREE, "kl", price) for price in (1e-3, 1e6))
    assert torch.allclose(nearly_free, p, atol=ROUNDING)
    assert float((dear - q).abs().max()) <= 1e-5
    unreached = solved(q, p, 0.0, THREE, "kl", 1.0)  # taken for P = 1
    assert unreached.equal(solved(q, p, 1.0, THREE, "kl", 1.0))


def test_certain_rows() -> None:
    sure, other = torch.eye(3, dtype=torch.float64)[[0, 1]]
    even = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q, p = torch.stack([sure, sure, even]), torch.stack([sure, other, sure])
    for worth in WORTHS:
        for alive in (1.0, 0.3):
            h = solved(q, p, alive, worth, "kl", 1.0)
            assert h[:2].equal(torch.stack([sure, sure]))
            assert 0.5 < h[2, 0] < 1 and torch.allclose(h[2, 1] / h[2, 2], even[1] / even[2])


def test_one_piece_where_the_target_excludes_most_of_the_draft() -> None:
    """By hand: with f′(∞) = 0 and a = ν = .1 at the least, .5 + .8 a = 1 asks for a = .625."""
    q, p = (torch.tensor([row], dtype=torch.float64) for row in ([0.2, 0.8, 0], [0.5, 0.02, 0.48]))
    h = solved(q, p, 1.0, ONE_TOKEN, "reverse_kl", 0.1)
    assert h[0].tolist() == pytest.approx([0.5, 0.5, 0.0], abs=1e-12)


@pytest.mark.parametrize("kinds", [("zeros", "smooth"), ("smooth", "spiky")])
def test_every_row_has_its_own_worth_and_path(kinds: tuple[str, str]) -> None:
    q, p = pair(6, 30, seed=5, kinds=kinds)
    alive = torch.tensor([1.0, 0.7, 0.3, 1.0, 0.7, 0.3], dtype=torch.float64)
    plain = Worth((0.3, 0.6, 1.0), (1.0, 1.0, 1.0))
    worths = [plain] * 3 + [THREE] * 3
    together = soft_rows(q, p, alive, worths, kind_of("jensen_shannon"), 0.4)
    for row, worth in enumerate(worths):
        part = slice(row, row + 1)
        single = solved(q[part], p[part], alive[part], worth, "jensen_shannon", 0.4)
        assert float((single - together[part]).abs().max()) <= ROUNDING
    first = solved(q[:3], p[:3], alive[:3], ONE_TOKEN, "jensen_shannon", 0.4)
    assert float((first - together[:3]).abs().max()) <= ROUNDING


def by_numpy(q, p, alive, pieces) -> tuple[SoftRow, np.ndarray]:
    """Return a solved row and its law from the level."""
    row = SoftRow(q, p, alive, pieces)
    assert not row.passes(math.inf)
    ratio = p.astype(float) / np.maximum(q.astype(float), LOWEST)
    shaped = np.full(len(q), row.scale)
    for edge, knot in zip(row.upper, pieces.knots, strict=True):
        shaped = np.maximum(shaped, np.minimum(edge, knot * ratio))
    law = np.where(q > 0, shaped, 0.0) * q
    return row, law / law.sum()


@pytest.mark.parametrize("spec", some(SPECS, 4))
@pytest.mark.parametrize("kinds", some(NOT_TINY, 2))
def test_the_row_in_numpy_is_the_same(spec: str, kinds: tuple[str, str]) -> None:
    q, p = pair(2, 30, seed=11, kinds=kinds)
    cases = [(w, v, a) for w in WORTHS for v in PRICES[:-1] for a in (1.0, 0.6, 0.05)]
    for worth, price, alive in some(cases, 6):
        pieces = Pieces(worth, kind_of(spec), price)
        h = solved(q, p, alive, worth, spec, price).numpy()
        steep = kind_of(spec).slope_at_infinity == math.inf and price > 0.01
        for exact, q_row, p_row in zip(h, q.numpy(), p.numpy(), strict=True):
            row, law = by_numpy(q_row, p_row, alive, pieces)
            assert abs(law - exact).max() <= (ROUNDING if steep else ROW)
            assert row.scale <= alive * (1 + ROUNDING)
            for token in np.flatnonzero((q_row > 0) & (p_row > 0)):
                threshold = p_row[token] / q_row[token]
                ratio = alive * exact[token] / p_row[token]
                kept = min(1.0, row.ratio_of(threshold))
                assert kept == pytest.approx(min(1.0, ratio), rel=1e-9 if steep else RATIO)
            q32, p32 = (values.astype(np.float32) for values in (q_row, p_row))
            near_q, near_p = (torch.from_numpy(values.astype(float))[None] for values in (q32, p32))
            near = solved(near_q, near_p, alive, worth, spec, price)
            law = by_numpy(q32, p32, alive, pieces)[1]
            close = SINGLE if steep else FLAT
            assert price < 0.01 or abs(law - near[0].numpy()).max() <= close


@pytest.mark.parametrize("spec", ["reverse_kl", "jensen_shannon"])
def test_single_rows_where_slopes_are_flat(spec: str) -> None:
    """Solve float32 rows whose upper edges, some hundreds, have nearly the slope of ∞."""
    q, p = (rows.float().double() for rows in pair(2, 30, seed=11, kinds=("spiky", "spiky")))
    for price, alive in ((0.3, 1.0), (1.0, 0.6)):
        pieces = Pieces(ODD, kind_of(spec), price)
        h = solved(q, p, alive, ODD, spec, price).numpy()
        for exact, q_row, p_row in zip(h, q.numpy(), p.numpy(), strict=True):
            law = by_numpy(q_row.astype(np.float32), p_row.astype(np.float32), alive, pieces)[1]
            assert abs(law - exact).max() <= FLAT


@pytest.mark.parametrize("worth", WORTHS)
@pytest.mark.parametrize("spec", some(SPECS, 2))
def test_passes_iff_the_level_is_above(spec: str, worth: Worth) -> None:
    q, p = (row.numpy() for row in pair(amount(3, 30), 30, seed=13))
    pieces = Pieces(worth, kind_of(spec), 0.7)
    for q_row, p_row in zip(q, p, strict=True):
        for alive in (1.0, 0.4):
            level = by_numpy(q_row, p_row, alive, pieces)[0].upper[-1]
            if not 0 < level < math.inf:
                largest = (p_row / q_row).max()
                passed = SoftRow(q_row, p_row, alive, pieces).passes(largest)
                assert passed == (level > 0)
                continue
            for factor in (0.0, 1e-3, 0.5, 1 - 1e-6, 1 + 1e-6, 2.0, 1e3, math.inf):
                threshold = level * factor
                row = SoftRow(q_row, p_row, alive, pieces)
                assert row.passes(threshold) == (factor < 1), (factor, alive)
                if factor > 1:
                    assert row.upper[-1] == pytest.approx(level, rel=1e-9)


def test_a_wide_row() -> None:
    q, p = pair(1, 151_936, seed=1, kinds=("spiky", "spiky"))
    h = solved(q, p, 0.6, THREE, "kl", 1.0)
    assert abs(float(h.sum()) - 1) <= ROUNDING
    pieces = Pieces(THREE, kind_of("kl"), 1.0)
    for dtype, close in ((np.float64, ROUNDING), (np.float32, SINGLE)):
        q_row, p_row = (rows[0].numpy().astype(dtype) for rows in (q, p))
        _, law = by_numpy(q_row, p_row, 0.6, pieces)
        assert abs(law - h[0].numpy()).sum() / 2 <= close * 10


@pytest.mark.parametrize("worth", WORTHS)
def test_the_worth_by_hand(worth: Worth) -> None:
    r = torch.linspace(0, 2, 41, dtype=torch.float64)
    assert np.allclose(worth.of(r).numpy(), worth_by_hand(worth, r.numpy()), atol=ROUNDING)


def test_rows_may_be_few() -> None:
    q = rows(1, 1)
    assert solved(q, q, 0.5, THREE, "kl", 1.0).equal(q)
