"""What holds for every policy whatsoever: THEORY.md, Theorems 1, 4, 5 and 6."""

import itertools

import pytest
import torch

import cactus_theory as ct
from tests.amounts import amount
from tests.formulas import ALL
from tests.rows import pair

# sums of a few float64 terms, each at most 1
EXACT = 1e-12
KINDS = (("smooth", "smooth"), ("zeros", "zeros"), ("spiky", "tiny"))
SEEDS = range(amount(6, 200))
ROWS, VOCAB = 40, 6


def close(value, expected):
    torch.testing.assert_close(value, expected, rtol=0, atol=EXACT)


def apart(one, other):
    return (one - other).abs().sum(-1) / 2


def batches():
    """Yield rows q and p with a source of random numbers."""
    for seed, kinds in itertools.product(SEEDS, KINDS):
        yield *pair(ROWS, VOCAB, seed=seed, kinds=kinds), torch.Generator().manual_seed(seed)


def uniform(source, *shape):
    return torch.rand(*shape, generator=source, dtype=torch.float64)


def emitted(p, keep, recovered):
    """Return p φ + Σ p_n (1 − φ(n)) g(·|n) of φ (rows, V) and g (rows, V, V)."""
    return p * keep + ((p * (1 - keep))[..., None] * recovered).sum(-2)


def any_policy(source):
    """Return φ and g of no particular kind, some of them 0 or 1."""
    keep = (1.5 * uniform(source, ROWS, VOCAB) - 0.25).clamp(0, 1)
    recovered = uniform(source, ROWS, VOCAB, VOCAB) ** 4
    return keep, recovered / recovered.sum(-1, keepdim=True)


def test_no_policy_accepts_more_than_the_fixed_target_of_its_law():
    for q, p, source in batches():
        keep, recovered = any_policy(source)
        law = emitted(p, keep, recovered)
        accepted, most = (p * keep).sum(-1), torch.minimum(p, law).sum(-1)
        assert (accepted <= most + EXACT).all() and (accepted < most - 1e-3).any()
        close(most, 1 - apart(p, law))
        # Theorem 5: no policy is nearer to q in total variation at this acceptance
        assert (apart(law, q) >= apart(p, q) - (1 - accepted) - EXACT).all()


@pytest.mark.parametrize("scaled", [True, False], ids=["row raised", "plain residual"])
def test_raised_rules_of_any_ceiling_stay_between(scaled):
    """Any ceiling γ ≥ min(p, q), each token its own; not only those of the registry."""
    for q, p, source in batches():
        ceiling = torch.minimum(p, q) + (1 - torch.minimum(p, q)) * uniform(source, *q.shape) ** 3
        ceiling = torch.where((q > 0) & ((p <= q) | (ceiling > q)), ceiling, q)
        scale = (1 - ceiling) / (1 - q).clamp(min=1e-300) if scaled else torch.ones_like(q)
        left = (scale[..., None] * q[:, None] - p[:, None]).clamp(min=0)
        lost = (p - ceiling).clamp(min=0)
        total = left.sum(-1)
        refused = lost > EXACT
        # the step of the proof: Z_n is at least all that is refused
        assert (total >= lost.sum(-1, keepdim=True) - EXACT)[refused].all()
        weight = torch.where(refused, lost / total.clamp(min=EXACT), 0.0)
        law = torch.minimum(p, ceiling) + (weight[..., None] * left).sum(-2)
        near = VOCAB * EXACT  # what was refused by less than EXACT is left out
        assert (law >= torch.minimum(p, q) - near).all()
        assert (law <= torch.maximum(p, q) + near).all()
        accepted = torch.minimum(p, ceiling).sum(-1)
        torch.testing.assert_close(accepted, torch.minimum(p, law).sum(-1), rtol=0, atol=near)
        distance = apart(p, q) - (1 - accepted)
        torch.testing.assert_close(apart(law, q), distance, rtol=0, atol=near)


@pytest.mark.parametrize("spec", [s for s in ALL if s != "max_divergence"])
def test_no_budget_of_a_proposal_bounds_the_emitted_law(spec):
    """c q_n is within any budget once q_n is small: then all of p = c q is accepted."""
    times, vocab = 4, 4000
    q = torch.full((vocab,), 1 / vocab, dtype=torch.float64)
    p = torch.zeros_like(q)
    p[: vocab // times] = times / vocab
    exact, published = ct.policy("cactus_exact:delta=0.02", divergence=spec), "cactus:delta=0.02"
    law = ct.emitted_law(exact, q, p)
    close(law, p)
    close(ct.emitted_law(ct.policy(published), q, p), p)
    spent = ct.divergence("kl").value(law, q)
    close(spent, torch.tensor(float(times), dtype=torch.float64).log())


def test_what_cactus_emits_grows_with_the_vocabulary():
    """The corollary's rows, V = 49,152: everything is accepted, and KL is ln(V/5,242)."""
    q = torch.full((1, 49_152), 1 / 49_152, dtype=torch.float64)
    p = (torch.arange(49_152) < 5_242).double()[None] / 5_242
    law = ct.emitted_law(ct.policy("cactus", delta=0.000714), q, p)
    close(law, p)
    assert float(ct.divergence("kl").value(law, q)) == pytest.approx(2.238, abs=5e-4)
    p = (torch.arange(49_152) < 5_241).double()[None] / 5_241  # on one token fewer some is refused
    assert not ct.emitted_law(ct.policy("cactus", delta=0.000714), q, p).equal(p)


def test_a_budget_of_the_max_divergence_does_bound_it():
    rule = ct.policy("cactus_exact", delta=0.3, divergence="max_divergence")
    for q, p, _ in batches():
        law = ct.emitted_law(rule, q, p)
        assert (ct.divergence("max_divergence").value(law, q) <= 0.3 + EXACT).all()
