"""Bands at prices from 1e-300 to 1e300, held to bisection in 60 digits, and what is proven there.

That the law that is said, the drawn one and the charge are one row is a property of the kit.
"""

import math

import pytest
import torch

import cactus_theory as ct
from cactus_theory.decoding.meter import Meter
from cactus_theory.optimum.bands import Bands
from cactus_theory.testing import assert_policy_properties
from cactus_theory.verify import Chain
from cactus_theory.verify.node import nodes_of_rows
from tests.amounts import amount, some
from tests.optimum.precise import band, spent
from tests.rows import pair

# orders whose f′ loses the lower edge, that of ∞ at 0, and that of ∞ nowhere
SPECS = (
    "kl", "pearson_chi2", "alpha:a=3", "alpha:a=10", "alpha:a=16", "alpha:a=1.01", "alpha:a=0.5",
    "reverse_kl", "neyman_chi2", "alpha:a=-0.5", "alpha:a=-16", "squared_hellinger",
    "jensen_shannon",
)  # fmt: skip
PRICES = (1e-300, 1e-100, 1e-20, 1e-12, 1e-8, 1e-6, 1e-3, 0.3, 30.0, 1e6, 1e12, 1e100, 1e300)
# a token that the target excludes, one that the draft excludes, one that is hardly there, all three
ROWS = (
    ((0.5, 0.3, 0.2, 0.0), (0.1, 0.1, 0.7, 0.1)),
    ((0.5, 0.3, 0.2), (0.5, 0.5, 0.0)),
    ((0.5, 0.3, 0.2 - 1e-25, 1e-25), (0.1, 0.1, 0.5, 0.3)),
    ((0.5, 0.5, 1e-300, 0.0), (0.0, 0.5, 0.2, 0.3)),
)
CLOSE = 1e-10
CASES = [(spec, price, row) for spec in SPECS for price in PRICES for row in range(len(ROWS))]


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(("spec", "price", "row"), some(CASES, 30))
def test_every_road_has_the_precise_row(spec: str, price: float, row: int) -> None:
    q, p = (tensor(*entries) for entries in ROWS[row])
    expected = tensor(*band(spec, price, *ROWS[row]))
    rule = ct.policy("band", price=price, divergence=spec)
    best = ct.optimal_acceptance(q, p, price=price, divergence=spec)
    together = torch.empty_like(q[None])
    rule.bands._write_together(q[None], p[None], torch.ones_like(q[:1]), together)
    for law in (ct.emitted_law(rule, q, p), best.target, together[0]):
        torch.testing.assert_close(law, expected, rtol=0, atol=CLOSE)
    meter = Meter(spec)
    meter.add(nodes_of_rows(Chain(), rule, q[None], p[None]))
    due = spent(spec, ct.emitted_law(rule, q, p), q)
    assert meter.sums()[1] == pytest.approx(due, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("spec", ["alpha:a=10", *some(SPECS, 2)])
def test_so_do_boxed_rows_of_nodes(spec: str) -> None:
    q, p = pair(amount(1, 6), 5, seed=8, kinds=("zeros", "smooth"))
    for price in some((1e-9, 1e-300, 1e9, 0.4), 2):
        for alive in (1.0, 0.3):
            rule = ct.policy("band", price=price, divergence=spec, head=0.5, hold="1", floor="2")
            ratios = torch.full_like(q[:, 0], alive)
            together = torch.empty_like(q)
            rule.bands._write_together(q, p, ratios, together)
            on = q >= 0.5 * q.amax(-1, keepdim=True)
            for row in range(len(q)):
                boxes = [(0.0, math.inf if here else 1.0) for here in on[row]]
                boxes[1], boxes[2] = (1.0, 1.0), (1.0, boxes[2][1])
                expected = tensor(*band(spec, price, q[row], p[row], alive, boxes))
                for law in (rule.bands.laws(q, p, ratios)[row], together[row]):
                    torch.testing.assert_close(law, expected, rtol=0, atol=CLOSE)


@pytest.mark.parametrize(("spec", "above"), [("pearson_chi2", 0.05), ("alpha:a=2", 0.1)])
def test_the_lower_edge_is_known_where_it_is_below_an_ulp_of_the_upper_edge(spec, above) -> None:
    """1/price is 1e17, so that U is 5e16 or 1e17 above A: A comes from the sum of the row."""
    q, p = (
        torch.tensor(row, dtype=torch.float64) for row in ([1e-18, 0.5, 0.5], [0.5, 0.25, 0.25])
    )
    h = ct.policy(f"band:price=1e-17,divergence={spec}").target(q, p)
    rest = (1 - above) / 2
    torch.testing.assert_close(h, torch.tensor([above, rest, rest], dtype=torch.float64))


def test_pearson_at_a_tiny_price_by_hand() -> None:
    """Σ max(p, aq) = 1 over q > 0: a (0.5 + 0.3) = 0.3."""
    q, p = (tensor(*entries) for entries in ROWS[0])
    rule, due = (
        ct.policy("band:price=1e-20,divergence=pearson_chi2"),
        tensor(0.1875, 0.1125, 0.7, 0),
    )
    torch.testing.assert_close(ct.emitted_law(rule, q, p), due, rtol=0, atol=1e-15)
    draws = torch.arange(1000) / 1000 + 0.0005
    # only the last token is refused: 0.1 of (0.0875, 0.0125, 0, 0)
    ids, coins = torch.full((1000, 1), 3), torch.zeros(1000, 1)
    rows = q.expand(1000, 2, 4), p.expand(1000, 1, 4)
    verdict = ct.verify_chain(rule, *rows, ids, coins=(coins, draws))
    assert verdict.output_token_ids[:, 0].bincount(minlength=4).tolist() == [875, 125, 0, 0]
    for token in range(3):
        last = coins[:1] + (1 - 2**-20)
        verdict = ct.verify_chain(rule, rows[0][:1], rows[1][:1], ids[:1] * 0 + token,
                                  coins=(last, draws[:1]))  # fmt: skip
        assert verdict.num_accepted.tolist() == [1]


@pytest.mark.parametrize("spec", some(SPECS, 2))
def test_the_law_that_is_said_is_drawn_and_charged(spec: str) -> None:
    rule = ct.policy("band", price=1.0, divergence=spec)
    names = ["far_knobs_have_one_law"]
    assert assert_policy_properties(rule, properties=names, examples=amount(6, 60)).passed


# found by a sweep over all divergences: NaN in a gap, or D = ∞ beside a gap of 0
ENDS = (
    ("alpha:a=0.3", {"price": 1e300}, 1),
    ("jensen_shannon", {"price": 1e300}, 1),
    ("alpha:a=1.01", {"price": 1e15}, 1),
    ("jensen_shannon", {"price": 1e-300}, 1),
    ("neyman_chi2", {"price": 1e-300}, 1),
    ("alpha:a=-0.5", {"price": 1e-300}, 1),
    ("reverse_kl", {"delta": 1e4}, 1),
    ("pearson_chi2", {"price": 1e-3}, 2),
    ("alpha:a=16", {"price": 1e3}, 3),
)


@pytest.mark.parametrize(("spec", "knob", "row"), ENDS)
def test_gaps_at_the_ends_are_zero_and_proven(spec: str, knob: dict, row: int) -> None:
    q, p = (tensor(*entries) for entries in ROWS[row])
    best = ct.optimal_acceptance(q, p, divergence=spec, **knob)
    assert abs(float(best.gap)) <= 1e-9 and math.isfinite(float(best.divergence))
    due = spent(spec, best.target, q)
    assert float(best.divergence) == pytest.approx(due, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(
    ("spec", "delta"), [("reverse_kl", 1e3), ("reverse_kl", 1e6), ("alpha:a=-0.5", 1e300)]
)
def test_a_budget_is_kept_where_the_lower_edge_leaves_float64(spec: str, delta: float) -> None:
    """The lower edge is above 0, but a·q would be rounded to 0, which costs ∞."""
    q, p = tensor(0.25, 0.25, 0.25, 0.25), tensor(0.0, 1.0, 0.0, 0.0)
    best = ct.optimal_acceptance(q, p, divergence=spec, delta=delta)
    assert float(best.gap) == 0 and float(best.divergence) <= delta
    whole = ct.optimal_acceptance(q, p, divergence=spec, delta=math.inf)
    assert whole.target.equal(p)


@pytest.mark.parametrize("spec", ["reverse_kl", "neyman_chi2", "alpha:a=-0.5"])
@pytest.mark.parametrize("knob", [{"delta": 0.1}, {"price": 1.0}])
def test_a_token_below_normal_numbers_costs_what_it_weighs(spec: str, knob: dict) -> None:
    q, p = tensor(0.5, 0.5, 1e-310), tensor(0.2, 0.7, 0.1)
    best = ct.optimal_acceptance(q, p, divergence=spec, **knob)
    assert float(best.divergence) <= 0.1 * (1 + 1e-9) and abs(float(best.gap)) <= 1e-12
    assert float(best.target[2]) == 1e-310
    together = torch.empty(1, 3, dtype=torch.float64)
    bands = Bands(ct.divergence(spec), **knob)
    bands._write_together(q[None], p[None], tensor(1.0), together)
    assert math.isfinite(float(ct.divergence(spec).value(together, q[None])))


@pytest.mark.parametrize(
    ("spec", "knob"),
    [("pearson_chi2", {"price": 1e-250}), ("neyman_chi2", {"price": 1e-310})],
)
def test_nothing_is_proven_where_a_divergence_leaves_float64(spec: str, knob: dict) -> None:
    q, p = tensor(0.7, 0.3, 1e-200), tensor(0.4, 0.0, 0.6)
    best = ct.optimal_acceptance(q, p, divergence=spec, **knob)
    assert float(best.divergence) == math.inf and float(best.gap) == math.inf
    whole = ct.optimal_acceptance(q, p, divergence=spec, delta=math.inf)
    assert float(whole.gap) == 0  # a budget of ∞ is kept


def test_a_budget_of_renyi_is_kept_where_its_generator_leaves_float64() -> None:
    q, p = tensor(1 - 1e-200, 1e-200), tensor(0.3, 0.7)
    best = ct.optimal_acceptance(q, p, divergence="renyi:a=16", delta=100.0)
    assert float(best.divergence) <= 100 and float(best.acceptance) < 0.31


@pytest.mark.parametrize("q_n", [0.3, 1e-3, 1e-12])
def test_roots_do_not_depend_on_log1p_near_the_largest_number(q_n: float, monkeypatch) -> None:
    """Vector builds of log1p return ∞ from 1e307 on, and ∞·0 is NaN at γ = 1."""
    rule = ct.policy("cactus_exact:delta=0.1,divergence=jensen_shannon")
    due = rule.gamma(tensor(q_n))
    row = ct.divergence("jensen_shannon").value(torch.stack([due, 1 - due], -1),
                                                 tensor(q_n, 1 - q_n)[None])  # fmt: skip
    assert float(row) == pytest.approx(0.1, rel=1e-9) and float(due) > q_n
    own = torch.log1p
    monkeypatch.setattr(torch, "log1p", lambda t: own(t).masked_fill(t > 1e307, torch.inf))
    assert rule.gamma(tensor(q_n)).equal(due)
