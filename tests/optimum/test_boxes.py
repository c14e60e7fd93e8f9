"""Rows cut to boxes c q ≤ h ≤ C q: by bisection, by program, by hand, by the kit, and refused."""

import math

import pytest
import torch

import cactus_theory as ct
from cactus_theory.kernels.policies import has_kernel
from cactus_theory.optimum import bands
from cactus_theory.optimum.bands import Bands
from cactus_theory.optimum.batch_edges import edges
from cactus_theory.optimum.boxes import Boxes, cut_to_boxes
from cactus_theory.optimum.look_ahead import LookAhead
from cactus_theory.testing import assert_policy_properties
from cactus_theory.verify import Assignment, Block, Draft, find_verifier
from cactus_theory.verify.node import Node
from tests.amounts import amount, some
from tests.rows import pair

# of two searches that end at the last bits, in a row's entries
SEARCHED = 1e-12
# of an interior-point solver, in the acceptance
PROGRAM = 1e-7
TIGHT = dict.fromkeys(("tol_gap_abs", "tol_gap_rel", "tol_feas"), 1e-9)
DIVERGENCES = (
    "kl", "reverse_kl", "pearson_chi2", "neyman_chi2", "squared_hellinger", "jensen_shannon",
    "alpha:a=0.5", "alpha:a=3", "renyi:a=0.5", "renyi:a=2",
)  # fmt: skip
# compiled ones, at a price
ONE_BY_ONE = (
    "kl",
    "reverse_kl",
    "pearson_chi2",
    "squared_hellinger",
    "jensen_shannon",
    "alpha:a=3",
)
# whose best rows are not unique: acceptance and divergence are compared
FLAT = ("total_variation", "max_divergence")


def boxes(count):
    """Return q with zeros, p with ties and one-hot rows, floors of 0, 1 and between, ceilings."""
    q, p = pair(count, 6, seed=4, kinds=("zeros", "smooth"))
    p[::7] = torch.nn.functional.one_hot(torch.arange(len(p[::7])) % 6, 6).double()
    p[3::7] = q[3::7].flip(-1)
    p[5::14] = q[5::14]
    source = torch.Generator().manual_seed(9)
    floor, ceiling = (torch.rand(q.shape, generator=source, dtype=torch.float64) for _ in range(2))
    which = torch.randint(4, q.shape, generator=source)
    floor = torch.where(which == 0, 1.0, torch.where(which == 1, floor, 0.0))
    ceiling = torch.where(which == 0, 1.0, torch.where(which == 2, 1 + 2 * ceiling, math.inf))
    ceiling = torch.where(which == 1, 1.5, ceiling)
    floor[1::5], ceiling[1::5] = 0.0, math.inf
    return q, p, floor, ceiling


def cut(q, p, lower, upper, floor, ceiling):
    most = torch.where(q > 0, torch.minimum(upper, ceiling) * torch.where(q > 0, q, 1.0), 0.0)
    return torch.minimum(torch.maximum(p, torch.maximum(lower, floor) * q), most)


def halved(low, high, above):
    """Return where ``above`` becomes true between two ends, each row by itself, to the last bit."""
    for _ in range(55):
        middle = (low + high) / 2
        is_above = above(middle)
        low, high = torch.where(is_above, low, middle), torch.where(is_above, middle, high)
    return high


def by_bisection(q, p, floor, ceiling, kind, delta=None, price=None):
    """Return the row at the largest b whose a sums it to 1, within the budget or at the price."""
    zero, one = torch.zeros_like(q[:, :1]), torch.ones_like(q[:, :1])

    def at(upper):
        above = lambda lower: (  # noqa: E731
            cut(q, p, lower, upper, floor, ceiling).sum(-1, keepdim=True) >= 1
        )
        lower = halved(zero, one, above)
        return lower, cut(q, p, lower, upper, floor, ceiling)

    def beyond(upper):
        lower, row = at(upper)
        over = row.sum(-1, keepdim=True) > 1 + 1e-15 * row.shape[-1]  # no a is low enough
        if price is None:
            return over | (kind.value(row, q)[:, None] > delta)
        f = kind.generator
        return over | (f.slope(upper) - f.slope(lower) > 1 / price)

    most = torch.where(q > 0, p / torch.where(q > 0, q, 1.0), 1.0).amax(-1, keepdim=True)
    ends = halved(one, most.clamp(min=1.0), beyond)
    return at(ends)[1]


def searched(q, p, alive, floor, ceiling, spec, **knob):
    """Return p/P cut to its boxes, then to the band that is searched for."""
    inside, lacking = cut_to_boxes(q, p, alive, floor, ceiling)
    ((name, value),) = knob.items()
    lower, upper = edges(q, inside, ct.divergence(spec), name, value, lacking)
    return cut(q, inside, lower, upper, 0 * q, q + math.inf)


def test_a_one_hot_draft_below_one_has_a_row_that_sums_to_one():
    """A budget that pays for the whole draft at P < 1 gives its token 1: not 1/P, maybe ∞."""
    q, p = torch.tensor([[0.4, 0.6]] * 3).double(), torch.tensor([[0.0, 1.0]] * 3).double()
    alive = torch.tensor([0.3, 1.0, 1e-310], dtype=torch.float64)
    h = searched(q, p, alive, None, None, "kl", delta=0.6)
    assert (h.sum(-1) - 1).abs().max() < 1e-15


@pytest.mark.parametrize("spec", [*DIVERGENCES, *FLAT])
@pytest.mark.parametrize("knob", [{"delta": 0.05}, {"delta": 0.6}, {"price": 0.4}, {"price": 3.0}])
def test_a_boxed_row_is_that_of_an_independent_bisection(spec, knob):
    kind = ct.divergence(spec)
    if "price" in knob and (kind.generator is not kind or not kind.generator.smooth):
        pytest.skip("has no price of its own")
    q, p, floor, ceiling = boxes(amount(4, 200))
    alive = torch.linspace(0.2, 1.0, len(q), dtype=torch.float64)
    alive[::2] = 1.0
    found = searched(q, p, alive, floor, ceiling, spec, **knob)
    p = p / alive[:, None]  # at a node that is reached with P
    expected = by_bisection(q, p, floor, ceiling, kind, **knob)
    assert (found.sum(-1) - 1).abs().max() <= SEARCHED
    if spec in FLAT:
        found, expected = (torch.minimum(p, row).sum(-1) for row in (found, expected))
    assert (found - expected).abs().max() <= SEARCHED


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        # p cut to the boxes sums to 1.25: b falls, with a = 0, at any price
        ("price=0,hold=0", [0.3, 0.45, 0.2, 0.05]),
        ("delta=inf,hold=0", [0.3, 0.45, 0.2, 0.05]),
        ("price=inf,hold=0", [0.3, 0.3, 0.2, 0.2]),
        # a + b of tokens 1 and 3 is 0.5, b/a = e
        ("price=1,hold=0+2", [0.3, 0.3 * 0.5 / (0.3 + 0.2 / math.e), 0.2, None]),
        ("price=0,floor=0+3", [0.3, 0.3, 0.2, 0.2]),
        # nothing that the draft likes may rise: h = q
        ("price=0,hold=1", [0.3, 0.3, 0.2, 0.2]),
        ("delta=0.5,divergence=max_divergence,hold=0", [0.3, 0.45, 0.2, 0.05]),
    ],
)
def test_ends_and_prices_by_hand(spec, expected):
    q = torch.tensor([0.3, 0.3, 0.2, 0.2], dtype=torch.float64)
    p = torch.tensor([0.05, 0.7, 0.2, 0.05], dtype=torch.float64)
    expected = [1 - sum(filter(None, expected)) if x is None else x for x in expected]
    assert ct.emitted_law(ct.policy(f"band:{spec}"), q, p).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("spec", ["kl", "pearson_chi2"])
@pytest.mark.parametrize("knob", [{"delta": 0.05}, {"price": 0.4}])
def test_no_row_in_the_boxes_is_better(spec, knob):
    cp = pytest.importorskip("cvxpy")
    q, p, floor, ceiling = boxes(amount(4, 40))
    h = searched(q, p, torch.ones_like(q[:, 0]), floor, ceiling, spec, **knob)
    price = knob.get("price", 0.0)
    gained = torch.minimum(p, h).sum(-1) - price * ct.divergence(spec).value(h, q)
    for row in range(len(q)):
        at = q[row] > 0
        own = [each[row][at].numpy() for each in (q, p, floor, ceiling.clamp(max=100.0))]
        law = cp.Variable(int(at.sum()), nonneg=True)
        limits = [cp.sum(law) == 1, law >= own[2] * own[0], law <= own[3] * own[0]]
        chi = (law - own[0]) / own[0] ** 0.5
        spent = cp.sum(cp.kl_div(law, own[0])) if spec == "kl" else cp.sum_squares(chi)
        limits += [spent <= knob["delta"]] if "delta" in knob else []
        gain = cp.sum(cp.minimum(own[1], law)) - price * spent
        cp.Problem(cp.Maximize(gain), limits).solve(solver=cp.CLARABEL, **TIGHT)
        assert float(gained[row]) == pytest.approx(gain.value, abs=PROGRAM)


@pytest.mark.parametrize("spec", some(["price=0.5,hold=0,head=0.4", "delta=0.1,floor=0"], 1))
def test_it_obeys_what_it_declares(spec):
    rule = ct.policy(f"band:{spec}")
    assert rule.declares.held == ((0,) if "hold" in spec else ()) and rule.declares.floored == (0,)
    assert_policy_properties(rule, examples=amount(2, 100))


def test_a_deterministic_draft_in_a_block_keeps_what_is_held():
    q, _ = pair(30, 4, seed=5)
    rule = ct.policy("band:price=0.5,hold=0")
    draft = Draft(torch.zeros(30, 2, dtype=torch.int64), [2] * 30, None)
    law = find_verifier("block").law(Assignment((rule,)), torch.stack([q] * 3, 1), draft)
    assert torch.allclose(law.emitted[:, :2, 0], q[:, :1].expand(-1, 2), atol=SEARCHED)


def test_a_token_far_below_a_held_one_is_cut_as_it_is_without_it():
    """The q of cut tokens, 1e-25, must not be lost in the q of the held token."""
    rows = [0.0293, 0.9707, 1.2e-25], [0.6, 0.0, 0.4]
    q, p = (torch.tensor(row, dtype=torch.float64) for row in rows)
    for kind in ("kl", "pearson_chi2"):
        h = ct.emitted_law(ct.policy(f"band:price=1,hold=0,divergence={kind}"), q, p)
        torch.testing.assert_close(h, q / q.sum(), rtol=0, atol=1e-12)


def test_a_drafted_token_beside_which_all_others_stay_is_not_recovered():
    """What is left for other tokens is rounding: no quotient of it may raise the drafted token."""
    rule = ct.policy("band:price=0.4,floor=0+2,head=0.4")
    source = torch.Generator().manual_seed(0)
    for row in torch.rand(200, 3, generator=source, dtype=torch.float64):
        q = row / row.sum()
        for alive in (1.0, 0.9674036520265136):
            raised = math.nextafter(float(q[1]), 0)  # as rounding of a look ahead may have it
            node = Node(Block(), rule, q.numpy(), None, 1, alive, raised)
            assert node.residual().row[1] == 0


def test_a_look_ahead_gains_the_most_that_held_tokens_leave():
    """F = ν m ln((m − q + q e^{(1+F)/ν})/m) = 0.6467: q = 0.3, q_E = 0.25, ν = 0.4, 1 + F = 1.2."""
    nu, q_n, mass, worth = 0.4, 0.3, 0.75, 1.2
    gain = nu * mass * math.log((mass - q_n + q_n * math.exp(worth / nu)) / mass)
    assert gain == pytest.approx(0.6467, abs=5e-5)
    h = torch.linspace(1e-6, mass - 1e-6, 200_001, dtype=torch.float64)
    spent = h * (h / q_n).log() + (mass - h) * ((mass - h) / (mass - q_n)).log()
    assert float((h * worth - nu * spent).amax()) == pytest.approx(gain, abs=1e-9)
    # before the last token, whose 1 + F is 1: two drafted tokens, then the held one
    q = torch.tensor([[[0.3, 0.45, 0.25]] * 2], dtype=torch.float64)
    found = LookAhead(nu, Boxes(held=(2,))).path(q, torch.tensor([[0, 0]]), torch.tensor([2]))
    last = nu * mass * math.log((mass - q_n + q_n * math.exp(1 / nu)) / mass)
    grown = q_n * math.exp((1 + last) / nu)
    assert float(found[0, 0]) == pytest.approx(mass * grown / (mass - q_n + grown))
    held = LookAhead(nu, Boxes(held=(0,))).path(q, torch.tensor([[1, 0]]), torch.tensor([2]))
    grown = 0.45 * math.exp((1 + q_n) / nu)  # a held token is worth its own chance
    assert held[0].tolist() == pytest.approx([0.7 * grown / (0.7 - 0.45 + grown), 0.3])


@pytest.mark.parametrize("spec", some(ONE_BY_ONE, 3))
@pytest.mark.parametrize(
    "own", [Boxes(), Boxes(0.4), Boxes(floored=(0, 2)), Boxes(held=(1,)), Boxes(0.3, (0,), (3, 4))]
)
def test_rows_one_by_one_are_those_of_the_search_together(spec, own, monkeypatch):
    q, p = pair(amount(30, 300), 6, seed=3, kinds=("zeros", "smooth"))
    alive = torch.linspace(0.05, 1.0, len(q), dtype=torch.float64)
    for price in (0.1, 1.0, 10.0):
        laws = []
        for compiled in (True, False):
            monkeypatch.setattr(bands, "is_compiled", lambda f, compiled=compiled: compiled)
            laws.append(Bands(ct.divergence(spec), price=price, boxes=own).laws(q, p, alive))
        torch.testing.assert_close(*laws, rtol=0, atol=SEARCHED)


def test_the_certificate_is_that_of_the_clipped_draft_less_what_floors_take():
    """Theorem 25, (1): of KL at a price, whose edges are b = a e^{1/λ}, a found by bisection."""
    q, p = pair(amount(20, 200), 5, seed=2, kinds=("smooth", "spiky"))
    price, floor = 0.7, torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0]).double()
    ceiling = torch.tensor([math.inf, 1.0, math.inf, math.inf, math.inf]).double()
    h = ct.emitted_law(ct.policy(f"band:price={price},floor=0+2,hold=1"), q, p)
    clipped, ratio = p.maximum(floor * q).minimum(ceiling * q), math.exp(1 / price)
    sums = lambda a: clipped.maximum(a * q).minimum(a * ratio * q).sum(-1, keepdim=True)  # noqa: E731
    ends = torch.zeros(len(q), 1).double(), torch.ones(len(q), 1).double()
    a = halved(*ends, lambda a: sums(a) >= 1)
    u, mu = (clipped / q).maximum(a).minimum(a * ratio), -price * (a.log() + 1)
    most = mu + (q * ((clipped / q).minimum(u) - price * u * u.log() - mu * u)).sum(-1, True)
    bound = (
        price * ct.divergence("kl").value(h, q) + most[:, 0] - (floor * q - p).clamp(min=0).sum(-1)
    )
    torch.testing.assert_close(bound, p.minimum(h).sum(-1), rtol=0, atol=SEARCHED)


def test_what_cannot_keep_boxes_refuses_them_and_ids_are_checked():
    rule = ct.policy("band", price=1, hold="7+2")
    assert rule.spec == "band:price=1.0,hold=2+7" == ct.policy(rule.spec).spec
    assert not has_kernel(rule)
    with pytest.raises(ValueError, match="floor, hold: must be below the rows' 3 tokens; got 7"):
        ct.emitted_law(rule, [0.2, 0.3, 0.5], [0.1, 0.4, 0.5])
    for wrong in ("x", "2+", "1.5", "-1", "٣", 2):
        with pytest.raises(ValueError, match="hold: must be"):
            ct.policy("band", price=1, hold=wrong)
