"""Draw tokens with uniform numbers (coins), and the coins from a generator.

Kernels draw alike, by parts: ``cactus_theory/kernels/_draws.py``.
"""

import math

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.base.tolerances import DECIDED
from cactus_theory.optimum.rows import loops

Generators = torch.Generator | list[torch.Generator] | None
Coins = tuple[Tensor, Tensor]


# Least entries of a row that is searched in two steps, first for a block: sums of blocks vectorise,
# a running sum does not.
BLOCKED_FROM = 8192
# entries of a block, near the square root of a large vocabulary: about as many blocks as entries
BLOCK = 512
# id of a token whose row is no distribution
NO_TOKEN = -1


def pick(
    rows: Float[Tensor, "rows vocab"], draw: Float[Tensor, "rows"], none: int = NO_TOKEN
) -> Int[Tensor, "rows"]:
    """Return the first index of positive mass whose cumulative mass exceeds draw × total.

    Rows need not be normalised; ``draw`` lies in [0, 1). A token of zero mass is never
    returned, not even by draw = 0 or by the last float below 1. A row without mass, or with
    NaN or ∞ in it, gives ``none``. Sums are float64, those inside a block of a long float32 row
    float32.
    """
    if rows.shape[1] >= BLOCKED_FROM:
        if rows.shape[0] == 1 and rows.device.type == "cpu":
            token = pick_one(rows[0].detach(), draw.item())
            return torch.tensor([token if token >= 0 else none], device=rows.device)
        return _pick_blocked(rows, draw, none)
    cumulative = rows.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    return _first_beyond(cumulative, draw[:, None] * total, none)[:, 0]


def pick_one(row: Float[Tensor, "vocab"], draw: float) -> int:
    """Draw as :func:`pick` from one row on the CPU."""
    row = row if row.dtype in DECIDED else row.float()
    if row.is_contiguous() and (compiled := loops()) is not None:
        entries = row.numpy()
        return compiled.draw_left(entries, entries[:0], 1.0, draw)
    if row.shape[0] < BLOCKED_FROM:
        return _at_share(row.cumsum(-1, dtype=torch.float64).numpy(), draw)
    whole = row.shape[0] // BLOCK * BLOCK
    parts = torch.cat([row[:whole].view(-1, BLOCK).sum(-1), row[whole:].sum(-1, keepdim=True)])
    sums = parts.double().numpy()
    cumulative = sums.cumsum()
    block = _at_share(cumulative, draw)
    if block == NO_TOKEN:
        return NO_TOKEN
    rest = draw * cumulative[-1] - (cumulative[block] - sums[block])
    inside = row[block * BLOCK : (block + 1) * BLOCK].cumsum(-1, dtype=torch.float64).numpy()
    return block * BLOCK + _beyond(inside, max(rest, 0.0))


def _at_share(cumulative: Float[np.ndarray, "n"], share: float) -> int:
    total = cumulative[-1]
    return _beyond(cumulative, share * total) if 0 < total < math.inf else NO_TOKEN


def _beyond(cumulative: Float[np.ndarray, "n"], threshold: float) -> int:
    index = int(cumulative.searchsorted(threshold, "right"))
    # a threshold may round up to the total: fall back on the index where that was reached
    return index if index < len(cumulative) else int(cumulative.searchsorted(cumulative[-1]))


def _first_beyond(
    cumulative: Float[Tensor, "rows n"], threshold: Float[Tensor, "rows 1"], none: int = NO_TOKEN
) -> Int[Tensor, "rows 1"]:
    """Return the first index whose cumulative mass exceeds the threshold, of positive mass.

    ``none`` where the sums have no positive, finite total; any other row is searched without a look
    at that, since its index then lies inside the row.
    """
    index = torch.searchsorted(cumulative, threshold, right=True)
    if not index.is_cuda and int(index.max()) < cumulative.shape[-1]:
        return index
    # a threshold may round up to the total: fall back on the index where that was reached
    total = cumulative[:, -1:].contiguous()
    last = torch.minimum(index, torch.searchsorted(cumulative, total))
    return torch.where((total > 0) & (total < torch.inf), last, none)


def _pick_blocked(rows: Tensor, draw: Tensor, none: int) -> Tensor:
    whole = rows.shape[-1] // BLOCK
    head = rows[:, : whole * BLOCK].view(len(rows), whole, BLOCK).sum(-1).double()
    tail = rows[:, whole * BLOCK :].sum(-1, keepdim=True).double()
    cumulative = torch.cat([head, tail], -1).cumsum(-1)
    threshold = draw[:, None] * cumulative[:, -1:]
    block_or_none = _first_beyond(cumulative, threshold)
    block = block_or_none.clamp(min=0)
    before = cumulative.gather(-1, block) - torch.cat([head, tail], -1).gather(-1, block)
    inside = block * BLOCK + torch.arange(BLOCK, device=rows.device)
    real = inside < rows.shape[-1]
    entries = rows.gather(-1, inside.clamp(max=rows.shape[-1] - 1))
    entries = torch.where(real, entries, 0.0).cumsum(-1, dtype=torch.float64)
    rest = (threshold - before).clamp(min=0.0)  # sums of blocks and entries round differently
    token = block * BLOCK + _first_beyond(entries, rest)
    return torch.where(block_or_none < 0, none, token)[:, 0]


def toss(
    lengths: Int[Tensor, "batch"],
    width: int,
    generator: Generators,
    later_draws: Int[Tensor, "batch"] | None = None,
) -> Coins:
    """Return (accept (B, width), draw (B,)) uniform on [0, 1), float64.

    With one generator a row, a row takes its own length plus one numbers, so that it
    behaves as if it were alone. So do ``later_draws`` of each row, (B, 1 + most), after these.
    """
    if later_draws is not None:
        accept, first = toss(lengths, width, generator)
        later, _ = toss(later_draws, int(later_draws.max()), generator)
        return accept, torch.cat([first[:, None], later], 1)
    batch, device = len(lengths), lengths.device
    if not isinstance(generator, list):
        generator_device = device if generator is None else generator.device
        uniform = torch.rand(
            batch, width + 1, generator=generator, dtype=torch.float64, device=generator_device
        ).to(device)
        return uniform[:, :width], uniform[:, width]
    accept = torch.zeros(batch, width, dtype=torch.float64, device="cpu")
    draw = torch.zeros(batch, dtype=torch.float64, device="cpu")
    for row, (length, source) in enumerate(zip(lengths.tolist(), generator, strict=True)):
        numbers = torch.rand(
            length + 1, generator=source, dtype=torch.float64, device=source.device
        ).cpu()
        accept[row, :length], draw[row] = numbers[:length], numbers[length]
    return accept.to(device), draw.to(device)
