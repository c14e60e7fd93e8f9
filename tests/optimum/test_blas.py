"""Long rows: no product of numpy's is long enough for OpenBLAS to give it to threads."""

import sys
from typing import Any

import numpy as np
import pytest
import torch

import cactus_theory as ct

VOCAB = 32_000
# float64 entries up to which OpenBLAS keeps a dot on the calling thread
UNTHREADED = 10_000


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize(
    ("verify", "spec"),
    [
        (ct.verify_chain, "band:price=1"),
        (ct.verify_chain, "band:delta=0.1"),
        (ct.verify_block, "band:price=1"),
        (ct.verify_block, "band:price=1,per_row=True"),
        (ct.verify_block, "band:price=1,divergence=pearson_chi2"),
    ],
)
def test_no_dot_of_a_long_float64_row_goes_to_threads(verify, spec, greedy):
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(4, 7, VOCAB, generator=generator, dtype=torch.float64)
    rows = (4 * rows).softmax(-1)
    target, draft = rows, rows[:, :3].roll(1, -1) * 0.7 + rows[:, :3] * 0.3
    ids = draft.argmax(-1) if greedy else torch.multinomial(draft.flatten(0, 1), 1).view(4, 3)
    dots, sizes = [], []

    def record(frame: Any, event: str, called: Any) -> None:
        owner = getattr(called, "__self__", None)
        if event != "c_call" or called.__name__ != "dot":
            return
        dots.append(called)
        if isinstance(owner, np.ndarray):
            sizes.append(owner.size * (owner.dtype == np.float64))

    sys.setprofile(record)
    try:
        verify(ct.policy(spec), target[:, :4], None if greedy else draft, ids, generator=generator)
    finally:
        sys.setprofile(None)
    assert dots or greedy or spec == "band:delta=0.1"
    assert max(sizes, default=0) <= UNTHREADED
