"""Reduce a failing pair of rows to few tokens and round numbers."""

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]
Fails = Callable[[Tensor, Tensor], bool]

# decimal places that entries are rounded to, fewest first
DIGITS = (1, 2, 3, 4, 6)


def shrink(q: Tensor, p: Tensor, fails: Fails, seconds: float = 10.0) -> Pair:
    """Return the simplest pair (V,) found that still fails, within a time limit.

    Greedy: leave out or merge tokens, make rows one-hot, uniform or equal, empty single
    entries, round to few digits; start again after every success. At last the tokens are put in
    order, so that what is found does not depend on the order in which they were drawn.
    """
    end = time.monotonic() + seconds
    best = (q, p)
    moved = True
    while moved and time.monotonic() < end:
        moved = False
        for pair in candidates(*best):
            if time.monotonic() >= end:
                break
            if size(pair) < size(best) and fails(*pair):
                best, moved = pair, True
                break
    ordered = _ordered(*best)
    return ordered if time.monotonic() < end and fails(*ordered) else best


def size(pair: Pair) -> tuple[int, int, int]:
    """Return what shrinking reduces: tokens, digits to write down, entries that are not 0."""
    entries = torch.cat(pair).tolist()
    return len(pair[0]), sum(len(repr(x)) for x in entries), sum(x != 0 for x in entries)


def candidates(q: Tensor, p: Tensor) -> Iterator[Pair]:
    """Yield simpler pairs, the largest reductions first."""
    vocab = len(q)
    for size_left in range(2, vocab):  # halve quickly: keep the first tokens only
        yield from _valid(q[:size_left], p[:size_left])
    for i in range(vocab if vocab > 1 else 0):
        rest = torch.arange(vocab) != i
        yield from _valid(q[rest], p[rest])
        merged = [row[rest].clone() for row in (q, p)]
        for row, whole in zip(merged, (q, p), strict=True):
            row[i - 1 if i else 0] += whole[i]
        yield from _valid(*merged)
    uniform = torch.full_like(q, 1 / vocab)
    hot = torch.eye(vocab, dtype=q.dtype)
    yield (uniform, uniform)
    yield from ((uniform, p), (q, uniform), (p, p), (q, q))
    for row in hot:
        yield from ((row, p), (q, row))
    for digits in DIGITS:
        yield from _valid(_rounded(q, digits), _rounded(p, digits))
        yield from _valid(_rounded(q, digits), p)
        yield from _valid(q, _rounded(p, digits))
    for i in range(vocab):
        for which in (0, 1):
            rows = [q.clone(), p.clone()]
            rows[which][i] = 0.0
            yield from _valid(*rows)


def _ordered(q: Tensor, p: Tensor) -> Pair:
    """Return the pair with its tokens by falling target and rising draft probability."""
    order = sorted(range(len(q)), key=lambda token: (-float(q[token]), float(p[token])))
    return q[order], p[order]


def _rounded(row: Tensor, digits: int) -> Tensor:
    """Return the row rounded, its largest entry taking what is left over."""
    short = (row * 10**digits).round()
    largest = int(short.argmax())
    short[largest] += 10**digits - short.sum()
    return short / 10**digits


def _valid(q: Tensor, p: Tensor) -> Iterator[Pair]:
    """Yield the pair with both rows normalised, nothing if one is empty or negative."""
    rows = []
    for row in (q, p):
        total = row.sum()
        if not total > 0 or (row < 0).any():
            return
        rows.append(row if (total - 1).abs() < 1e-15 else row / total)
    yield rows[0], rows[1]
