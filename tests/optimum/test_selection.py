"""What several drafts offer as one row: against all sets of tokens, and with its proof."""

import itertools

import numpy as np
import pytest
import torch

import cactus_theory as ct
from tests.amounts import amount, some

# sums of at most 32 float64 terms; levels of different sets are told apart to 1e-12
EXACT = 1e-11
# a proof at V = 151,936: sums of as many float64 terms
LONG = 1e-12
DETERMINISTIC = ("deterministic", "deterministic+sampled", "deterministic+off")
KINDS = [("iid", 1), ("iid", 2), ("iid", 5)]
KINDS += [(kind, 0) for kind in DETERMINISTIC]


def tuples(p, kind, k, deterministic):
    """Yield every set of drafted tokens with its probability, drawn one after the other."""
    if kind not in DETERMINISTIC:
        for drawn in itertools.product(range(len(p)), repeat=k):
            yield set(drawn), np.prod(p[list(drawn)])
        return
    row = (
        p.copy()
        if kind == "deterministic+sampled"
        else np.where(np.isin(range(len(p)), deterministic), 0, p)
    )
    for token, mass in enumerate(row / row.sum()):
        yield set(deterministic) | ({token} if kind != "deterministic" else set()), mass


def meeting(p, kind, k, deterministic):
    """Return Pr(S meets A) for each set A, numbered by its bits."""
    law = [(drawn, mass) for drawn, mass in tuples(p, kind, k, deterministic) if mass > 0]
    every = [{i for i in range(len(p)) if number >> i & 1} for number in range(2 ** len(p))]
    return every, np.array([sum(m for drawn, m in law if drawn & members) for members in every])


def by_levels(q, every, met):
    """Return p° by its definition: the larger sets of least slope first."""
    law, done = np.zeros(len(q)), set()
    while len(done) < len(q):
        base = met[every.index(done)]
        slopes = [
            ((met[n] - base) / q[list(members - done)].sum(), members)
            for n, members in enumerate(every)
            if members > done
        ]
        least = min(slope for slope, _ in slopes)
        level = set().union(*(members for slope, members in slopes if slope <= least + 1e-12))
        law[list(level - done)] = least * q[list(level - done)]
        done = level
    return law


def cases(count, seed):
    """Yield target, draft and deterministic tokens, some targets near their draft."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        vocab = 3 + number % 3
        p = rng.dirichlet(np.full(vocab, 0.6)) + 1e-4
        q = rng.dirichlet(np.full(vocab, 0.6)) + (1e-4 if number % 4 else p)
        deterministic = rng.choice(vocab, 1 + number % (vocab - 1), replace=False).tolist()
        yield q / q.sum(), p / p.sum(), deterministic


def law_of(q, p, kind, k, deterministic):
    return ct.selection_law(q, p, max(k, 1), kind, deterministic if kind in DETERMINISTIC else None)


@pytest.mark.parametrize("kind, k", KINDS)
def test_it_is_the_base_of_least_slopes(kind, k):
    for q, p, deterministic in cases(amount(3, 15), seed=k):
        every, met = meeting(p, kind, k, deterministic)
        law = law_of(q, p, kind, k, deterministic)
        np.testing.assert_allclose(law, by_levels(q, every, met), rtol=0, atol=EXACT)
        masses = np.array([law[list(members)].sum() for members in every])
        assert (masses <= met + EXACT).all() and masses[-1] == pytest.approx(1, abs=EXACT)


@pytest.mark.parametrize("kind, k", some(KINDS, 4))
@pytest.mark.parametrize("spec", ["kl", "reverse_kl", "jensen_shannon", "squared_hellinger"])
def test_the_band_around_it_is_best_for_all_drafts(kind, k, spec):
    """Acceptance is the subset bound of the band's row, and no other base has a larger one."""
    for q, p, deterministic in cases(amount(1, 4), seed=9):
        every, met = meeting(p, kind, k, deterministic)
        law = law_of(q, p, kind, k, deterministic)
        best = ct.optimal_acceptance(q, law, divergence=spec, price=1.5)
        masses = np.array([best.target[list(members)].sum() for members in every])
        inside = 1 - met[[every.index(set(range(len(q))) - members) for members in every]]
        assert 1 + (masses - inside).min() == pytest.approx(best.acceptance, abs=EXACT)
        assert abs(best.gap) <= EXACT
        value = best.acceptance - 1.5 * best.divergence
        for order in itertools.permutations(range(len(q))):
            steps = [met[every.index(set(order[:n]))] for n in range(len(q) + 1)]
            base = np.zeros(len(q))
            base[list(order)] = np.diff(steps)
            for share in (0.5, 1e-3):
                mixed = share * base + (1 - share) * law
                other = ct.optimal_acceptance(q, mixed / mixed.sum(), divergence=spec, price=1.5)
                assert other.acceptance - 1.5 * other.divergence <= value + EXACT


def test_many_rows_are_each_as_alone():
    rng = np.random.default_rng(4)
    q, p = (torch.tensor(rng.dirichlet(np.ones(7), (2, 3))) for _ in range(2))
    q[0, 1, :3] = 0
    q = q / q.sum(-1, keepdim=True)
    deterministic = torch.tensor([[[0, 3], [1, 2], [4, -1]], [[5, 5], [6, 0], [2, -1]]])
    for kind, k in KINDS:
        ids = deterministic if kind in DETERMINISTIC else None
        law = ct.selection_law(q, p, max(k, 1), kind, ids)
        for at in itertools.product(range(2), range(3)):
            alone = ct.selection_law(
                q[at], p[at], max(k, 1), kind, None if ids is None else ids[at]
            )
            assert torch.allclose(law[at], alone, rtol=0, atol=1e-15)
        float32 = ct.selection_law(q.float(), p.float(), max(k, 1), kind, ids)
        assert float32.dtype == torch.float32 and torch.allclose(float32.double(), law, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("kind, k", KINDS)
def test_rows_on_a_gpu_have_the_law_of_a_cpu(kind, k):
    for q, p, deterministic in cases(3, seed=2):
        rows = [torch.tensor(row) for row in (q, p)]
        law = law_of(*(row.cuda() for row in rows), kind, k, deterministic)
        assert law.is_cuda
        torch.testing.assert_close(law.cpu(), law_of(*rows, kind, k, deterministic))


def test_deterministic_tokens_out_of_reach_and_ties():
    q, p = np.array([0.5, 0.5, 0.0, 0.0]), np.array([0.6, 0.1, 0.2, 0.1])
    alone = ct.selection_law(q, None, kind="deterministic", deterministic=[2])
    np.testing.assert_array_equal(alone, [0, 0, 1, 0])
    law = ct.selection_law(q, p, kind="deterministic+sampled", deterministic=[2])
    np.testing.assert_allclose(law[:2], p[:2])  # the rest falls on tokens that are never emitted
    assert ct.optimal_acceptance(q, law, delta=0.0).acceptance == pytest.approx(0.6)
    mixed = ct.selection_law(q, p, kind="deterministic+sampled", deterministic=[1, 2])
    np.testing.assert_allclose(mixed, [0.5, 0.5, 0, 0], atol=1e-15)
    for kind, k in KINDS[:3]:  # equal ratios are one level, whatever their order
        flat = ct.selection_law(np.full(8, 0.125), np.full(8, 0.125), k, kind)
        np.testing.assert_allclose(flat, 0.125, atol=1e-15)
    one = np.eye(4)[0]
    np.testing.assert_array_equal(ct.selection_law(q, one, 3), one)
    np.testing.assert_array_equal(
        ct.selection_law(q, one, kind="deterministic+off", deterministic=[0]), one
    )
    np.testing.assert_allclose(ct.selection_law(q, p, 1), p, rtol=0, atol=1e-15)


@pytest.mark.parametrize("kind", ["deterministic+off", "deterministic+sampled"])
def test_a_deterministic_token_of_denormal_mass_takes_what_impossible_tokens_leave(kind):
    """As one of mass 1e-300 does, whose multiple does not overflow."""
    q, p = np.array([0.0, 1.0, 8.5e-310]), np.array([0.6, 0.1, 0.3])
    law = ct.selection_law(q, p, kind=kind, deterministic=[2])
    near = ct.selection_law(np.array([0.0, 1.0, 1e-300]), p, kind=kind, deterministic=[2])
    np.testing.assert_allclose(law, near, rtol=0, atol=1e-15)


@pytest.mark.parametrize("kind", ["iid", "deterministic+sampled"])
def test_a_large_vocabulary(kind):
    rng = np.random.default_rng(7)
    q, p = (torch.tensor(rng.normal(size=(1, 151_936)) * 3).softmax(-1) for _ in range(2))
    p = (p.log() + q.log() / 2).softmax(-1)
    likely = q.topk(4, -1).indices if kind != "iid" else None
    law = ct.selection_law(q, p, 4, kind, likely)
    assert float(law.sum()) == pytest.approx(1, abs=LONG) and bool((law >= 0).all())
    best = ct.optimal_acceptance(q, law, price=1.0)
    assert abs(float(best.gap)) <= LONG
    assert best.acceptance > ct.optimal_acceptance(q, p, price=1.0).acceptance


def test_bad_input_is_named():
    q = p = np.full(14, 1 / 14)
    bad = {
        "kind: must be one of iid": {"kind": "several"},
        "k: must be an integer of at least 1; got 0": {"k": 0},
        "deterministic: must hold token ids in": {"kind": "deterministic"},
        "deterministic: must hold token ids in \\[0, 14\\)": {
            "kind": "deterministic",
            "deterministic": [14],
        },
        "deterministic: must not be given with kind='iid'": {"deterministic": [1]},
        "deterministic: must hold a token of each row": {
            "kind": "deterministic",
            "deterministic": [-1],
        },
        "deterministic: shape must be": {"kind": "deterministic", "deterministic": [[1], [2]]},
    }
    for message, options in bad.items():
        with pytest.raises(ValueError, match=message):
            ct.selection_law(q, p, **options)
    with pytest.raises(TypeError, match="deterministic: must hold token ids; got dtype"):
        ct.selection_law(q, p, kind="deterministic", deterministic=[0.5])
