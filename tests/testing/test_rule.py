"""A plain function becomes a policy: its knobs, its promises, its residual."""

import math
import re

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.policies import FixedTarget, SharedResidual
from cactus_theory.testing._check_policies import check_policy
from tests.rows import pair
from tests.testing.gallery import taylor

SEED = torch.Generator().manual_seed(0)
CLOSE = {"rtol": 0, "atol": 1e-12}


@ct.rule(budget="max_divergence <= delta per proposal", direction=1, strict=0.0)
def lenient(q, p, n, *, delta=0.5):
    return min(1, np.exp(delta) * q[n] / p[n])


@ct.rule
def half(q, p):
    return (q + p) / 2


def test_a_function_of_two_is_a_fixed_target():
    assert isinstance(half, FixedTarget)
    q, p = pair(2, 3, 5, seed=2)
    torch.testing.assert_close(ct.emitted_law(half, q, p), (q + p) / 2, **CLOSE)
    report = ct.audit(half, q, p)
    assert report.policy == "half"
    torch.testing.assert_close(report.acceptance, torch.minimum(p, (q + p) / 2).sum(-1), **CLOSE)


def test_a_residual_of_its_own_is_asked_where_a_token_can_be_rejected():
    asked = []

    def residual(q, p, n):
        asked.append((q.tolist(), n))
        return np.eye(len(q))[q.argmax()]

    rule = ct.rule(lambda q, p, n: min(1, q[n] / p[n]), residual=residual)
    q = torch.tensor([[0.2, 0.8], [0.2, 0.8]], dtype=torch.float64)
    p = torch.tensor([[0.5, 0.5], [0.1, 0.9]], dtype=torch.float64)
    g = rule.residual(q, p, torch.tensor([0, 0]))
    assert g.tolist() == [[0.0, 1.0], [0.2, 0.8]]  # nothing to reject in the second row
    assert asked == [([0.2, 0.8], 0)]


def test_a_residual_of_two_arguments_is_asked_once_a_row():
    asked = []

    def row(q, p):
        asked.append(len(q))
        return np.sqrt(q) / np.sqrt(q).sum()

    q, p = pair(3, 50, seed=5)
    shared = ct.rule(lambda q, p, n: min(1, q[n] / p[n]), residual=row)
    single = ct.rule(lambda q, p, n: min(1, q[n] / p[n]), residual=lambda q, p, n: row(q, p))
    law = ct.emitted_law(shared, q, p)
    assert len(asked) == 3  # for each of the tokens that may be rejected before
    torch.testing.assert_close(law, ct.emitted_law(single, q, p), **CLOSE)
    n = torch.tensor([0, 1, 2])
    torch.testing.assert_close(shared.residual(q, p, n), single.residual(q, p, n), **CLOSE)
    # (q − p)₊, which is the default, is one of these: V = 20,000 in milliseconds
    q, p = torch.softmax(torch.randn(2, 1, 20_000, generator=SEED, dtype=torch.float64), -1)
    default = ct.rule(vectorised=True)(lambda q, p, n: torch.ones(n.shape) / 2)
    assert isinstance(default, SharedResidual)
    assert ct.emitted_law(default, q, p).shape == (1, 20_000)


def test_a_long_enumeration_says_how_long_and_what_would_be_fast(monkeypatch):
    monkeypatch.setattr("cactus_theory.policies.policy.FIRST_SECONDS", 0.0)
    monkeypatch.setattr("cactus_theory.policies.policy.SLOW_SECONDS", 0.0)
    monkeypatch.setattr("cactus_theory.policies.policy.ENTRIES", 20)
    q, p = pair(1, 10, seed=6)
    slow = ct.rule(lambda q, p, n: 0.5, residual=lambda q, p, n: q)
    with pytest.warns(UserWarning, match=r"10 tokens .* \(V = 10\), about .*; where .*f\(q, p\)"):
        ct.emitted_law(slow, q, p)


def test_tokens_that_cannot_be_drafted_are_not_asked_for():
    def division(q, p, n):
        return min(1.0, float(q[n]) / float(p[n]))

    q, p = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([1.0, 0.0, 0.0])
    assert ct.rule(division).acceptance_row(q, p).tolist() == [0.5, 1.0, 0.0]


def test_knobs_and_promises():
    assert lenient.spec == "lenient:delta=0.5" and lenient.knob == "delta"
    budget = lenient.declares.budget
    assert (budget.divergence, budget.amount, budget.scope) == (
        "max_divergence",
        0.5,
        "per proposal",
    )
    other = ct.policy(lenient, delta=0.1)
    assert other.declares.budget.amount == 0.1 and lenient.declares.budget.amount == 0.5
    q, p = np.array([0.2, 0.8]), np.array([0.9, 0.1])
    assert other(q, p, 0) == pytest.approx(np.exp(0.1) * 0.2 / 0.9)
    assert other.acceptance_row(*map(torch.from_numpy, (q, p)))[0].item() == other(q, p, 0)
    assert other.declares.direction == 1 and other.declares.strict == 0.0


def test_rows_keep_their_dtype_on_the_way_in():
    seen = []
    rule = ct.rule(lambda q, p, n: seen.append((q.dtype, p.dtype)) or 0.5)
    q, p = (row.float() for row in pair(1, 3))
    rule.acceptance(q, p, torch.tensor([[0]]))
    assert set(seen) == {(np.dtype("float32"),) * 2}


def one_argument(q):
    return q


def two_numbers(q, p, n):
    return q[:2]


def knob_without_default(q, p, n, *, delta):
    return delta


PLAIN = lenient.function
RANGES = ((1, 0), (0,), (0, 1, 2), "ab", 5, (0, math.nan))
WRONG = {
    TypeError: [
        (one_argument, {}, r"must take \(q, p, n\) or \(q, p\)"),
        (PLAIN, {"fast": True}, "declares one of .*'fast'"),
        (half.source.function, {"residual": two_numbers}, "residual: follows from the target row"),
        (two_numbers, {"contnuous": False}, "declares one of .*got 'contnuous'"),
    ],
    ValueError: [
        (knob_without_default, {}, "the knob delta needs a default value"),
        (lambda q, p, *, row=1: q, {}, "a knob must not be .*got 'row'"),
        (lambda q, p, *, name=1: q, {}, "a knob must not be .*got 'name'"),
        (lambda q, p, *, source=1: q, {}, "a knob must not be .*got 'source'"),
        (PLAIN, {"budget": "kl"}, "budget: must read"),
        (PLAIN, {"budget": "kl <= x emitted"}, "budget: must be a number; got 'x'"),
        (two_numbers, {"continuous": "no"}, "continuous: must be True or False; got 'no'"),
        (two_numbers, {"between": 1}, "between: must be True or False; got 1"),
        (two_numbers, {"support": "q"}, "support: must be one of"),
        (PLAIN, {"direction": 2}, "direction: must be one of"),
        (two_numbers, {"direction": 1}, "direction: speaks of a knob"),
        (two_numbers, {"strict": 0.0}, "strict: speaks of a knob"),
        (PLAIN, {"strict": "x"}, "strict: must be a number"),
        (PLAIN, {"strict": math.nan}, "strict: must lie in"),
        *((PLAIN, {"knob_range": wrong}, "knob_range: must be") for wrong in RANGES),
        (two_numbers, {"vectorised": 1}, "vectorised: must be True or"),
        (two_numbers, {"budget": "kll <= 0.1 emitted"}, "divergence: must be one of .*; got 'kll'"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "function", "options", "said"),
    [(kind, *row) for kind, rows in WRONG.items() for row in rows],
)
def test_what_cannot_be_read_is_named(kind, function, options, said):
    with pytest.raises(kind, match=said):
        ct.rule(function, **options)


def test_answers_of_another_shape_and_other_knobs_are_named():
    with pytest.raises(
        ValueError, match=r"two_numbers: must return shape \(3,\); got shape \(2, 3\)"
    ):
        ct.rule(two_numbers, vectorised=True).acceptance_row(*pair(1, 3))
    with pytest.raises(ValueError, match=r"two_numbers: must return one number; got shape \(2,\)"):
        ct.rule(two_numbers).acceptance_row(*pair(1, 3))
    with pytest.raises(ValueError, match="takes the knobs delta; got 'x'"):
        ct.policy(lenient, x=1)


def accepted_at_once(q, p, n, *, delta=0.5):
    q_n, p_n = (row.gather(-1, n[..., None])[..., 0] for row in (q, p))
    return (math.exp(delta) * q_n / p_n).clamp(max=1)


@pytest.mark.parametrize("vocab", [5, 700])
def test_a_vectorised_rule_equals_the_scalar_one(vocab, monkeypatch):
    monkeypatch.setattr(
        "cactus_theory.policies.rule.ENTRIES", 2000
    )  # several calls, the last one shorter
    fast = ct.rule(accepted_at_once, vectorised=True)
    q, p = pair(2, 3, vocab, seed=2, kinds=("zeros", "zeros"))
    torch.testing.assert_close(fast.acceptance_row(q, p), lenient.acceptance_row(q, p), **CLOSE)
    n = torch.tensor([[0, 1, 2], [4, 4, 0]])
    torch.testing.assert_close(fast.residual(q, p, n), lenient.residual(q, p, n), **CLOSE)
    one = fast.acceptance(q[0, 0], p[0, 0], n[0])
    torch.testing.assert_close(one, lenient.acceptance(q[0, 0], p[0, 0], n[0]), **CLOSE)


def test_a_vectorised_target_and_residual():
    def mixed(q, p, *, share=0.5):
        assert isinstance(q, torch.Tensor) and q.shape == p.shape and q.ndim == 2
        return (1 - share) * q + share * p

    q, p = pair(2, 3, 5, seed=2)
    rule = ct.rule(mixed, vectorised=True)
    torch.testing.assert_close(ct.emitted_law(rule, q, p), (q + p) / 2, **CLOSE)
    assert ct.policy(rule, share=0.25).spec == "mixed:share=0.25"
    from_target = ct.rule(accepted_at_once, vectorised=True, residual=lambda q, p, n: q)
    n = torch.zeros(2, 3, dtype=torch.int64)
    torch.testing.assert_close(from_target.residual(q, p, n), q, **CLOSE)


def test_a_slow_function_is_told_how_to_be_faster(monkeypatch):
    monkeypatch.setattr("cactus_theory.policies.rule.SLOW_SECONDS", 0.0)
    with pytest.warns(UserWarning, match=r"lenient: took .* for 6 questions; .*vectorised=True"):
        lenient.acceptance_row(*pair(2, 3))


def test_tokens_of_one_row_share_a_copy_of_it(monkeypatch):
    lent = []

    def keep(q, p, n):
        lent.append((q.data_ptr(), len(n)))
        q_n, p_n = (row.gather(-1, n[:, None])[:, 0] for row in (q, p))
        return (q_n / (2 * p_n)).clamp(max=1)

    rule, rows = ct.rule(keep, vectorised=True), pair(2, 7, seed=5)
    whole = rule.acceptance_row(*rows)
    lent.clear()
    monkeypatch.setattr("cactus_theory.policies.rule.ENTRIES", 14)  # two rows a call
    torch.testing.assert_close(rule.acceptance_row(*rows), whole, rtol=0, atol=0)
    assert [count for _, count in lent] == [2, 2, 2, 1] * 2
    assert len({copy for copy, _ in lent}) == 2


LEAST, PROPOSED = "least kl of a row that accepts {} so often", "kl of the proposal of {}"
# rules, what audit and check say that their budget bounds, and which rows below are within it
PER_PROPOSAL = {
    "without a proposal": (taylor, LEAST, [True, False, True]),
    "by its γ": (ct.policy("cactus:delta=0.25"), PROPOSED, [False, False, True]),
}


@pytest.mark.parametrize("case", PER_PROPOSAL)
def test_audit_and_check_judge_a_budget_per_proposal_alike(case):
    rule, words, expected = PER_PROPOSAL[case]
    q = torch.tensor([[0.2, 0.2, 0.6], [0.667, 0.1, 0.233], [0.4, 0.5, 0.1]], dtype=torch.float64)
    p = torch.tensor([[0.2, 0.2, 0.6], [0.97, 0.0, 0.03], [0.0, 0.0, 1.0]], dtype=torch.float64)
    audited = ct.audit(rule, q, p)
    assert audited.bounds == words.format("a token")
    for row, within in enumerate(audited.within):
        pair = q[row : row + 1], p[row : row + 1]
        report = check_policy(rule, [pair], properties=["budget_holds"], shrink_seconds=0)
        assert report.passed == bool(within)
        for finding in report.findings if audited.spent[row].isfinite() else ():
            assert re.fullmatch(words.format(r"token \d"), finding.about)
            assert float(finding.found) == pytest.approx(float(audited.spent[row]), rel=1e-8)
    assert audited.within.tolist() == expected
