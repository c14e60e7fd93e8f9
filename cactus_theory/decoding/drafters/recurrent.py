"""Draft token by token from the target's hidden states, each step's state standing in for them.

The decoder reads the units of the settled tokens; its state after a token then takes the place of
the target's states in the unit of the next one, which the target has not computed. Source: EAGLE
(Li et al., arXiv 2401.15077) and its successors, which read several layers and unroll in training.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cactus_theory.decoding.drafters._base import Drafting, Setting, nothing
from cactus_theory.decoding.drafters._heads import (
    FeatureDrafter,
    FeatureDrafting,
    FeatureHead,
    HeadShape,
)
from cactus_theory.decoding.models.library import gathered
from cactus_theory.verify.draft import Draft


class RecurrentHead(FeatureHead):
    """The network of a :class:`RecurrentDrafter`."""

    kind = "recurrent"

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        self.state = nn.Linear(shape.width, shape.width, bias=False)

    def logits(self, states: Float[Tensor, "*some width"]) -> Float[Tensor, "*some vocab"]:
        """Return the logits of the token after these states."""
        return self.vocabulary(self.core.lm_head(states))


@dataclass(frozen=True)
class RecurrentDrafter(FeatureDrafter):
    """Draft with ``head``, one pass a token; nothing before the target has read the prompt.

    ``greedy`` takes the likeliest token at every step; such drafts are certain.

    Raises
    ------
    ValueError
        When decoding begins: a head made for another target.

    Examples
    --------
    >>> from cactus_theory.decoding.drafters.recurrent import HeadShape, RecurrentHead
    >>> shape = HeadShape(vocab=2048, hidden=192, reads=(3, 7, 11))
    >>> untrained = RecurrentDrafter(RecurrentHead(shape).eval())
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> generate(pair.target, untrained, ids, policy="speculative", max_new_tokens=8).num_tokens
    8
    """

    head: RecurrentHead
    greedy: bool = False

    @classmethod
    def load(cls, folder: str | Path, *, greedy: bool = False) -> "RecurrentDrafter":
        """Return a drafter with the head in a folder; see :meth:`FeatureHead.load`."""
        return cls(RecurrentHead.load(folder), greedy)

    def begin(self, setting: Setting) -> Drafting:
        """Return this drafter at work on one decode."""
        return RecurrentDrafting(setting, self.head, self.greedy)


class RecurrentDrafting(FeatureDrafting):
    """A recurrent head at work."""

    head: RecurrentHead

    def propose(self, wanted: Sequence[int], coins: Float[Tensor, "batch K"]) -> Draft:
        """Draw a token, feed it with the state before it, and so on."""
        lengths = self.planned(wanted)
        if not any(lengths):
            return nothing(self.texts)
        units, counts = self.fresh(lengths)
        last = [max(count - 1, 0) for count in counts]
        state = gathered(self.run(units, counts), last, [1] * len(last))
        self.cache.extend(counts)
        settled, tokens = list(self.cache.lengths), []
        for step in range(max(lengths) + self.next_row):
            if step:
                fed = [int(count + self.next_row > step) for count in lengths]
                x = self.maps["state"](state[:, 0]).add_(self.embedded(tokens[-1]))
                state = self.run(x[:, None], fed)
                self.cache.extend(fed)
            self.clock.lap("draft")
            logits = self.logits(state)
            if step == max(lengths):
                self.law(logits, step, lengths)
            else:
                tokens.append(self.draw(logits, step, lengths, coins[:, step]))
        for row, length in enumerate(settled):
            self.cache.rollback(row, length)
        self.clock.lap("draft")
        return Draft(torch.stack(tokens, 1), lengths, self.rows(len(tokens)))
