"""Rows as people have them: an upcast softmax, counts, digits that were cut."""

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.base.tolerances import ROW_SUM_TOLERANCE

# float32 sums of 2,000 terms, upcast, miss 1 by more than float64 rows may
Q, P = (
    torch.softmax(3 * torch.randn(3, 2000, generator=torch.Generator().manual_seed(seed)), -1)
    for seed in (0, 1)
)
WIDE = tuple(rows.double() * (1 + 1e-7) for rows in (Q, P))
# dividing by a sum twice moves a last bit, and what roots are made of with it
ROUNDING = 1e-9
RULE = ct.policy("band:price=1")
CALLS = {
    "optimal_acceptance": lambda q, p, **more: ct.optimal_acceptance(q, p, delta=0.1, **more),
    "pooled_acceptance": lambda q, p, **more: ct.pooled_acceptance(q, p, delta=0.1, **more),
    "pooled_frontier": lambda q, p, **more: ct.pooled_frontier(q, p, points=3, **more),
    "selection_law": lambda q, p, **more: ct.selection_law(q, p, k=2, **more),
    "emitted_law": lambda q, p, **more: ct.emitted_law(RULE, q, p, **more),
    "audit": lambda q, p, **more: ct.audit(RULE, q, p, **more),
}


def numbers(result):
    """Return the arrays of a result by name."""
    fields = {"row": result} if isinstance(result, torch.Tensor) else vars(result)
    return {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("dtype", ROW_SUM_TOLERANCE)
@pytest.mark.parametrize("scale", [1, 3, 5])
def test_a_softmax_of_any_precision_misses_one_by_half_of_what_rows_may(dtype, scale) -> None:
    """At a large vocabulary, where float32 needs the most of its share: a half is its margin."""
    logits = scale * torch.randn(151_936, generator=torch.Generator().manual_seed(scale))
    row = logits.double().softmax(-1) if dtype == torch.float64 else logits.softmax(-1)
    off = abs(float(row.to(dtype).sum(dtype=torch.float64)) - 1)
    assert 2 * off <= ROW_SUM_TOLERANCE[dtype]


@pytest.mark.parametrize(
    "dtype, off",
    [(torch.float64, 1e-8), (torch.float32, 1e-3), (torch.float16, 0.01), (torch.bfloat16, 0.05)],
)
def test_a_row_that_misses_one_by_several_times_what_it_may_is_refused(dtype, off) -> None:
    row, fits = torch.tensor([0.25, 0.75 + off], dtype=dtype), torch.tensor([0.25, 0.75])
    assert off / 20 < ROW_SUM_TOLERANCE[dtype] < off
    with pytest.raises(ValueError, match="target_probs: every row must sum to 1"):
        ct.emitted_law(ct.policy("speculative"), row, fits.to(dtype))


@pytest.mark.parametrize("name", CALLS)
def test_rows_are_divided_by_their_sums_when_asked(name) -> None:
    call = CALLS[name]
    with pytest.raises(ValueError, match="target_probs: every row must sum to 1 .*normalise=True"):
        call(*WIDE)
    exact = numbers(call(*(rows / rows.sum(-1, keepdim=True) for rows in WIDE)))
    found = numbers(call(*WIDE, normalise=True))
    assert exact and found.keys() == exact.keys()
    for field, value in exact.items():
        torch.testing.assert_close(
            found[field], value, rtol=ROUNDING, atol=ROUNDING, equal_nan=True
        )


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([0.0, 0.0], "must have a positive sum to be divided by; the row sums to 0"),
        ([0.5, -0.1], "must not be negative"),
        ([0.5, np.nan], "must be finite"),
    ],
)
def test_only_weights_can_be_divided(name, rows, message) -> None:
    with pytest.raises(ValueError, match=f"draft_probs: .*{message}"):
        CALLS[name](np.array([2.0, 1.0]), np.array(rows), normalise=True)


def test_a_deterministic_draft_has_no_row_to_divide() -> None:
    law = ct.emitted_law(RULE, np.array([2.0, 1.0, 1.0]), None, draft_token_ids=0, normalise=True)
    whole = ct.emitted_law(RULE, np.array([0.5, 0.25, 0.25]), None, draft_token_ids=0)
    np.testing.assert_array_equal(law, whole)
