"""From logits to rows of probabilities, and the coins that choose from them: one stream a row."""

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
    """softmax(logits / temperature) after Hugging Face processors; temperature 0 is greedy.

    At temperature 0 a row is exactly 1 at the largest processed logit, the first one on ties. With
    ``soft`` it is the softmax at temperature 1, for policies that are charged in regret.
    A row with NaN, or without a logit above −∞, has no law and is NaN throughout.
    Rows keep the precision of the logits, at least float32, and their memory: without processors,
    which get copies, nothing of the size of the logits is allocated.
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

        Row (b, i) continues the settled text of row b and its first ``first + i`` drafted
        tokens; row b is valid up to ``first + i = drafted[b]``. Where ``draft`` is a tree it
        continues the text of its node.
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
        """Return the processed logits, temperature not yet applied."""
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        self.processors(Places(logits, texts, first, drafted, draft))
        if not self.checked:
            self.checked = True
            warn_of_probabilities("logits_processor", logits[0, 0])
        return logits


# Coins are uniform float64 numbers of [0, 1), each text's from a stream of its own. A text takes a
# number for every token it may draft, the verifier's coins for them, and one for the token that
# follows, however many the other texts take. So it behaves as if alone. Streams are NumPy's: the
# global state of either library is neither read nor changed.


def seeds_of(texts: Texts) -> Int[Tensor, "batch"]:
    """Return a whole number below 2^53 for each text, the next one of its stream."""
    seeds = [int(float(text.stream(1)[0]) * 2**53) for text in texts.rows]
    return torch.tensor(seeds, device=texts.device)


def toss(
    texts: Texts, draft_lengths: Sequence[int], coins: Callable[[int], int] = int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (draft (B, K), accept (B, C), draw (B,)) for texts of these draft lengths.

    ``coins`` returns how many acceptance coins a number of drafted tokens takes.
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
    """Return the draws with as many more columns as a verifier takes, tossed after them."""
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
    coins: Callable[[int], int] = int,
) -> None:
    """Write coins into a table (B, width + C + 1); a text of draft length −1 takes none."""
    for own, text, length in zip(table, texts.rows, draft_lengths, strict=True):
        if length < 0:
            continue
        numbers = np.asarray(text.stream(length + coins(length) + 1))
        own[:length], own[-1] = numbers[:length], numbers[-1]
        own[width : width + coins(length)] = numbers[length:-1]


def checked_seeds(seed: int | Sequence[int] | None) -> int | list[int]:
    """Return the seed (0 for None), or one for each text; integers of at least 0."""
    if isinstance(seed, Sequence) and not isinstance(seed, str):
        return [check.whole_number("seed", number, 0) for number in seed]
    return 0 if seed is None else check.whole_number("seed", seed, 0)


def checked_temperature(temperature: float) -> float:
    """Return a finite temperature of at least 0; ValueError for another."""
    return check.finite("temperature", temperature, 0)
