"""Policies known under other names, and the exact baseline that looks at no draft row."""

import pytest
import torch

import cactus_theory as ct
from cactus_theory.policies import Policy
from tests.rows import pair
from tests.verify.blocks import decided

KINDS = (("smooth", "smooth"), ("spiky", "tiny"), ("zeros", "zeros"), ("zeros", "smooth"))
# sums of a few dozen float64 terms, each at most 1
EXACT = 1e-12


@pytest.mark.parametrize("knob", ["delta=0", "delta=0.3", "price=0.5", "price=4", "price=inf"])
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_mentored_is_the_band_of_the_reverse_kl_to_the_last_bit(knob, kinds):
    rule, band = ct.policy(f"mentored:{knob}"), ct.policy(f"band:{knob},divergence=reverse_kl")
    q, p = pair(6, 9, seed=4, kinds=kinds)
    n, coin = p.argmax(-1), torch.linspace(0, 0.99, 6, dtype=torch.float64)
    for one, other in (
        (rule.target(q, p), band.target(q, p)),
        (rule.acceptance_row(q, p), band.acceptance_row(q, p)),
        (rule.residual(q, p, n), band.residual(q, p, n)),
        tuple(decided(own, q, p, n, coin)[0] for own in (rule, band)),
    ):
        assert torch.equal(one, other)
    assert rule.declares == band.declares and rule.knob == band.knob


def test_mentored_is_named_and_takes_no_divergence():
    assert ct.policy("mentored:delta=0.1").spec == "mentored:delta=0.1"
    assert ct.list_policies()["mentored"]["knobs"] == {"delta": None, "price": None}
    with pytest.raises(ValueError, match="mentored takes the knobs delta, price; got 'diver"):
        ct.policy("mentored:delta=0.1,divergence=kl")
    with pytest.raises(ValueError, match="exactly one must be given; got none"):
        ct.policy("mentored")


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_sample_and_match_is_exact_and_accepts_the_overlap_of_two_samples(kinds):
    rule = ct.policy("sample_and_match")
    q, p = pair(20, 8, seed=7, kinds=kinds)
    torch.testing.assert_close(Policy.emitted(rule, q, p), q, rtol=0, atol=EXACT)
    accepted = (p * rule.acceptance_row(q, p)).sum(-1)
    torch.testing.assert_close(accepted, (p * q).sum(-1), rtol=0, atol=EXACT)
    lossless = torch.minimum(p, q).sum(-1)
    assert (accepted <= lossless + EXACT).all() and (accepted < lossless - 0.01).any()


def test_sample_and_match_recovers_anything_but_the_drafted_token():
    rule, q = ct.policy("sample_and_match"), torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    found = rule.residual(q, q, torch.tensor(0))
    torch.testing.assert_close(found, torch.tensor([0.0, 0.6, 0.4], dtype=torch.float64))
    deterministic = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    assert torch.equal(rule.residual(deterministic, q, torch.tensor(1)), deterministic)
