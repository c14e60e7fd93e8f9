"""Split the rows of a batch into parts of a few rows, and join the results.

Temporaries of a whole batch would be as large as the batch; temporaries of a few rows stay in the
CPU's cache.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cactus_theory.base.tensors import AT_ONCE, from_numpy, normalised


def in_parts(*batches: Tensor) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
    """Split batches (..., V): yield slices of rows, and the rows in float64, divided by their sums.

    All batches have one shape, and a slice numbers the rows of the flattened batch. A batch without
    rows is one part. All rows on a GPU are one part, too, as GPU allocators keep freed memory.
    """
    *batch, vocab = batches[0].shape
    count = math.prod(batch)
    step = max(1, count if batches[0].is_cuda else AT_ONCE // vocab)
    for start in range(0, max(1, count), step):
        at = slice(start, min(start + step, count))
        yield at, tuple(normalised(_some(rows, at)) for rows in batches)


def parts_of(rows: Tensor) -> Iterator[slice]:
    """Yield slices of rows (R, V), each of at most AT_ONCE entries (2^16) or of one row."""
    count, vocab = rows.shape
    step = max(1, AT_ONCE // vocab)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def joined(parts: Iterable[tuple[slice, Sequence[Tensor | None]]], count: int) -> Sequence[Any]:
    """Join the results of parts, each a slice and its tensors, into tensors of all ``count`` rows.

    A None in place of a tensor stays None.
    """
    whole: list[Any] = []
    for rows, values in parts:
        if rows.stop - rows.start == count:  # one part has all rows
            return values
        whole = whole or [None if value is None else _empty(count, value) for value in values]
        for column, value in zip(whole, values, strict=True):
            if value is not None:
                column[rows] = value
    return whole


def _empty(count: int, like: Tensor) -> Tensor:
    """Return an uninitialised tensor of ``count`` entries that are like those of ``like``.

    On a CPU, float64 tensors are made by NumPy, which takes huge pages of memory if there are any.
    """
    if like.device.type != "cpu" or like.dtype != torch.float64:
        return like.new_empty(count, *like.shape[1:])
    return from_numpy(np.empty((count, *like.shape[1:])))


def _some(rows: Tensor, at: slice) -> Tensor:
    """Return the rows (R, V) of a slice; rows that torch cannot view as (N, V) are copied."""
    try:
        return rows.view(-1, rows.shape[-1])[at]
    except RuntimeError:
        numbers = torch.arange(at.start, at.stop, device=rows.device)
        return rows[torch.unravel_index(numbers, rows.shape[:-1])]
