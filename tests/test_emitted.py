"""What is emitted beside the properties of every policy, and what an audit says of it."""

import math

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.emitted import directions, raised_off_head
from cactus_theory.policies import FixedTarget, Policy, _base_classes
from tests.formulas import TEN
from tests.rows import pair
from tests.rules import RULES, SPECS

# sums of a few dozen float64 terms, each at most 1
EXACT = 1e-12
# divergences of rows known to EXACT; relative too, since χ² may be large
DIVERGENCE = 1e-9
# the best acceptance grows like √δ from δ = 0, so a spend of 1e-16 (rounding) moves it by 1e-8
EQUAL_SPEND = 1e-7
BATCH = pair(12, 7)


def close(value, expected, tolerance=EXACT):
    torch.testing.assert_close(value, expected, rtol=0, atol=tolerance)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def accepted(rule, q, p):
    return (p * rule.acceptance_row(q, p)).sum(-1)


@pytest.mark.parametrize("spec", ["cactus:delta=0.01", "cactus_exact:delta=0.01", "cactus:delta=0"])
def test_terms_sorted_in_a_loop_or_in_torch_are_the_same_law(spec, monkeypatch):
    rule = RULES.get(spec) or ct.policy(spec)
    kinds = (("smooth", "spiky"), ("smooth", "smooth"), ("zeros", "zeros"), ("spiky", "smooth"))
    rows = [pair(4, 40, seed=i, kinds=kind) for i, kind in enumerate(kinds)]
    q, p = (torch.cat([*part, rows[0][0]]) for part in zip(*rows, strict=True))
    refused = (p > rule.gamma(q)).sum(-1)
    assert refused.min() == 0  # the last four, where p is q
    assert refused.max() > 12
    expected = Policy.emitted(rule, q, p)
    for solver in (_base_classes.loops, lambda: None):
        monkeypatch.setattr(_base_classes, "loops", solver)
        close(rule.emitted(q, p), expected)
        close(torch.stack([rule.emitted(*row) for row in zip(q, p, strict=True)]), expected)


def test_no_rule_emits_what_the_target_excludes_unless_its_knob_says_so():
    for spec, rule in RULES.items():
        assert rule.declares.support == ("free" if "support=free" in spec else "target"), spec


@pytest.mark.parametrize("spec", SPECS)
def test_a_jump_of_the_acceptance_is_declared(spec):
    rule = RULES[spec]
    if not rule.declares.continuous:
        return
    q, p = (row[:2] for row in BATCH)
    low, high = 0.0, 1.0
    for _ in range(12):  # 6^12 > 1e9: what is left of a jump is a jump
        steps = torch.linspace(low, high, 7, dtype=torch.float64)[:, None]
        share = accepted(rule, torch.lerp(q[:1], q[1:], steps), torch.lerp(p[:1], p[1:], steps))
        worst = int(share.diff().abs().argmax())
        low, high = steps[worst].item(), steps[worst + 1].item()
    assert share.diff().abs().max() < 1e-6


@pytest.mark.parametrize(
    "spec", ["cactus:delta=0.25", "typical:recover=target", "speculative", "band:price=0.5"]
)
def test_audit(spec):
    rule = RULES[spec]
    q, p = BATCH
    report = ct.audit(rule, q, p)
    law = ct.emitted_law(rule, q, p)
    assert report.policy == rule.spec and report.declares == rule.declares
    close(report.acceptance, accepted(rule, q, p))
    assert set(report.divergences) >= set(TEN) and report.reference == "kl"
    spent = ct.divergence("kl").value(law, q)
    close(report.divergences["kl"], spent)
    assert (report.optimum_acceptance >= report.acceptance - DIVERGENCE).all()
    assert (report.optimum_divergence <= spent + DIVERGENCE).all()
    best = ct.optimal_acceptance(q, p, delta=spent)
    close(report.optimum_acceptance, best.acceptance, EQUAL_SPEND)
    if rule.declares.budget is None:
        assert report.within is None and report.spent is None and report.over_share is None


def test_audit_of_a_budget_per_proposal():
    delta = 0.25
    q = tensor(1 / (1 + 2 * delta), 0.1, 1 - 0.1 - 1 / (1 + 2 * delta))
    p = tensor(0.3, 0.7, 0.0)
    published = ct.audit(ct.policy("cactus", delta=delta), q, p)
    assert not published.within and published.spent.item() == pytest.approx(math.log(1.5))
    assert published.over_share.item() == pytest.approx(0.3)
    exact = ct.audit(ct.policy("cactus_exact", delta=delta), q, p)
    assert exact.within and exact.over_share == 0
    assert exact.spent.item() <= delta + EXACT
    emitted = ct.audit(ct.policy("band", delta=delta), q, p)
    assert emitted.within and emitted.over_share is None


def test_audit_says_so_when_the_acceptance_is_out_of_reach():
    class Leaky(FixedTarget):
        name = "leaky"
        spec = "leaky"

        def target(self, q, p, path=None):
            return p

    q, p = tensor(0.5, 0.5, 0.0), tensor(0.3, 0.3, 0.4)
    report = ct.audit(Leaky(), q, p)
    assert report.acceptance.item() == pytest.approx(1.0)
    assert report.optimum_divergence.isnan() and report.divergences["kl"].isinf()


def test_mass_raised_off_the_head_is_that_of_tokens_far_below_the_first_choice():
    q = tensor(0.5, 0.1, 0.0999, 0.3, 0.0001, 0.0)
    h = tensor(0.3, 0.25, 0.1999, 0.1, 0.1, 0.0501)
    # of the largest, 0.5, a fifth is the head: 0.1 is, the three below are not
    assert float(raised_off_head(h, q)) == pytest.approx(0.1 + 0.0999 + 0.0501)
    assert float(raised_off_head(h, q, head=0.0)) == 0 == float(raised_off_head(q, q, head=1.0))
    rows, drafts = pair(7, 9, seed=4)
    seen = ct.audit(ct.policy("band:price=0.3"), rows, drafts)
    law = ct.emitted_law(ct.policy("band:price=0.3"), rows, drafts)
    for mass, own, target in zip(seen.raised_off_head, law, rows, strict=True):
        far = [max(float(a - b), 0.0) for a, b in zip(own, target, strict=True)
               if b < 0.2 * target.max()]  # fmt: skip
        assert float(mass) == pytest.approx(sum(far), abs=EXACT)
    assert seen.raised_off_head.max() > 0.01
    assert not ct.audit(ct.policy("speculative:tilt=1"), rows, drafts).raised_off_head.any()


def test_kinds_of_input():
    q, p = pair(2, 3, 5, seed=9)
    rule = ct.policy("cactus:delta=0.3")
    law = ct.emitted_law(rule, q, p)
    assert law.shape == (2, 3, 5) and law.dtype == torch.float64
    narrow = ct.emitted_law(rule, q.float().numpy(), p.float().numpy())
    assert narrow.dtype == np.float64
    np.testing.assert_allclose(narrow, law.numpy(), atol=1e-6)
    report = ct.audit(rule, q.numpy(), p.numpy(), divergence="renyi:a=3")
    assert isinstance(report.acceptance, np.ndarray) and report.acceptance.shape == (2, 3)
    assert report.reference == "renyi:a=3" and "renyi:a=3" in report.divergences


# of a long row, where numbers of the order of 1 are added up in another order
LONG_ROW = 1e-12
# what rounding rows to float32 does to a law
FLOAT32_ROWS = 1e-6


def long_pair(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float64 target and draft rows of 10,000 tokens."""
    generator = torch.Generator().manual_seed(8)
    logits = 3 * torch.randn(2, 1, 10_000, generator=generator, dtype=torch.float64)
    q, p = logits[0].softmax(-1), (logits[0] + logits[1] / 3).softmax(-1)
    if kind == "zeros":
        q[0, ::3], p[0, ::5] = 0, 0
    elif kind == "denormal":
        q[0, ::7], p[0, ::7] = 1e-310, 1e-309
    elif kind == "one-hot":
        q = torch.zeros_like(q).index_fill_(-1, torch.tensor([77]), 1.0)
    elif kind == "deterministic":
        p = torch.zeros_like(p).index_fill_(-1, q.argmax(-1), 1.0)
    return q / q.sum(), p / p.sum()


def by_definition(rule, q, p):
    """Return Σ_n p_n φ(n) e_n + p_n (1 − φ(n)) g(·|n) of one row, a hundred tokens at a time."""
    accepted = rule.acceptance_row(q, p)
    lost = (p * (1 - accepted))[0]
    law = (p * accepted)[0]
    for tokens in lost.nonzero()[:, 0].split(100):
        rows = (row.expand(len(tokens), -1) for row in (q, p))
        law = law + lost[tokens] @ rule.residual(*rows, tokens)
    return law[None]


@pytest.mark.parametrize("kind", ["dense", "zeros", "denormal", "one-hot", "deterministic"])
@pytest.mark.parametrize("spec", ["lenience:lenience=0.5", "cactus:delta=0.1"])
def test_a_long_row_has_the_law_of_its_definition(spec, kind):
    q, p = long_pair(kind)
    rule = ct.policy(spec)
    defined = by_definition(rule, q, p)
    law = ct.emitted_law(rule, q, p)
    again = ct.emitted_law(rule, p, q)  # in other memory than the law that is held
    close(law, defined, LONG_ROW)
    close(ct.emitted_law(rule, torch.cat([q, p]), torch.cat([p, q])), torch.cat([law, again]))


@pytest.mark.parametrize("spec", ["lenience:lenience=0.5", "cactus:delta=0.1", "band:price=1"])
def test_a_row_that_equals_its_draft_is_emitted_beside_others(spec):
    """Nothing is left of q over p there, and what is recovered is 0 of 0."""
    q, p = long_pair("dense")
    rule = ct.policy(spec)
    law = ct.emitted_law(rule, torch.cat([q, q]), torch.cat([q, p]))
    close(law, torch.cat([q, ct.emitted_law(rule, q, p)]), LONG_ROW)


@pytest.mark.parametrize("kind", ["dense", "zeros", "denormal", "one-hot", "deterministic"])
@pytest.mark.parametrize("price", [0.3, 2.0])
@pytest.mark.parametrize("divergence", ["kl", "reverse_kl", "pearson_chi2", "squared_hellinger"])
def test_a_long_row_has_the_band_of_the_sorted_path(divergence, price, kind):
    q, p = long_pair(kind)
    rule = ct.policy("band", price=price, divergence=divergence)
    solved = ct.optimal_acceptance(q, p, price=price, divergence=divergence)
    law = ct.emitted_law(rule, q, p)
    close(law, solved.target, LONG_ROW)
    narrow = ct.emitted_law(rule, q.float(), p.float(), normalise=True)
    close(narrow, law, FLOAT32_ROWS)


Q = pair(6, 7, seed=4)[0]
IDS = torch.tensor([0, 6, 2, 3, 3, 1])
HOT = torch.nn.functional.one_hot(IDS, 7).double()


@pytest.mark.parametrize("spec", SPECS[::3])
def test_the_law_of_a_deterministic_draft_is_that_of_one_hot_rows(spec: str) -> None:
    rule = RULES[spec]
    law = ct.emitted_law(rule, Q, draft_token_ids=IDS)
    torch.testing.assert_close(law, ct.emitted_law(rule, Q, HOT), rtol=0, atol=1e-12)


@pytest.mark.parametrize("spec", ["cactus:delta=0.25", "band:delta=0.1", "typical"])
def test_an_audit_equals_that_of_one_hot_rows(spec: str) -> None:
    rule = ct.policy(spec)
    found, rows = ct.audit(rule, Q, draft_token_ids=IDS), ct.audit(rule, Q, HOT)
    for name in ("acceptance", "optimum_acceptance", "optimum_divergence"):
        torch.testing.assert_close(getattr(found, name), getattr(rows, name), equal_nan=True)
    torch.testing.assert_close(found.divergences["kl"], rows.divergences["kl"])
    torch.testing.assert_close(found.acceptance, rule.acceptance(Q, HOT, IDS[:, None])[:, 0])


def test_kinds_of_ids_and_their_shapes() -> None:
    rule = ct.policy("speculative")
    law = ct.emitted_law(rule, Q[0].float().numpy(), None, draft_token_ids=2)
    assert isinstance(law, np.ndarray) and law.dtype == np.float64 and law.shape == (7,)
    assert ct.emitted_law(rule, Q, None, draft_token_ids=4).shape == (6, 7)
    several = ct.audit(rule, Q[0], None, draft_token_ids=[0, 1, 2])
    torch.testing.assert_close(several.acceptance, Q[0, :3])
    batch = Q.reshape(2, 3, 7), IDS.reshape(2, 3)
    assert ct.audit(rule, batch[0], None, draft_token_ids=batch[1]).acceptance.shape == (2, 3)


def test_entropy_surprise_and_agreement_of_a_law_by_hand() -> None:
    q = torch.tensor([[0.5, 0.25, 0.25, 0.0]], dtype=torch.float64)
    h = torch.tensor([[0.25, 0.5, 0.25, 0.0]], dtype=torch.float64)
    entropy, surprise, agreement = (float(own) for own in directions(h, q))
    assert entropy == pytest.approx(1.5 * math.log(2)) and agreement == -0.0625
    assert surprise == pytest.approx(0.25 * math.log(2))  # a quarter moved from ln 2 to ln 4
    assert [float(own) for own in directions(q, q)] == [entropy, 0.0, 0.0]
    outside = torch.tensor([[0.25, 0.25, 0.25, 0.25]], dtype=torch.float64)
    assert float(directions(outside, q)[1]) == math.inf
    colder = q**2 / (q**2).sum()
    _, surprise, agreement = (float(own) for own in directions(colder, q))
    assert surprise < 0 < agreement  # a colder target emits what is likelier, and agrees more


def test_an_audit_has_them_by_row() -> None:
    source = torch.Generator().manual_seed(0)
    rows = torch.rand(2, 5, 7, generator=source, dtype=torch.float64) + 0.01
    q, p = rows / rows.sum(-1, keepdim=True)
    report = ct.audit("cactus:delta=1", q, p)
    due = directions(ct.emitted_law("cactus:delta=1", q, p), q)
    for name, own in zip(("entropy", "surprise", "agreement"), due, strict=True):
        assert torch.allclose(getattr(report, name), own, atol=1e-12)
