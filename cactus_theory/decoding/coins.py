"""Draw the coins of each text, uniform random numbers of [0, 1), from the text's own generator.

Coins are float64 and come from NumPy. In a round a text takes three kinds of coins: those that
draw drafted tokens, those by which the verifier accepts these tokens, and one that draws the
recovered or bonus token. How many it takes does not depend on other texts. So a text's tokens do
not depend on the batch. The global random state of NumPy and PyTorch is neither read nor changed.
The host loop and the device loop use this module.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.decoding.text import Texts


def seeds_of(texts: Texts) -> Int[Tensor, "batch"]:
    """Return for each text a seed for GPU kernels, below 2^53, made from the text's next coin."""
    seeds = [int(float(text.stream(1)[0]) * 2**53) for text in texts.rows]
    return torch.tensor(seeds, device=texts.device)


def toss(
    texts: Texts, draft_lengths: Sequence[int], coins: Callable[[int], int] = int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a round's coins: (B, K) for drafting, (B, C) for acceptance, (B,) for the last token.

    The last token of a round is the recovered or the bonus token. ``coins`` maps the number of
    drafted tokens of a text to its number of acceptance coins (default ``int``: the same number). C
    is the largest number of acceptance coins.
    """
    width, count = max(draft_lengths), max(length + coins(length) for length in draft_lengths)
    table = np.zeros((len(draft_lengths), count + 1))
    fill(table, texts, width, draft_lengths, coins)
    rows = torch.from_numpy(table).to(texts.device)
    return rows[:, :width], rows[:, width:count], rows[:, -1]


def more_draws(
    texts: Texts,
    draw: Float[Tensor, "batch"],
    draft_lengths: Sequence[int],
    draws: Callable[[int], int],
) -> Float[Tensor, "batch *draws"]:
    """Return the coins that draw tokens: ``draw``, and further columns if the verifier needs them.

    The further coins come from each text's generator. ``draws`` maps the number of drafted tokens
    of a text to the number of columns that the text needs, ``draw`` included.
    """
    counts = [draws(length) - 1 for length in draft_lengths]
    if not any(counts):
        return draw
    table = np.zeros((len(counts), max(counts)))
    for draws_of_text, text, count in zip(table, texts.rows, counts, strict=True):
        draws_of_text[:count] = np.asarray(text.stream(count))
    return torch.cat([draw[:, None], torch.from_numpy(table).to(texts.device)], 1)


def fill(
    table: np.ndarray,
    texts: Texts,
    width: int,
    draft_lengths: Sequence[int],
    coins: Callable[[int], int],
) -> None:
    """Write a round's coins into ``table`` (B, width + C + 1).

    The columns are ``width`` coins for drafting, C for acceptance, 1 for the last token. ``coins``
    maps a text's draft length to the number of acceptance coins that the text takes, at most C.
    Entries that a text does not take, and rows of draft length −1, keep their values.
    """
    for row, text, length in zip(table, texts.rows, draft_lengths, strict=True):
        if length < 0:
            continue
        numbers = np.asarray(text.stream(length + coins(length) + 1))
        row[:length], row[-1] = numbers[:length], numbers[-1]
        row[width : width + coins(length)] = numbers[length:-1]


def checked_seeds(seed: int | Sequence[int] | None) -> int | list[int]:
    """Return the seed (0 for None) or the list of seeds; raise unless all are integers ≥ 0."""
    if isinstance(seed, Sequence) and not isinstance(seed, str):
        return [check.whole_number("seed", number, 0) for number in seed]
    return 0 if seed is None else check.whole_number("seed", seed, 0)
