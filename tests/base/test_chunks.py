"""A batch is worked on a few rows at a time, and gives the same numbers."""

from dataclasses import fields

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.base import chunks
from cactus_theory.base.chunks import in_parts

VOCAB = 12
ROWS = torch.rand(2, 3, 7, VOCAB, generator=torch.Generator().manual_seed(0)).double() ** 3 + 1e-3
Q, P = ROWS / ROWS.sum(-1, keepdim=True)
# sums of many rows at once may be added up in another order
ROUNDING = 1e-12
BUDGETS = torch.linspace(0.01, 0.3, 21, dtype=torch.float64).view(3, 7)
JOBS = {
    "law": lambda q, p, at: ct.emitted_law(ct.policy("cactus:delta=0.1"), q, p),
    "deterministic": lambda q, p, at: ct.emitted_law(
        ct.policy("cactus:delta=0.1"), q, None, draft_token_ids=p.argmax(-1)
    ),
    "optimum": lambda q, p, at: ct.optimal_acceptance(
        q, p, delta=BUDGETS[at] if at != slice(0, 0) else 0.1
    ),
    "selection": lambda q, p, at: ct.selection_law(q, p, k=2),
    "beside": lambda q, p, at: ct.selection_law(q, p, kind="deterministic+off", deterministic=[3]),
    "audit": lambda q, p, at: ct.audit(ct.policy("cactus:delta=0.1"), q, p),
    "free audit": lambda q, p, at: ct.audit(ct.policy("mixture:alpha=0.5"), q, p),
}


def numbers(result):
    """Return the tensors of a result by name."""
    if isinstance(result, torch.Tensor):
        return {"": result}
    named = {field.name: getattr(result, field.name) for field in fields(result)}
    named |= named.pop("divergences", {})
    return {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("name", JOBS)
def test_a_batch_in_parts_is_its_rows_one_by_one(name, monkeypatch):
    job = JOBS[name]
    whole = numbers(job(Q, P, ...))
    monkeypatch.setattr(chunks, "AT_ONCE", 5 * VOCAB)
    for split, value in numbers(job(Q, P, ...)).items():
        torch.testing.assert_close(value, whole[split], rtol=ROUNDING, atol=ROUNDING)
        assert value.shape == whole[split].shape and value.dtype == whole[split].dtype
    for at in np.ndindex(3, 7):
        for field, value in numbers(job(Q[at], P[at], at)).items():
            torch.testing.assert_close(value, whole[field][at], rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("name", JOBS)
def test_no_row_gives_no_result(name):
    for value in numbers(JOBS[name](Q[:0], P[:0], slice(0, 0))).values():
        assert len(value) == 0


def test_rows_that_are_repeated_or_lie_apart_come_in_order(monkeypatch):
    monkeypatch.setattr(chunks, "AT_ONCE", 4 * VOCAB)
    repeated, apart = Q[:, :1].expand(3, 7, VOCAB), P.transpose(0, 1)[:, :3].transpose(0, 1)
    sizes = []
    for at, rows in in_parts(repeated, P[:, ::1], P.flip(1)):
        sizes.append(at.stop - at.start)
        for part, batch in zip(rows, (repeated, P, P.flip(1)), strict=True):
            torch.testing.assert_close(part, batch.reshape(-1, VOCAB)[at], rtol=ROUNDING, atol=0.0)
    assert sizes == [4, 4, 4, 4, 4, 1]
    (_, (first,)), *_ = in_parts(apart)
    torch.testing.assert_close(first, apart.reshape(-1, VOCAB)[:4], rtol=ROUNDING, atol=0.0)


def test_a_policy_sees_a_few_rows_at_a_time(monkeypatch):
    monkeypatch.setattr(chunks, "AT_ONCE", 5 * VOCAB)
    rule, seen = ct.policy("typical"), []
    emitted = type(rule).emitted
    monkeypatch.setattr(
        type(rule), "emitted", lambda self, q, p: seen.append(len(q)) or emitted(self, q, p)
    )
    for call in (ct.emitted_law, ct.audit):
        seen.clear()
        call(rule, Q, P)
        assert seen == [5, 5, 5, 5, 1]
