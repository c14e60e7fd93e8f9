"""Numbers that rules must reproduce, their limits, and how they are named."""

import math

import pytest
import torch

import cactus_theory as ct
from cactus_theory.emitted import proposal_divergence
from tests.formulas import ALL, by_hand
from tests.rules import RULES, SPECS

CLOSE = 1e-12
Q_N = torch.tensor([1e-30, 1e-12, 1e-3, 0.1, 0.35, 0.5, 0.9, 1 - 1e-9], dtype=torch.float64)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def two_point(spec, gamma, q):
    """Return the divergence of the row raised to gamma, by hand."""
    return by_hand(spec, torch.stack([gamma, 1 - gamma], -1), torch.stack([q, 1 - q], -1))


@pytest.mark.parametrize("spec", [
    "speculative", "band:price=1", "band:price=1,tilt=0.1", "lenience:lenience=0.5,tilt=-0.1",
    "truncated:top_p=0.5", "regret:price=2", "typical",
])  # fmt: skip
def test_a_policy_says_whether_undrafted_tokens_come_from_another_row_than_q(spec):
    """Meters charge 0 for an undrafted token, without looking, unless the policy says so."""
    policy, q = ct.policy(spec), tensor(0.5, 0.3, 0.2)
    assert policy.moves_undrafted == (not policy.undrafted(q).equal(q))


def test_a_subclass_with_another_undrafted_row_says_so():
    class Argmax(type(ct.policy("speculative"))):
        def undrafted(self, q):
            return (q == q.amax(-1, keepdim=True)).to(q)

    assert Argmax().moves_undrafted


def test_the_example_of_the_published_readme():
    q, p, n = tensor(0.30, 0.35, 0.35), tensor(0.05, 0.80, 0.15), torch.tensor([1])
    assert ct.policy("speculative").acceptance(q, p, n).item() == pytest.approx(0.4375)
    rule = ct.policy("cactus", delta=0.2112)
    assert rule.gamma(q)[1].item() == pytest.approx(0.66, abs=5e-5)
    assert rule.acceptance(q, p, n).item() == pytest.approx(0.825, abs=5e-5)
    spent = proposal_divergence(rule, q, p, ct.divergence("kl"))[1]
    assert spent.item() == pytest.approx(0.1983, abs=5e-5)


@pytest.mark.parametrize(("delta", "ratio"), [(0.01, 1.98), (0.1, 1.82), (0.5, 1.39), (1.0, 1.10)])
def test_the_published_rule_overspends_most_at_one_over_one_plus_two_delta(delta, ratio):
    rule = ct.policy("cactus", delta=delta)
    at = tensor(1 / (1 + 2 * delta))
    assert two_point("kl", rule.gamma(at), at).item() == pytest.approx(math.log1p(2 * delta))
    assert math.log1p(2 * delta) / delta == pytest.approx(ratio, abs=0.005)
    grid = torch.linspace(1e-4, 1 - 1e-4, 20_001, dtype=torch.float64)
    spent = torch.as_tensor(two_point("kl", rule.gamma(grid), grid))
    assert spent.max().item() <= math.log1p(2 * delta) + CLOSE
    assert grid[spent.argmax()].item() == pytest.approx(at.item(), abs=1e-4)
    assert (spent[rule.gamma(grid) <= 0.5] <= delta + CLOSE).all()


@pytest.mark.parametrize("delta", [1e-6, 0.01, 0.5, 4.0])
def test_the_published_rule_is_exact_for_twice_the_pearson_budget(delta):
    exact = ct.policy("cactus_exact", delta=2 * delta, divergence="pearson_chi2")
    published = ct.policy("cactus", delta=delta)
    torch.testing.assert_close(published.gamma(Q_N), exact.gamma(Q_N), rtol=1e-9, atol=CLOSE)


@pytest.mark.parametrize("spec", ALL)
@pytest.mark.parametrize("delta", [1e-4, 0.1, 1.5])
def test_the_exact_rule_spends_its_budget_to_the_last_digit(spec, delta):
    gamma = ct.policy("cactus_exact", delta=delta, divergence=spec).gamma(Q_N)
    assert ((gamma >= Q_N) & (gamma <= 1)).all()
    inner = (gamma < 1 - 1e-9) & (Q_N > 1e-13)  # where 1 − γ keeps its digits
    spent = torch.as_tensor(two_point(spec, gamma, Q_N))
    most = torch.as_tensor(two_point(spec, torch.ones_like(Q_N), Q_N))
    assert (most[gamma == 1] <= delta + 1e-9).all()
    assert (spent[inner] <= delta + 1e-9 * (1 + delta)).all()
    # plugging back in: γ, not D, is what has to be right to 1e-12
    slack = (delta - spent)[inner]
    step = 1e-6 * (1 - gamma[inner])
    rise = torch.as_tensor(two_point(spec, gamma[inner] + step, Q_N[inner])) - spent[inner]
    assert (slack * step / rise <= CLOSE).all()


def test_the_kl_budget_reaches_certainty_at_e_to_minus_delta():
    delta = 0.3
    edge = math.exp(-delta)
    gamma = ct.policy("cactus_exact", delta=delta).gamma(tensor(edge - 1e-6, edge + 1e-6))
    assert gamma[0] < 1 and gamma[1] == 1
    never = ct.policy("cactus_exact", delta=5.0, divergence="reverse_kl").gamma(tensor(0.999))
    assert never < 1


@pytest.mark.parametrize("rule", [s for s in SPECS if s.startswith("cactus")])
def test_limits_of_gamma(rule):
    rule = RULES[rule]
    assert rule.gamma(tensor(0.0, 1.0)).tolist() == [0.0, 1.0]
    if rule.delta == 0:
        assert torch.equal(rule.gamma(Q_N), Q_N)
    if rule.delta == math.inf:
        assert (rule.gamma(Q_N) == 1).all()
    rising = rule.gamma(torch.linspace(0, 1, 500, dtype=torch.float64))
    assert (rising.diff() >= -CLOSE).all()


def test_typical_threshold():
    q = tensor(0.5, 0.3, 0.1, 0.08, 0.02)  # two of them just beside the threshold of 0.09
    entropy = -(q * q.log()).sum()
    threshold = min(0.09, 0.3 * math.exp(-entropy))
    rule = ct.policy("typical")
    assert rule.threshold(q).item() == pytest.approx(threshold)
    assert rule.acceptance_row(q, q).tolist() == [1.0, 1.0, 1.0, 0.0, 0.0]
    at = tensor(0.25, 0.75)  # the threshold itself is refused
    assert ct.policy("typical:epsilon=0.25,alpha=100").acceptance_row(at, at).tolist() == [0.0, 1.0]
    ties = tensor(0.1, 0.4, 0.4, 0.1)
    assert rule.residual(ties, ties, torch.tensor(0)).tolist() == [0.0, 1.0, 0.0, 0.0]
    assert ct.policy("typical:recover=target").residual(q, q, torch.tensor(0)).equal(q)


EVEN = (0.25, 0.5, 0.25)
# what a rule does at its threshold exactly, and next to it: the accepted tokens, by q and p
AT_THRESHOLDS = [
    # more than ε, and more than α e^{-H} = α/2 of two tokens
    ("typical:epsilon=0.25,alpha=5", EVEN, None, [0, 1, 0]),
    ("typical:epsilon=0.24,alpha=5", EVEN, None, [1, 1, 1]),
    ("typical:epsilon=1,alpha=1", (0.5, 0.5, 0.0), None, [0, 0, 0]),
    ("typical:epsilon=1,alpha=0.99", (0.5, 0.5, 0.0), None, [1, 1, 0]),
    # at least that of the k-th token, and more than 0
    ("top_k:k=1", (0.4, 0.4, 0.2), None, [1, 1, 0]),
    ("top_k:k=2", EVEN, None, [1, 1, 1]),
    ("top_k:k=3", (0.5, 0.5, 0.0), None, [1, 1, 0]),
    ("top_k:k=9", (0.5, 0.5, 0.0), None, [1, 1, 0]),
    # at least max q − δ
    ("relaxed:k=3,delta=0.25", EVEN, None, [1, 1, 1]),
    ("relaxed:k=3,delta=0.249", EVEN, None, [0, 1, 0]),
    ("relaxed:k=3,delta=1", (0.5, 0.5, 0.0), None, [1, 1, 0]),
    # at least s
    ("thresholds:single=0.25", EVEN, None, [1, 1, 1]),
    ("thresholds:single=0.26", EVEN, None, [0.25, 1, 0.25]),
    ("thresholds:single=0,acc=0", (0.5, 0.5, 0.0), None, [1, 1, 0]),
    # less than T: TV(p, q) is a quarter
    ("fuzzy:threshold=0.25,divergence=total_variation", (0.75, 0.25), (0.5, 0.5), [1, 0.5]),
    ("fuzzy:threshold=0.251,divergence=total_variation", (0.75, 0.25), (0.5, 0.5), [1, 1]),
    # at least β max q may rise, here to p
    ("band:price=0,head=0.5", (0.5, 0.25, 0.25), (0.25, 0.5, 0.25), [1, 1, 1]),
    ("band:price=0,head=0.501", (0.5, 0.25, 0.25), (0.25, 0.5, 0.25), [1, 0.5, 1]),
    ("band:delta=inf,head=0.5", (0.5, 0.25, 0.25), (0.25, 0.5, 0.25), [1, 1, 1]),
    ("band:delta=inf,head=0.501", (0.5, 0.25, 0.25), (0.25, 0.5, 0.25), [1, 0.5, 1]),
    ("band:price=1e-3,head=0.5", (0.5, 0.25, 0.25), (0.25, 0.5, 0.25), [1, 1, 1]),
    ("band:price=1e-3,head=0.501", (0.5, 0.25, 0.25), (0.25, 0.5, 0.25), [1, 0.5, 1]),
    # the nucleus is the smallest set with mass of at least top_p: a token more beyond it
    ("truncated:top_p=0.5", (0.5, 0.25, 0.25), (0.5, 0.25, 0.25), [1, 0, 0]),
    ("truncated:top_p=0.501", (0.5, 0.3, 0.2), (0.5, 0.3, 0.2), [1, 1, 0]),
]


@pytest.mark.parametrize(("spec", "q", "p", "accepted"), AT_THRESHOLDS)
def test_what_lies_at_a_threshold_is_decided_as_it_is_said(spec, q, p, accepted):
    """φ, and the coins of a chain at 0, just below φ and at it."""
    rule, count = ct.policy(spec), len(q)
    q = tensor(*q)
    p = tensor(*p) if p else torch.full_like(q, 1 / count)
    phi = tensor(*accepted)
    torch.testing.assert_close(rule.acceptance_row(q, p), phi, rtol=0, atol=CLOSE)
    rows, ids = q.expand(count, 2, -1), torch.arange(count)[:, None]
    for coin, passed in ((0 * phi, phi > 0), (phi - 1e-9, phi > 0), (phi, phi >= 1)):
        coins = coin.clamp(0, 1 - 1e-9)[:, None], torch.full((count,), 0.5)
        verdict = ct.verify_chain(rule, rows, p.expand(count, 1, -1), ids, coins=coins)
        assert verdict.num_accepted.tolist() == passed.long().tolist()


@pytest.mark.parametrize("spec", SPECS)
def test_spec_round_trip(spec):
    rule = RULES[spec]
    again = ct.policy(rule.spec)
    assert again == rule and again.spec == rule.spec
    assert ct.policy(rule) is rule


@pytest.mark.parametrize(
    ("spec", "knobs", "message"),
    [
        ("nothing", {}, "policy: must be one of .*; got 'nothing'"),
        ("cactus", {}, "policy: cactus needs the knob delta; got 'cactus'"),
        ("cactus:delta=1", {"delta": 2}, "delta: must be given once; got"),
        ("cactus:delta=1,k=2", {}, "policy: cactus takes the knobs delta; got 'k'"),
        ("speculative:k=2", {}, "policy: speculative takes the knobs tilt; got 'k'"),
        ("cactus:delta", {}, "spec: knobs must read knob=value; got 'delta' in 'cactus:delta'"),
        ("cactus:delta=x", {}, "delta: must be a number; got 'x'"),
        ("cactus:delta=-1", {}, r"delta: must lie in \[0, inf\]; got -1.0"),
        ("cactus", {"delta": math.nan}, r"delta: must lie in \[0, inf\]; got nan"),
        ("band:delta=1,price=1", {}, "exactly one must be given; got delta and price"),
        ("band:delta=1,divergence=x", {}, "divergence: must be one of .*; got 'x'"),
        ("top_k:k=0", {}, "k: must be a whole number of at least 1; got 0"),
        ("top_k:k=2,recover=argmax", {}, "top_k takes the knobs k; got 'recover'"),
        ("fuzzy:threshold=1,divergence=kll", {}, "kll"),
        ("band", {"price": math.nan}, "price: must lie in .*nan"),
    ],
)
def test_bad_specs_are_named(spec, knobs, message):
    with pytest.raises(ValueError, match=message):
        ct.policy(spec, **knobs)


# specs, each with one knob out of its range: it is the last one, and named
OUTSIDE = """lenience:lenience=0
typical:epsilon=2 typical:recover=q mixture:alpha=-0.1 fuzzy:threshold=-1
speculative:tilt=-1 truncated:top_p=0 relaxed:k=0
relaxed:delta=-0.1 relaxed:recover=q thresholds:acc=1.5 thresholds:single=-1"""


@pytest.mark.parametrize("spec", OUTSIDE.split())
def test_a_knob_out_of_its_range_is_named(spec):
    knob = spec.replace(",", ":").split(":")[-1].partition("=")[0]
    with pytest.raises(
        ValueError, match=rf"^{knob}: must (lie in [\[(]|be one of|be a whole number)"
    ):
        ct.policy(spec)


def test_the_listing_says_what_every_rule_declares():
    for name, entry in ct.list_policies().items():
        assert entry["declares"] and not entry["declares"].startswith("Return"), name
        assert entry["summary"].endswith((".", ":"))


@pytest.mark.parametrize(
    ("spec", "least"), [("renyi:a=2", 82), ("renyi:a=4", 33), ("alpha:a=10", 20)]
)
def test_tokens_are_raised_down_to_where_it_no_longer_matters(spec, least):
    rule = ct.policy(f"cactus_exact:delta=0.3,divergence={spec}")
    q_n = 10.0 ** -torch.arange(1, least + 1, dtype=torch.float64)
    gamma = rule.gamma(q_n)
    assert (gamma > 1.01 * q_n).all() and gamma[-1] < 1e-17


def test_a_row_that_cannot_be_told_its_path_is_refused_where_it_is_written():
    with pytest.raises(TypeError, match=r"Mine.target: must be target\(self, q, p, path=None"):

        class Mine(type(ct.policy("lenience:lenience=0.5"))):
            def target(self, q, p):
                return q
