"""The program of several drafts is proven, known where enumeration knows it, and met by p°."""

import numpy as np
import pytest

import cactus_theory as ct
from tests.amounts import amount, some
from tests.solvers import drafts

# an answer is proven to 1e-6, and so is what is compared with it
PROVEN = 1e-6
# the row where it is unique: a value off by 1e-10 leaves a row off by its root
ROW = 1e-4
SPECS = ("kl", "reverse_kl", "jensen_shannon", "squared_hellinger", "pearson_chi2")
DRAFTS = [("iid", 2), ("iid", 3), ("without_replacement", 2), ("without_replacement", 3)]
DRAFTS += [("certain", 1), ("certain+sampled", 1), ("certain+off", 1)]


def cases(count, seed):
    rng = np.random.default_rng(seed)
    for number in range(count):
        vocab = 3 + number % 3
        q, p = (rng.dirichlet(np.ones(vocab)) + 1e-3 for _ in range(2))
        certain = rng.choice(vocab, 1 + number % (vocab - 1), replace=False).tolist()
        yield q / q.sum(), p / p.sum(), certain


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("kind, k", some(DRAFTS, 3))
def test_the_band_around_the_selection_law_meets_it(spec, kind, k):
    for q, p, certain in cases(amount(1, 4), seed=k):
        certain = certain if kind.startswith("certain") else None
        law = ct.selection_law(q, p, k, kind, certain)
        for delta in (0.0, 0.05):
            answer = drafts.solve(q, p, spec, delta, k, kind, certain or [])
            best = ct.optimal_acceptance(q, law, divergence=spec, delta=delta)
            assert abs(answer.gap) <= PROVEN and abs(best.gap) <= PROVEN
            assert answer.value == pytest.approx(best.acceptance, abs=PROVEN)
            if delta == 0:
                assert answer.value == pytest.approx(np.minimum(law, q).sum(), abs=PROVEN)
            if float(best.price) > 0:
                np.testing.assert_allclose(answer.h, best.target, rtol=0, atol=ROW)


def test_sets_and_their_law():
    p = np.array([0.5, 0.3, 0.2])
    for kind, k in DRAFTS:
        certain = [1] if kind.startswith("certain") else []
        members, law = drafts.drafted_sets(p, k, kind, certain)
        assert law.sum() == pytest.approx(1) and len(np.unique(members, axis=0)) == len(law)
    members, law = drafts.drafted_sets(p, 1, "certain+off", [1])
    assert dict(zip(map(tuple, members), law.round(12), strict=True)) == {
        (True, True, False): round(5 / 7, 12),
        (False, True, True): round(2 / 7, 12),
    }
    members, law = drafts.drafted_sets(np.array([1.0, 0.0]), 1, "certain+off", [0])
    assert members.tolist() == [[True, False]] and law.tolist() == [1.0]
