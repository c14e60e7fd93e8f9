"""Verification leaves what it is given as it was."""

import pytest
import torch

import cactus_theory as ct
from cactus_theory.verify import Assignment, Draft, find_verifier, verifiers
from cactus_theory.verify._tensors import verify_tensors
from tests.amounts import some

RULES = (
    "speculative", "cactus:delta=0.3", "band:price=1", "band:delta=0.1", "soft_band:price=1",
    "tempered:temperature=0.5", "lenience:lenience=0.5", "mixture:alpha=0.3", "typical",
    "top_k:k=3",
)  # fmt: skip
CASES = [
    (name, spec, certain, dtype)
    for name in verifiers()
    for spec in RULES
    for certain in (False, True)
    for dtype in (torch.float64, torch.float32, torch.bfloat16)
]


def follows(name, rule):
    try:
        find_verifier(name).check(rule)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(("name", "spec", "certain", "dtype"), some(CASES, 24))
@pytest.mark.parametrize("vocab", [9, 8200])
def test_inputs_are_unchanged(name, spec, certain, dtype, vocab):
    verifier, rule = find_verifier(name), ct.policy(spec)
    if not follows(name, rule):
        return
    source = torch.Generator().manual_seed(0)
    q, p = (torch.randn(3, 4, vocab, generator=source).double() for _ in range(2))
    q, p = (rows.softmax(-1).to(dtype) for rows in (q, p))
    p = None if certain else p[:, :3]
    ids = torch.randint(vocab, (3, 3), generator=source)
    accept, draw = (torch.rand(*shape, generator=source).double() for shape in ((3, 3), (3,)))
    counts = [3, 2, 0]
    given = [own for own in (q, p, ids, accept, draw) if own is not None]
    before = [own.clone() for own in given]
    verifier.verify(Assignment((rule,)), q, Draft(ids, counts, p), accept, draw)
    drafted = torch.where(torch.arange(3) < torch.tensor(counts)[:, None], ids, -1)
    kept = drafted.clone()
    for validate in (True, False):
        verify_tensors(verifier, rule, q, p, drafted, None, (accept, draw), validate)
    assert all(map(torch.equal, given, before)) and drafted.equal(kept) and counts == [3, 2, 0]
