"""Rules from the literature: their numbers, limits, identities and known weaknesses."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cactus_theory as ct
from cactus_theory.emitted import proposal_divergence
from tests.rows import KINDS, pair

CLOSE = 1e-12
SEEDS = st.integers(0, 10_000)
Q = torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0], dtype=torch.float64)
P = torch.tensor([0.1, 0.2, 0.2, 0.2, 0.3], dtype=torch.float64)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def check_same(value, expected, atol=CLOSE):
    torch.testing.assert_close(value, torch.as_tensor(expected).double(), rtol=0, atol=atol)


def drawn(seed, vocabulary):
    """Return four pairs of rows of two kinds."""
    kinds = KINDS[seed % 4], KINDS[seed // 4 % 4]
    return pair(4, vocabulary, seed=seed, kinds=kinds)


def accepted(rule, q=Q, p=P):
    return (p * rule.acceptance_row(q, p)).sum(-1)


@given(SEEDS, st.sampled_from([0.0, 0.2, 0.7, 1.0]), st.sampled_from(["target", "free"]))
def test_the_mixture_is_an_optimum_for_total_variation(seed, alpha, support):
    q, p = drawn(seed, 8)
    kind = ct.divergence("total_variation")
    apart, beyond = kind.value(p, q), torch.where(q == 0, p, 0.0).sum(-1)
    out_of_reach = beyond if support == "target" else torch.zeros_like(beyond)
    spent = (alpha * (apart - out_of_reach)).clamp(min=0)  # one rounded sum less another
    best = ct.optimal_acceptance(q, p, divergence="total_variation", delta=spent, support=support)
    rule = ct.policy("mixture", alpha=alpha, support=support)
    check_same(accepted(rule, q, p), best.acceptance)
    check_same(accepted(rule, q, p), 1 - (apart - spent))
    check_same(kind.value(ct.emitted_law(rule, q, p), q), spent)


def test_top_k_by_hand():
    rule, relaxed = ct.policy("top_k", k=2), ct.policy("relaxed:k=2,delta=inf,recover=accepted")
    assert torch.equal(*(ct.emitted_law(own, *drawn(6, 9)) for own in (rule, relaxed)))
    check_same(rule.acceptance_row(Q, P), tensor(1, 1, 0, 0, 0))
    check_same(rule.residual(Q, P, torch.tensor(3)), tensor(4 / 7, 3 / 7, 0, 0, 0))
    check_same(ct.emitted_law(rule, Q, P), tensor(0.1 + 0.7 * 4 / 7, 0.2 + 0.7 * 3 / 7, 0, 0, 0))
    ties = tensor(0.4, 0.2, 0.2, 0.2)
    check_same(rule.acceptance_row(ties, ties), torch.ones(4))
    check_same(ct.policy("top_k", k=99).acceptance_row(Q, P), tensor(1, 1, 1, 1, 0))


def test_fuzzy_is_all_or_nothing():
    apart = ct.divergence("kl").value(Q, P).item()  # rows swapped: finite
    for threshold, expected in ((apart * 0.999, P), (apart * 1.001, Q), (0.0, P)):
        rule = ct.policy("fuzzy", threshold=threshold, divergence="kl")
        check_same(ct.emitted_law(rule, P, Q), expected)
    check_same(
        ct.emitted_law(ct.policy("fuzzy:threshold=9,divergence=kl"), Q, P), Q
    )  # D = infinity


@pytest.mark.parametrize("spec", ["fuzzy:threshold=0.9", "mixture:alpha=1"])
def test_published_rules_emit_what_the_target_excludes_only_if_asked_to(spec):
    """Accept the draft's token wherever q > 0; what the draft has beyond goes to (q − p)₊."""
    q, p = tensor(0.5, 0.3, 0.2, 0.0), tensor(0.1, 0.2, 0.5, 0.2)
    published = ct.policy(f"{spec},support=free")
    check_same(ct.emitted_law(published, q, p), p)
    assert published.declares.support == "free"
    check_same(ct.emitted_law(ct.policy(spec), q, p), tensor(0.1 + 0.16, 0.2 + 0.04, 0.5, 0.0))
    assert ct.policy(spec).declares.support == "target"
    with pytest.raises(ValueError, match="support: must be one of target, free; got 'q'"):
        ct.policy(f"{spec},support=q")


def test_a_tilted_and_a_truncated_target_by_hand():
    rule = ct.policy("speculative", tilt=1)
    check_same(ct.emitted_law(rule, Q, P), Q**2 / (Q**2).sum())
    flat = ct.policy("speculative", tilt=1e-15 - 1)
    check_same(ct.emitted_law(flat, Q, P), tensor(1, 1, 1, 1, 0) / 4)
    check_same(ct.emitted_law(ct.policy("speculative:tilt=1e3"), Q, P), tensor(1, 0, 0, 0, 0))
    cut = ct.policy("truncated", top_p=0.65)
    check_same(ct.emitted_law(cut, Q, P), tensor(4 / 7, 3 / 7, 0, 0, 0))
    spent = ct.divergence("kl").value(ct.emitted_law(cut, Q, P), Q).item()
    assert spent == pytest.approx(-math.log(0.7)) and spent <= cut.declares.budget.amount
    check_same(ct.emitted_law(ct.policy("truncated", top_k=1), Q, P), tensor(1, 0, 0, 0, 0))
    check_same(ct.emitted_law(ct.policy("truncated", top_p=1.0), Q, P), Q)


@pytest.mark.parametrize("vocab", [3, 5, 7, 11, 49])
def test_ties_of_uniform_rows_are_not_decided_by_rounding(vocab):
    rule = ct.policy("typical:epsilon=1")
    even = torch.full((vocab,), 1 / vocab, dtype=torch.float64)
    expected = rule.acceptance_row(even, even)
    for padded in range(6):
        wide = torch.nn.functional.pad(even, (padded, 2 * padded))
        assert torch.equal(rule.acceptance_row(wide, wide)[padded : padded + vocab], expected)


@pytest.mark.parametrize(
    ("spec", "q", "p"),
    [
        ("typical:epsilon=0.25,alpha=5", (0.25, 0.5, 0.25), (0.6, 0.2, 0.2)),
        ("relaxed:k=2,delta=0", (0.4, 0.4, 0.2), (0.1, 0.8, 0.1)),
        ("band:price=2,head=1", (0.4, 0.4, 0.2), (0.1, 0.8, 0.1)),
    ],
)
def test_a_tie_is_what_rounding_leaves_and_nothing_more(spec, q, p):
    """Red with the slack of ties at 0, and at a hundred times what it is."""
    rule, first = ct.policy(spec), tensor(1, 0, 0)
    even, rounded, other = (
        ct.emitted_law(rule, tensor(*q) + gap * first, tensor(*p)) for gap in (0, 1e-13, 1e-11)
    )
    check_same(rounded, even)
    assert (other - even).abs().max() > 0.05


def test_a_row_that_rounds_to_one_token_is_left_as_it_is():
    """q_n = 1 beside an entry of 1e-20: nothing is raised, so no divergence is spent."""
    q = tensor(1.0, 4.65737e-20)
    for divergence in ("reverse_kl", "neyman_chi2", "kl"):
        rule = ct.policy("cactus_exact", delta=0.3, divergence=divergence)
        spent = proposal_divergence(rule, q, tensor(1.0, 0.0), ct.divergence(divergence))
        assert spent[0] <= 0.3
