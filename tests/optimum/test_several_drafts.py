"""Published rules of several drafts are lossless as written, and none beats the best selection.

Exact laws, no coins. Sources: recursive rejection, Miao et al. 2023 (SpecInfer, arXiv 2305.09781);
k-SEQ, Sun et al. 2023 (SpecTr, arXiv 2310.15141).
"""

import numpy as np
import pytest

import cactus_theory as ct
from tests.amounts import amount

# sums of a few hundred float64 terms
EXACT = 1e-12
# [1, k] shrinks below an ulp
HALVINGS = 60


def recovered(q, p):
    left = np.maximum(q - p, 0.0)
    return left / left.sum() if left.sum() > 0 else q


def recursive_rejection(q, p, k):
    """Return the law and the acceptance of k drafts, each judged by what is left to be emitted."""
    if not k:
        return q, 0.0
    common = np.minimum(p, q)
    law, accepted = recursive_rejection(recovered(q, p), p, k - 1)
    refused = (p - common).sum()
    return common + refused * law, common.sum() + refused * accepted


def without_replacement(q, p, k):
    """Return the law and the acceptance of recursive rejection of k different drafts."""
    if not k or p.sum() <= 0:
        return q, 0.0
    common = np.minimum(p, q)
    law, accepted, refused = common.copy(), common.sum(), p - common
    for token in np.flatnonzero(refused):
        rest = np.where(np.arange(len(p)) == token, 0.0, p)
        after, more = without_replacement(recovered(q, p), rest / (rest.sum() or 1.0), k - 1)
        law, accepted = law + refused[token] * after, accepted + refused[token] * more
    return law, accepted


def k_seq_factor(q, p, k):
    """Return ρ in [1, k] with 1 − (1 − β)ᵏ = ρβ for β = Σ min(p, q/ρ), to the last bit.

    What is left after the drafts is a row only at this very ρ: rounding it shows in the law.
    """
    low, high = 1.0, float(k)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        share = np.minimum(p, q / middle).sum()
        low, high = (low, middle) if 1 - (1 - share) ** k < middle * share else (middle, high)
    return high


def k_seq(q, p, k, factor=None):
    """Return the law and the acceptance of k drafts, each accepted with min(1, q/(ρp))."""
    common = np.minimum(p, q / (factor or k_seq_factor(q, p, k)))
    share = common.sum()
    accepted = 1 - (1 - share) ** k
    emitted = common * accepted / share
    return emitted + (1 - accepted) * recovered(q, emitted), accepted


@pytest.mark.parametrize("k", [1, 2, 3])
def test_sibling_rules_are_lossless_and_no_better_than_the_best(k):
    rng = np.random.default_rng(k)
    for q, p in (rng.dirichlet(np.full(4, 0.8), 2) for _ in range(amount(20, 200))):
        law, _ = without_replacement(q, p, k)  # whose best is not offered
        np.testing.assert_allclose(law, q, rtol=0, atol=EXACT)
        most = ct.optimal_acceptance(q, ct.selection_law(q, p, k), delta=0.0).acceptance
        for rule in (recursive_rejection, k_seq):
            law, accepted = rule(q, p, k)
            np.testing.assert_allclose(law, q, rtol=0, atol=EXACT)
            assert accepted <= most + EXACT
            assert k > 1 or accepted == pytest.approx(most, abs=EXACT)
        assert accepted >= (1 - 1 / np.e) * most


def test_k_seq_needs_its_factor_to_the_last_bit():
    q, p = np.array([0.35, 0.35, 0.2, 0.1]), np.array([0.1, 0.2, 0.3, 0.4])
    factor = k_seq_factor(q, p, 4)
    assert 1 < factor < 4
    law, _ = k_seq(q, p, 4, factor * (1 - 1e-3))
    assert 1e-5 < np.abs(law - q).max() < 1e-2
