"""Turn logits into rows of probabilities, and draw the coins of each text from a separate stream.

A *coin* is a uniform random number of [0, 1). The host loop, the device loop and drafters use it.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.base.rows import greedy, scaled, softmax_in_order, warn_of_probabilities
from cactus_theory.decoding.processors import Places, Processors
from cactus_theory.decoding.text import Texts
from cactus_theory.verify.draft import Draft


class Warp:
    """Function from logits to probabilities: processors, then softmax(logits / temperature).

    At temperature 0 a row is 1 at the largest processed logit, the first one on ties, and else 0.
    With ``soft`` the row at temperature 0 is the softmax at temperature 1, for policies that are
    charged in regret. A row with NaN, or without a logit above −∞, becomes NaN throughout.
    Rows have the precision of the logits, at least float32, and are written over the logits.
    Without processors, which get copies, no memory of the size of the logits is allocated.
    """

    def __init__(
        self, temperature: float, processors: Processors | None = None, soft: bool = False
    ) -> None:
        self.temperature, self.processors = temperature, processors or Processors()
        self.soft = soft
        self.checked = not self.processors.all

    @property
    def greedy(self) -> bool:
        """Return whether the temperature is 0."""
        return self.temperature == 0

    def __call__(
        self,
        logits: Float[Tensor, "batch some vocab"],
        texts: Texts,
        first: int,
        drafted: Sequence[int],
        out: Tensor | None = None,
        draft: Draft | None = None,
    ) -> Float[Tensor, "batch some vocab"]:
        """Return probabilities, written into ``out`` or over the logits.

        Row (b, i) is the distribution of the token after text b and the text's first ``first + i``
        drafted tokens; rows of text b are valid up to ``first + i = drafted[b]``. If ``draft`` is a
        tree, row (b, i) follows the path to node i instead.
        """
        scores = self.scores(logits, texts, first, drafted, draft)
        if self.greedy:
            rows = softmax_in_order if self.soft else greedy
            return rows(scores, scores if out is None else out)
        if self.temperature != 1:
            scores = scaled(scores, self.temperature, scores)
        return torch.softmax(scores, -1, out=scores if out is None else out)

    def scores(
        self,
        logits: Float[Tensor, "batch some vocab"],
        texts: Texts,
        first: int,
        drafted: Sequence[int],
        draft: Draft | None = None,
    ) -> Float[Tensor, "batch some vocab"]:
        """Return the logits after processors and before the temperature."""
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        self.processors(Places(logits, texts, first, drafted, draft))
        if not self.checked:
            self.checked = True
            warn_of_probabilities("logits_processor", logits[0, 0])
        return logits


# Coins are uniform float64 numbers of [0, 1). Each text has a separate NumPy stream. In a round a
# text takes one number per drafted token, the verifier's acceptance coins for them, and one number
# for the recovered or bonus token, however many numbers other texts take. So a text's tokens do not
# depend on the batch. The global random state of NumPy and PyTorch is neither read nor changed.


def seeds_of(texts: Texts) -> Int[Tensor, "batch"]:
    """Return an integer below 2^53 for each text, made of the next number of the text's stream."""
    seeds = [int(float(text.stream(1)[0]) * 2**53) for text in texts.rows]
    return torch.tensor(seeds, device=texts.device)


def toss(
    texts: Texts, draft_lengths: Sequence[int], coins: Callable[[int], int] = int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a round's coins: for drafting (B, K), acceptance (B, C) and the last draw (B,).

    ``coins`` returns the number of acceptance coins for a number of drafted tokens.
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
    """Return ``draw`` with further columns: the other random numbers that a verifier needs.

    These are taken from each text's own random stream. ``draws`` returns the number of columns for
    a number of drafted tokens.
    """
    counts = [draws(length) - 1 for length in draft_lengths]
    if not any(counts):
        return draw
    table = np.zeros((len(counts), max(counts)))
    for own, text, count in zip(table, texts.rows, counts, strict=True):
        own[:count] = np.asarray(text.stream(count))
    return torch.cat([draw[:, None], torch.from_numpy(table).to(texts.device)], 1)


def fill(
    table: np.ndarray,
    texts: Texts,
    width: int,
    draft_lengths: Sequence[int],
    coins: Callable[[int], int],
) -> None:
    """Write a round's coins into a table (B, width + C + 1): drafting, acceptance, last draw.

    ``coins`` returns how many of the C coins of acceptance a draft length takes. Entries that a
    text does not take, and rows of a draft length of −1, keep their values.
    """
    for own, text, length in zip(table, texts.rows, draft_lengths, strict=True):
        if length < 0:
            continue
        numbers = np.asarray(text.stream(length + coins(length) + 1))
        own[:length], own[-1] = numbers[:length], numbers[-1]
        own[width : width + coins(length)] = numbers[length:-1]


def checked_seeds(seed: int | Sequence[int] | None) -> int | list[int]:
    """Return the seed (0 for None) or the list of seeds; raise unless integers of at least 0."""
    if isinstance(seed, Sequence) and not isinstance(seed, str):
        return [check.whole_number("seed", number, 0) for number in seed]
    return 0 if seed is None else check.whole_number("seed", seed, 0)


def checked_temperature(temperature: float) -> float:
    """Return the temperature; ValueError unless finite and at least 0."""
    return check.finite("temperature", temperature, 0)
