"""What drafters share that draw tokens one after another, each from the row that they report."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.decoding.drafters._base import Drafting, Setting
from cactus_theory.verify.draw import pick


class SampledDrafting(Drafting):
    """Rows of one round in memory that is taken once, and the tokens drawn from them.

    Attributes
    ----------
    certain : whether the likeliest token is taken; there are no rows then.
    next_row : whether the row after a row's last token is reported, too.
    probs : (B, K, V), None before the first token is drawn.
    likeliest : by place the tokens (B, m) among which one is certain, where others are asked for.
    """

    def __init__(self, setting: Setting, greedy: bool) -> None:
        self.texts, self.warp, self.clock = setting.texts, setting.warp, setting.clock
        self.certain = greedy or self.warp.greedy
        self.next_row = setting.next_row and not self.certain
        self.width = setting.width + self.next_row
        self.probs: Tensor | None = None
        self.beside, self.likeliest = setting.beside, dict[int, Tensor]()

    def draw(
        self,
        logits: Float[Tensor, "batch 1 vocab"],
        offset: int,
        wanted: Sequence[int],
        coin: Tensor,
    ) -> Int[Tensor, "batch"]:
        """Write drafted token number ``offset`` of every row, and its law; return it.

        The logits are written over. Entries of rows that want no more tokens are arbitrary.
        """
        if self.certain:
            scores = self.warp.scores(logits, self.texts, offset, wanted)[:, 0]
            token = scores.argmax(-1)
            if self.beside:
                self.likeliest[offset] = best(scores, self.beside + 1, -torch.inf)
        else:
            # a row without a law is found where it verifies
            token = pick(self.law(logits, offset, wanted), coin, none=0)
        self.texts.propose(offset, token)
        return token

    def law(
        self, logits: Float[Tensor, "batch 1 vocab"], offset: int, wanted: Sequence[int]
    ) -> Float[Tensor, "batch vocab"]:
        """Write the law of what follows the first ``offset`` drafted tokens; return it."""
        out = self.memory(logits)[:, offset : offset + 1]
        return self.warp(logits, self.texts, offset, wanted, out=out)[:, 0]

    def memory(self, logits: Tensor) -> Tensor:
        """Return room for the rows of one round, taken once."""
        if self.probs is None:
            half = logits.dtype in (torch.float16, torch.bfloat16)
            shape = (logits.shape[0], self.width, logits.shape[-1])
            self.probs = logits.new_zeros(shape, dtype=torch.float32 if half else logits.dtype)
        return self.probs

    def rows(self, drafted: int) -> Float[Tensor, "batch some vocab"] | None:
        """Return the rows of ``drafted`` tokens, and the next one where it is to be read."""
        return None if self.probs is None else self.probs[:, : drafted + self.next_row]

    def others(self, paths: Sequence[Sequence[int]], most: int) -> list[list[list[int]]]:
        """Return the likeliest tokens of the rows that certain ones are of."""
        places = range(max(map(len, paths)))
        return torch.stack([self.likeliest[place] for place in places], 1).tolist()

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        if self.probs is not None:
            self.probs = self.probs[: len(rows)]


def best(rows: Float[Tensor, "*batch vocab"], m: int, least: float) -> Int[Tensor, "*batch m"]:
    """Return the ``m`` largest tokens of each row, −1 for those not above ``least``."""
    found = rows.topk(min(m, rows.shape[-1]))
    return torch.where(found.values > least, found.indices, -1)
