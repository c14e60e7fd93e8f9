"""Rows of a batch, a few at a time, whatever the size of the batch.

The temporaries of a whole batch are as large as the batch; those of a few rows stay near the core.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cactus_theory.base.tensors import AT_ONCE, normalised


def in_parts(*batches: Tensor) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
    """Yield slices of rows, and float64 rows (R, V) divided by their sums, of batches (..., V).

    All have one shape, and rows are numbered in its order. No row at all is one part, and so are
    all rows on a GPU, whose memory is kept by its allocator.
    """
    *batch, vocab = batches[0].shape
    count = math.prod(batch)
    step = max(1, count if batches[0].is_cuda else AT_ONCE // vocab)
    for start in range(0, max(1, count), step):
        at = slice(start, min(start + step, count))
        yield at, tuple(normalised(_some(rows, at)) for rows in batches)


def parts_of(rows: Tensor) -> Iterator[slice]:
    """Yield slices of (R, V), each of at most AT_ONCE entries, on any device; none without rows."""
    count, vocab = rows.shape
    step = max(1, AT_ONCE // vocab)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def joined(parts: Iterable[tuple[slice, Sequence[Tensor | None]]], count: int) -> Sequence[Any]:
    """Join the results of parts, each a slice and its tensors, into tensors of all ``count`` rows.

    None stays None.
    """
    whole: list[Any] = []
    for at, values in parts:
        if at.stop - at.start == count:
            return values
        whole = whole or [None if value is None else _empty(count, value) for value in values]
        for column, value in zip(whole, values, strict=True):
            if value is not None:
                column[at] = value
    return whole


def _empty(count: int, like: Tensor) -> Tensor:
    """Return memory for so many rows: on a CPU numpy's, in huge pages where there are any."""
    if like.device.type != "cpu" or like.dtype != torch.float64:
        return like.new_empty(count, *like.shape[1:])
    return torch.from_numpy(np.empty((count, *like.shape[1:])))


def _some(rows: Tensor, at: slice) -> Tensor:
    """Return some of the rows: copies of these alone where rows are repeated or lie apart."""
    try:
        return rows.view(-1, rows.shape[-1])[at]
    except RuntimeError:
        numbers = torch.arange(at.start, at.stop, device=rows.device)
        return rows[torch.unravel_index(numbers, rows.shape[:-1])]
