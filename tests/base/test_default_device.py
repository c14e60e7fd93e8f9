"""Every tensor made inside names its device: another default than that of the rows changes nothing.

The meta device stands for a GPU: what is made there has no values.
"""

import pytest
import torch

import cactus_theory as ct
from cactus_theory.traces import Cycle, Trace, replay, save_trace

Q = torch.tensor([[0.5, 0.3, 0.2]] * 3, dtype=torch.float64)[None]
P = torch.tensor([[0.1, 0.1, 0.8]] * 2, dtype=torch.float64)[None]
IDS, PARENTS = torch.tensor([[2, 2]]), torch.tensor([[-1, 0]])
FIXED, PROMPT = torch.tensor([[False, True]]), torch.tensor([[1, 2, 3]])
SPECS = ("band:price=1", "band:delta=0.1,divergence=max_divergence,head=0.5", "cactus:delta=0.1")
ROWS = Q[0], Q[0].flip(-1)


@ct.rule
def lossless(q, p, n):
    return min(1, q[n] / p[n])


def of_policy(rule):
    yield ct.emitted_law(rule, *ROWS)
    yield ct.emitted_law(rule, Q[0], None, draft_token_ids=[0, 1, 2])
    yield ct.audit(rule, *ROWS).acceptance
    for source in (torch.Generator().manual_seed(0), [torch.Generator().manual_seed(0)]):
        for draft in (P, None):
            yield ct.verify_chain(rule, Q, draft, IDS, generator=source).output_token_ids
            if rule is lossless:
                continue
            yield ct.verify_block(rule, Q, draft, IDS, generator=source).output_token_ids
            yield ct.verify_tree(rule, Q, draft, IDS, PARENTS, generator=source).output_token_ids
        if rule is not lossless:
            both = {"sampled": ~FIXED, "deterministic": FIXED}
            found = ct.verify_tree(rule, Q, P, IDS, PARENTS, generator=source, **both)
            yield found.output_token_ids


def of_texts(folder):
    cycles = [[Cycle(0, 0, IDS[0], Q[0], P[0])]] * 3
    save_trace(folder, cycles, vocab_size=3, num_draft_tokens=2)
    for verifier in ("chain", "block"):
        yield torch.as_tensor(replay(Trace.open(folder), SPECS[0], verifier).cycles, device="cpu")


@pytest.mark.parametrize("what", [*SPECS, "rule", "texts"])
def test_another_default_device_changes_nothing(what, tmp_path):
    def calls(name):
        if what == "texts":
            return of_texts(tmp_path / name)
        return of_policy(lossless if what == "rule" else ct.policy(what))

    plain = [*calls("plain")]
    torch.set_default_device("meta")
    try:
        found = [*calls("meta")]
    finally:
        torch.set_default_device(None)
    assert all(map(torch.equal, found, plain)) and len(found) == len(plain)
