"""Turn uniform numbers into decisions; the only place where chance enters."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

Generators = torch.Generator | list[torch.Generator] | None
Coins = tuple[Tensor, Tensor]


def pick(rows: Float[Tensor, "rows vocab"], draw: Float[Tensor, "rows"]) -> Int[Tensor, "rows"]:
    """Return the first index of positive mass whose cumulative mass exceeds draw × total.

    Rows need not be normalised; ``draw`` lies in [0, 1). A token of zero mass is never
    returned, not even by draw = 0 or by the last float below 1.
    """
    cumulative = rows.double().cumsum(-1)
    threshold = draw.double()[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, threshold, right=True)
    # draw·total may round up to total: fall back on the index where the total was reached
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    return torch.minimum(index, last)[:, 0]


def toss(lengths: Int[Tensor, "batch"], width: int, generator: Generators) -> Coins:
    """Return (accept (B, width), draw (B,)) uniform on [0, 1), float64.

    With one generator a row, a row takes its own length plus one numbers, so that it
    behaves as if it were alone.
    """
    batch, device = len(lengths), lengths.device
    if not isinstance(generator, list):
        where = device if generator is None else generator.device
        uniform = torch.rand(
            batch, width + 1, generator=generator, dtype=torch.float64, device=where
        ).to(device)
        return uniform[:, :width], uniform[:, width]
    accept = torch.zeros(batch, width, dtype=torch.float64)
    draw = torch.zeros(batch, dtype=torch.float64)
    for row, (length, source) in enumerate(zip(lengths.tolist(), generator, strict=True)):
        numbers = torch.rand(
            length + 1, generator=source, dtype=torch.float64, device=source.device
        ).cpu()
        accept[row, :length], draw[row] = numbers[:length], numbers[length]
    return accept.to(device), draw.to(device)
