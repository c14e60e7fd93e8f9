"""Bounds, counterexamples and the door for pytest."""

import math

import pytest
import torch

import cactus_theory as ct
from cactus_theory.testing import assert_policy_properties
from cactus_theory.testing._check_policies import check_policy
from cactus_theory.testing._checker import shrink
from cactus_theory.testing._examples import _wide, examples
from cactus_theory.testing.properties import PROPERTIES, Bounds
from cactus_theory.testing.properties.behaviour import knob_ladder
from cactus_theory.testing.report import row
from tests.amounts import amount
from tests.testing.gallery import no_ceiling, reversed_knob, unnormalised

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("found", "low", "high", "margin"),
    [
        (0.5, 0, 1, 0.6),
        (1.3, 0, 1, -0.2),
        (-0.3, 0, 1, -0.2),
        (0.2, None, 1, 0.9),
        (2.0, 1, None, 1.1),
        (0.7, 0.7, 0.7, 0.1),
        (INF, 0, INF, 0.1),
        (INF, 0, 1, -INF),
        (NAN, 0, 1, -INF),
        (0.5, NAN, NAN, -INF),
    ],
)
def test_margins(found, low, high, margin):
    bounds = Bounds(torch.tensor([found], dtype=torch.float64), low, high, "x", allowed=0.1)
    assert bounds.margins().item() == pytest.approx(margin)


def test_entries_that_do_not_count():
    counts = torch.tensor([[True, False]])
    bounds = Bounds(torch.tensor([[0.5, 7.0]]), 0, 1, "token {0}", 0.0, counts)
    assert bounds.margins().tolist() == [[0.5, INF]]
    assert bounds.describe((0, 1)) == ("token 1", "between 0 and 1", "7")


def test_every_law_says_what_it_says():
    for name, law in PROPERTIES.items():
        assert law.name == name and law.statement.endswith(".") and "``" not in law.statement


def test_examples_are_reproducible_and_as_many_as_asked():
    pool = examples(120, 3)
    assert sum(len(q) for q, _ in pool) == 120
    assert [q.shape[1] for q, _ in pool] == sorted({q.shape[1] for q, _ in pool})
    examples.cache_clear()
    again = examples(120, 3)
    assert all(
        torch.equal(a, b)
        for x, y in zip(pool, again, strict=True)
        for a, b in zip(x, y, strict=True)
    )
    other = examples(120, 4)
    assert any(
        x.shape != y.shape or not torch.equal(x, y)
        for (x, _), (y, _) in zip(pool, other, strict=False)
    )


def test_a_rule_that_is_wrong_on_wide_rows_only_is_found():
    @ct.rule
    def wrong(q, p, n):
        return q[n] / p[n] if len(q) >= 1000 else min(1, q[n] / p[n])

    report = check_policy(
        wrong, examples(60), properties=["acceptance_is_a_probability"], shrink_seconds=0
    )
    assert [finding.property for finding in report.findings] == ["acceptance_is_a_probability"]


def test_shrinking_ends_at_what_matters():
    generator = torch.Generator().manual_seed(0)
    q, p = torch.rand(2, 9, generator=generator, dtype=torch.float64).softmax(-1)

    def fails(q, p):
        return bool(((p > 2 * q) & (q > 0.03)).any())

    assert not fails(q, p)
    p = torch.zeros(9, dtype=torch.float64)
    p[4], p[7] = 0.7123, 0.2877
    assert fails(q, p)
    smallest = shrink(q, p, fails)
    assert [r.tolist() for r in smallest] in (
        [[0.4, 0.6], [1.0, 0.0]],
        [[0.1, 0.9], [1.0, 0.0]],
    ) or (len(smallest[0]) <= 3 and fails(*smallest))
    assert all(len(repr(x)) <= 4 for r in smallest for x in r.tolist())


def test_the_message_tells_the_whole_story():
    with pytest.raises(AssertionError) as caught:
        assert_policy_properties(
            unnormalised, examples=100, properties=["residual_is_a_distribution"]
        )
    said = str(caught.value)
    assert "perhaps   the residual row is not divided by its sum" in said
    for part in ("residual_is_a_distribution", "g(·|n) ≥ 0", "target q", "draft  p", "emitted"):
        assert part in said
    assert "expected  1" in said and "found     0." in said and "margin    -0." in said


def test_given_rows_are_checked_as_they_are():
    q, p = [0.6, 0.4], [0.2, 0.8]
    with pytest.raises(AssertionError, match="target q  .* 0.4"):
        assert_policy_properties(
            no_ceiling, properties=["acceptance_is_a_probability"], rows=(q, p)
        )
    report = assert_policy_properties("speculative", rows=([q, p], [p, q]))
    assert report.passed and report.properties[0].examples == 2


def test_what_the_door_refuses():
    with pytest.raises(ValueError, match="properties: must be one of"):
        assert_policy_properties("speculative", properties=["no_such_law"])
    with pytest.raises(ValueError, match="target_probs: every row must sum to 1"):
        assert_policy_properties("speculative", rows=([0.5, 0.6], [0.5, 0.5]))
    with pytest.raises(TypeError, match="policy: must be a spec string or a Policy"):
        assert_policy_properties(3)


def test_ladders():
    values = [value for value, _ in knob_ladder(ct.policy("cactus", delta=0.2))]
    assert values == sorted(values) and {0.0, 0.2, INF} <= set(values)
    assert [value for value, _ in knob_ladder(reversed_knob)] == [0.1, 0.5, 1.0]
    assert [value for value, _ in knob_ladder(ct.policy("top_k:k=4"))] == [1, 2, 3, 4, 5, 8, 20]
    assert knob_ladder(ct.policy("speculative")) == []
    whole = ct.rule(lambda q, p, n, *, k=1: min(1, k * q[n] / p[n]), knob_range=(0, 4))
    assert all(isinstance(rule.k, int) for _, rule in knob_ladder(whole, between=2))


def test_a_knob_of_zero_is_moved():
    """Multiples of 0 are 0, and a rule that is wrong elsewhere would pass."""

    @ct.rule(budget="kl <= delta emitted", strict=0.0)
    def always(q, p, n, *, delta=0.0):
        return 1.0 if delta > 0 else min(1.0, q[n] / p[n])

    assert [value for value, _ in knob_ladder(always)] == [0.0, 0.1, 1.0]
    with pytest.raises(AssertionError, match="kl of the emitted law at delta="):
        assert_policy_properties(always, properties=["budget_holds"], examples=60)


def test_a_probability_of_0_is_no_rounding_error() -> None:
    @ct.rule(vectorised=True, budget="reverse_kl <= 1000 emitted")
    def draft_alone(q, p):  # KL(q‖h) is infinite where h = 0 < q
        return p

    with pytest.raises(AssertionError, match=r"found +inf"):
        assert_policy_properties(draft_alone, properties=["budget_holds"], examples=60)


def test_a_0_that_only_the_definition_rounds_is_no_broken_budget() -> None:
    """h of the second token is near 1e-39; 1 − φ of the first, just as small, is rounded to 0."""
    rows = [0.997, 0.003], [1.0, 0.0]
    own = ["budget_holds"]
    assert assert_policy_properties(
        "band:delta=0.25,divergence=reverse_kl", properties=own, rows=rows
    )


def test_laws_that_do_not_apply_are_not_declared():
    report = check_policy(ct.policy("typical"), examples(30))
    verdicts = {v.property: v.verdict for v in report.properties}
    assert verdicts["stays_between"] == "not declared" and report.passed
    assert report.declares.startswith("declares direction -1; continuous False")


def test_an_exception_is_a_finding_on_the_smallest_rows():
    def fussy(q, p, n):
        if len(q) > 2 and q[n] == 0:
            raise KeyError("no such token")
        return min(1, q[n] / p[n])

    report = check_policy(ct.rule(fussy), examples(amount(120, 200)))
    first = report.properties[0]
    assert first.verdict == "fails" and first.finding.found == "KeyError: 'no such token'"
    assert len(first.finding.target) == 3
    rest = {v.property: v.verdict for v in report.properties}
    assert rest["acceptance_is_a_probability"] == "holds"  # judged on the other rows


def test_long_rows_are_cut_in_messages():
    assert row([0.25] * 14) == f"[{', '.join(['0.25'] * 12)}, … 2 more]"
    assert row([1 / 3]) == "[0.333333]"


def test_wide_rows_are_among_the_examples():
    """One of them in every run: its draft proposes some tokens too often and some too rarely."""
    for count, start in ((2, 0), (20, 1), (60, 2)):
        q, p = examples(count, start)[-1]
        assert q.shape[-1] >= 1000 and sum(len(q) for q, _ in examples(count, start)) == count
        assert bool(((q > p) & (p > 0)).any()) and bool((q < p).any())
    widths = [len(q) for q, _ in _wide(2000, 0)]
    assert min(widths) >= 16 and max(widths) > 256 and sum(50 <= width for width in widths) >= 3
    q, p = _wide(10_000, 0)[-1]
    assert q.shape == p.shape == (32_000,) and (p > 0).sum() == 16
    report = check_policy(ct.policy("cactus:delta=2"), ((q[None], p[None]),))
    asked = {v.property for v in report.properties if v.examples}
    assert report.passed and {"answers", "emitted_law_sums_to_one", "budget_holds"} <= asked
