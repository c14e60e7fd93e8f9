"""Draw tokens from rows with uniform random numbers (coins), and coins from a generator.

GPU kernels draw in the same way, by parts: ``cactus_theory/kernels/_draws.py``.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.base.tensors import as_list
from cactus_theory.base.tolerances import DECIDED
from cactus_theory.optimum.band_row import loops

Generators = torch.Generator | list[torch.Generator] | None
Coins = tuple[Tensor, Tensor]

# tokens whose masses are added up in one block, before a search looks at single tokens
BLOCK = 512
# id that is returned in place of a token if the row is no distribution
NO_TOKEN = -1


def pick(rows: Float[Tensor, "rows vocab"], draw: Float[Tensor, "rows"]) -> Int[Tensor, "rows"]:
    """Draw from each row the first token whose cumulative mass exceeds draw × total mass.

    Rows need not be normalised; ``draw`` lies in [0, 1). A token of zero mass is never
    returned, not even by draw = 0 or by the last float below 1. A row without mass, or with
    NaN or ∞ in it, gives ``NO_TOKEN``. Sums are float64.
    """
    if rows.is_cuda or rows.device.type != "cpu" or loops() is None:
        return _pick_blocked(rows, draw)
    tokens = [
        pick_one(row, coin) for row, coin in zip(rows.detach(), draw.detach().numpy(), strict=True)
    ]
    return torch.tensor(tokens, dtype=torch.int64, device=rows.device)


def pick_one(row: Float[Tensor, "vocab"], draw: float) -> int:
    """Return the token that :func:`pick` draws from one row, on the CPU."""
    if (compiled := loops()) is None:
        draws = torch.tensor([draw], dtype=torch.float64, device="cpu")
        return int(_pick_blocked(row[None], draws))
    entries = (row if row.dtype in DECIDED else row.float()).contiguous().numpy()
    return compiled.draw_left(entries, entries[:0], 1.0, draw)


def _pick_blocked(rows: Tensor, draw: Tensor) -> Tensor:
    """Draw as :func:`pick`: find the block of tokens first, then the token within the block.

    Sums of blocks vectorise; a running sum over the whole row does not.
    """
    blocks = torch.nn.functional.pad(rows, (0, -rows.shape[-1] % BLOCK))
    blocks = blocks.view(len(rows), -1, BLOCK)
    sums = blocks.sum(-1, dtype=torch.float64)
    cumulative = sums.cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    threshold = draw[:, None] * total
    block = _first_beyond(cumulative, threshold)
    before = cumulative.gather(-1, block) - sums.gather(-1, block)
    entries = blocks.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0]
    inside = entries.cumsum(-1, dtype=torch.float64)
    threshold_inside = (threshold - before).clamp(min=0.0)  # sums of blocks round differently
    token = block * BLOCK + _first_beyond(inside, threshold_inside)
    return torch.where((total > 0) & (total < torch.inf), token, NO_TOKEN)[:, 0]


def _first_beyond(cumulative: Tensor, threshold: Tensor) -> Int[Tensor, "rows 1"]:
    """Return the first index of each row whose cumulative mass exceeds the row's threshold.

    If rounding lifted the threshold to the total, return the first index that has the total.
    """
    index = torch.searchsorted(cumulative, threshold, right=True)
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    return torch.minimum(index, last).clamp(max=cumulative.shape[-1] - 1)  # NaN is beyond all


def toss(
    lengths: Int[Tensor, "batch"],
    width: int,
    generator: Generators,
    later_draws: Int[Tensor, "batch"] | None = None,
) -> Coins:
    """Return coins (accept (B, width), draw (B,)), uniform on [0, 1), float64.

    ``lengths`` are the numbers of drafted tokens of each text. With one generator per text, a text
    takes one number more than it has drafted tokens, so its coins do not depend on other texts.
    ``later_draws`` (B,) is the number of further coins that draw tokens for each text. They are
    taken from the generator afterwards, and ``draw`` is then (B, 1 + max ``later_draws``).
    """
    if later_draws is not None:
        accept, first = toss(lengths, width, generator)
        # drawn like the acceptance coins of texts with ``later_draws`` tokens
        later, _ = toss(later_draws, int(later_draws.max()), generator)
        return accept, torch.cat([first[:, None], later], 1)
    batch, device = len(lengths), lengths.device

    def uniform(source: torch.Generator | None, *shape: int) -> Tensor:
        where = device if source is None else source.device
        return torch.rand(shape, generator=source, dtype=torch.float64, device=where)

    if isinstance(generator, list):
        table = torch.zeros(batch, width + 1, dtype=torch.float64, device="cpu")
        for coins, length, source in zip(table, as_list(lengths), generator, strict=True):
            numbers = uniform(source, length + 1).cpu()
            coins[:length], coins[width:] = numbers[:length], numbers[length:]
    else:
        table = uniform(generator, batch, width + 1)
    table = table.to(device)
    return table[:, :width], table[:, width]
