"""Verification and audits leave what they are given as it was."""

import pytest
import torch

import cactus_theory as ct
from cactus_theory.verify import Assignment, Draft, find_verifier, verifiers
from cactus_theory.verify.checks import verify_tensors
from tests.amounts import some
from tests.rules import RULES, of_each


def follows(name, rule):
    try:
        find_verifier(name).check(rule)
    except ValueError:
        return False
    return True


CASES = [(name, spec) for name in verifiers() for spec in of_each(1) if follows(name, RULES[spec])]
VOCABULARIES = [(9, *case) for case in some(CASES, 16)] + [(8200, *case) for case in some(CASES, 8)]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("vocab", "name", "spec"), VOCABULARIES)
def test_inputs_are_unchanged(vocab, name, spec, deterministic):
    verifier, rule = find_verifier(name), RULES[spec]
    source = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 4, vocab, generator=source).double()
    ids = torch.randint(vocab, (3, 3), generator=source)
    accept, draw = (torch.rand(*shape, generator=source).double() for shape in ((3, 3), (3,)))
    counts = [3, 2, 0]
    drafted = torch.where(torch.arange(3) < torch.tensor(counts)[:, None], ids, -1)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        q, p = logits.softmax(-1).to(dtype)
        p = None if deterministic else p[:, :3]
        given = [own for own in (q, p, ids, drafted, accept, draw) if own is not None]
        before = [own.clone() for own in given]
        verifier.verify(Assignment((rule,)), q, Draft(ids, counts, p), accept, draw)
        for validate in (True, False):
            verify_tensors(verifier, rule, q, p, drafted, None, (accept, draw), validate)
        if vocab < 10 and p is not None:
            ct.audit(rule, q[:, :3], p)
        assert all(map(torch.equal, given, before)) and counts == [3, 2, 0]
