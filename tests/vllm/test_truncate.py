"""Truncation of many rows at once keeps what the three rules say, one token after another."""

import pytest
import torch

from cactus_theory.vllm.bias import truncate_


def kept(row, top_p, top_k, min_p):
    """Return the truncated row by the words of the three rules, token after token."""
    q = row.double().softmax(-1)
    q = torch.where(q >= min_p * q.max(), q, 0.0)
    if top_k:
        q = torch.where(q >= q.sort(descending=True).values[min(top_k, len(q)) - 1], q, 0.0)
    q, order, mass = q / q.sum(), q.argsort(descending=True).tolist(), 0.0
    for token in order:
        if mass >= top_p:
            q[token] = 0.0
        mass += float(q[token])
    return q / q.sum()


@pytest.mark.parametrize(
    "cut",
    [(0.7, 0, 0.0), (1.0, 3, 0.0), (1.0, 0, 0.2), (0.8, 4, 0.1), (0.3, 40, 0.0), (1e-17, 0, 0.0)],
)
def test_what_is_kept(cut):
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(60, 9, dtype=torch.float64, generator=generator)
    logits[:30, 4] = -torch.inf
    heat = torch.tensor([1.0, 0.7, 1.6]).repeat(20).double()
    top_p, top_k, min_p = (torch.full((60,), float(part), dtype=torch.float64) for part in cut)
    found = truncate_(logits.clone(), heat, min_p=min_p, top_k=top_k.long(), top_p=top_p)
    for row in range(60):
        whole = logits[row] / heat[row]
        inside = kept(whole, *cut) > 0
        assert torch.equal(found[row] > -torch.inf, inside) and inside.any()
        assert torch.equal(found[row][inside], logits[row][inside])


def test_ties_at_the_last_place_are_kept():
    logits, one = torch.tensor([[1.0, 0.5, 0.5, 0.0]]), torch.ones(1)
    found = truncate_(logits, one, min_p=0 * one, top_k=torch.tensor([2]), top_p=one)
    assert (found > -torch.inf).tolist() == [[True, True, True, False]]
