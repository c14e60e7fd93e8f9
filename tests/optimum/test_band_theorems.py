"""The theorem of the band and what follows from it: THEORY.md, Theorems 7 to 10 and 15."""

import math

import numpy as np
import pytest
import torch

import cactus_theory as ct
from tests.amounts import amount
from tests.formulas import ALL
from tests.rows import pair, rows

EXACT = 1e-9
KINDS = (("smooth", "smooth"), ("zeros", "smooth"), ("zeros", "zeros"), ("spiky", "spiky"))
SMOOTH = tuple(s for s in ALL if ct.divergence(s).priced and ct.divergence(s).generator)
# those whose f′(∞) is finite: mass where q = 0 costs something finite
FAR = {s: getattr(ct.divergence(s).generator, "slope_at_infinity", math.inf) for s in ALL}
LEAKY = tuple(s for s in ALL if FAR[s] < math.inf)


def competitors(seed, kinds, leak):
    """Return q, p and other rows h, of all sizes of acceptance; ties are frequent."""
    q, p = pair(60, 5, seed=seed, kinds=kinds)
    if seed % 2:  # eighths: equal ratios, entries that vanish
        q, p = ((8 * row).ceil() * (row > 0.1) for row in (q, p))
        q[:, 0] += 1
        p[:, 1] += 1
        q, p = (row / row.sum(-1, keepdim=True) for row in (q, p))
    mixed = rows(60, 3, seed=seed + 77)
    h = mixed[:, :1] * rows(60, 5, seed=seed + 99, kind="zeros")
    h = h + mixed[:, 1:2] * p + mixed[:, 2:] * q
    if not leak:
        h = torch.where(q > 0, h, 0.0)
    return q, p, h / h.sum(-1, keepdim=True)


@pytest.mark.parametrize("leak", [False, True], ids=["target", "free"])
def test_one_band_costs_least_in_every_divergence_at_once(leak):
    """The lemma: at the acceptance of any row, the band there is cheaper by every measure."""
    support = "free" if leak else "target"
    for seed in range(amount(6, 100)):
        q, p, h = competitors(seed, KINDS[seed % len(KINDS)], leak)
        accepted = torch.minimum(p, h).sum(-1)
        path = ct.divergence("squared_hellinger")  # any one gives the band of an acceptance
        band = ct.optimal_acceptance(
            q, p, divergence=path, acceptance=accepted.clamp(max=1), support=support
        )
        assert (band.acceptance >= accepted - EXACT).all()
        for spec in LEAKY if leak else ALL:
            kind = ct.divergence(spec)
            least, other = kind.value(band.target, q), kind.value(h, q)
            assert (least <= other * (1 + EXACT) + EXACT).all(), spec


@pytest.mark.parametrize("spec", SMOOTH)
def test_any_two_edges_prove_a_bound(spec):
    """The certificate needs no solved band: it holds at every 0 < a < b."""
    kind, source = ct.divergence(spec), torch.Generator().manual_seed(0)
    f = kind.generator
    for seed in range(amount(4, 60)):  # odd ones have ties; KINDS 1 and 2 exclude tokens
        q, p, h = competitors(seed, KINDS[seed % len(KINDS)], False)
        edges = (2 * torch.randn(2, len(q), generator=source, dtype=torch.float64)).exp()
        a, b = edges.sort(0).values[..., None]
        price = 1 / (f.slope(b) - f.slope(a))
        level = -price * f.slope(a)
        inside = q > 0
        ratio = torch.where(inside, p / q, 1.0)
        u = torch.minimum(torch.maximum(ratio, a), b)
        inner = torch.minimum(ratio, u) - price * f.f(u) - level * u
        spent = f.value(h, q)
        bound = price[:, 0] * spent + level[:, 0] + torch.where(inside, q * inner, 0.0).sum(-1)
        accepted = torch.minimum(p, h).sum(-1)
        assert (accepted <= bound + EXACT * (1 + bound.abs())).all()


def test_where_the_frontier_is_not_concave():
    """Theorem 9's two counterexamples, to the digits printed there."""
    half, one = [0.5, 0.5], [1.0, 0.0]
    acceptances = [accepted(half, one, "max_divergence", d) for d in (0.0, 0.2, 0.4)]
    assert acceptances == pytest.approx([0.5, 0.610701, 0.745912], abs=5e-7)
    assert (acceptances[0] + acceptances[2]) / 2 == pytest.approx(0.622956, abs=5e-7)
    acceptances = [accepted([0.01, 0.99], one, "renyi:a=2", d) for d in (1.0, 2.0, 3.0)]
    assert acceptances == pytest.approx([0.140426, 0.261499, 0.444680], abs=5e-7)
    assert (acceptances[0] + acceptances[2]) / 2 == pytest.approx(0.292553, abs=5e-7)


def accepted(q, p, spec, delta):
    return float(
        ct.optimal_acceptance(np.array(q), np.array(p), divergence=spec, delta=delta).acceptance
    )


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("price", [0.3, 1.0, 6.0])
def test_a_price_in_kl_biases_the_drafted_logit_by_temperature_over_it(price, temperature):
    """Theorem 10 from the logits alone: T/λ on the drafted one, whatever the row."""
    source = torch.Generator().manual_seed(6)
    logits = 2 * torch.randn(10, 7, generator=source, dtype=torch.float64)
    drafted = torch.eye(7, dtype=torch.float64)[torch.arange(10) % 7]
    q = (logits / temperature).softmax(-1)
    best = ct.optimal_acceptance(q, drafted, price=price)
    expected = ((logits + drafted * temperature / price) / temperature).softmax(-1)
    torch.testing.assert_close(best.target, expected, rtol=0, atol=EXACT)


@pytest.mark.parametrize("spec", ["squared_hellinger", "jensen_shannon", "alpha:a=0.5"])
def test_the_first_nats_have_any_price_unless_all_of_it_leaks(spec):
    """Theorem 9's remark: dA/dδ → ∞ at δ = 0; under support free with TV = P₀ it stays finite."""
    q, p = pair(8, 5, seed=2)
    prices = [ct.optimal_acceptance(q, p, divergence=spec, delta=d).price for d in (1e-6, 1e-10)]
    assert (prices[1] > 50 * prices[0]).all() and (prices[1] > 1e3).all()
    f = ct.divergence(spec).generator
    one = torch.ones((), dtype=torch.float64)
    most = 1 / (f.slope_at_infinity - float(f.slope(one)))
    q, p = torch.tensor([[0.6, 0.4, 0.0], [0.3, 0.3, 0.4]], dtype=torch.float64)
    for delta in (1e-10, 1e-6, 1e-2):
        best = ct.optimal_acceptance(q, p, divergence=spec, delta=delta, support="free")
        assert 0 < best.price <= most * (1 + EXACT)


def test_the_square_root_law_of_small_budgets():
    """Theorem 19: the bound at every δ, and the limit, by rows whose masses H and L are known."""
    q, p = pair(40, 6, seed=8, kinds=("zeros", "zeros"))
    lossless = torch.minimum(p, q).sum(-1)
    above = torch.where((p > q) & (q > 0), q, 0.0).sum(-1)
    below = torch.where(p < q, q, 0.0).sum(-1)
    both = (above > 0) & (below > 0)
    assert both.sum() > 20
    for delta in (1e-12, 1e-6, 1e-3, 0.05, 0.5, 3.0):
        gain = ct.optimal_acceptance(q, p, delta=delta).acceptance - lossless
        assert (gain <= math.sqrt(delta / 2) + EXACT).all()
    tiny = 1e-12  # gains of 1e-6: the next term is as small beside them, over the least mass
    gain = ct.optimal_acceptance(q, p, delta=tiny).acceptance - lossless
    law = (2 * tiny * above * below / (above + below).clamp(min=tiny)).sqrt()
    sure = both & (torch.minimum(above, below) > 0.01)
    assert ((gain / law)[sure] - 1).abs().max() < 1e-3


@pytest.mark.parametrize("spec", [s for s in SMOOTH if not s.startswith("renyi")])
@pytest.mark.parametrize("price", [0.2, 1.0, 5.0])
def test_the_excess_rises_and_its_sign_is_the_decision(spec, price):
    """Theorem 15 from its own formula, tokens with q = 0 included."""
    f = ct.divergence(spec)
    q, p = pair(30, 6, seed=4, kinds=("zeros", "smooth"))
    inside, out = q > 0, torch.where(q > 0, 0.0, p).sum(-1)
    ladder = torch.logspace(-2, 2, 200, dtype=torch.float64)[:, None]

    def excess(r):
        a = f.ratio_at(f.slope(r) - 1 / price)[..., None]
        lifted = (a * q - p).clamp(min=0).sum(-1)
        return lifted - torch.where(inside, p - r[..., None] * q, 0.0).clamp(min=0).sum(-1) - out

    values = excess(ladder.expand(200, 30))
    assert (values.diff(dim=0) >= -EXACT).all()
    rule = ct.policy("band", price=price, divergence=spec)
    keep = rule.acceptance_row(q, p)
    coins = torch.rand(30, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ratio = torch.where(inside, coins * p / torch.where(inside, q, 1.0), math.inf)
    for token in range(6):
        r = ratio[:, token]
        known = (
            r.isfinite() & ((coins[:, token] - keep[:, token]).abs() > EXACT) & (p[:, token] > 0)
        )
        below = excess(torch.where(known, r, 1.0)) < 0
        assert (below == (coins[:, token] < keep[:, token]))[known].all()
