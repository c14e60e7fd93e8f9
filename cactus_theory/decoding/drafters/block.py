r"""Draft a block of tokens from the target's hidden states, in one pass of a small decoder.

The decoder reads the units of the settled tokens and a mark for every further place of the block;
the state s_i of place i gives logits of low rank, and the token before it a bias of low rank:

.. math:: p_i = \mathrm{softmax}(U A s_i + W_2 W_1[x_{i-1}])

All states come from one pass, and tokens are drawn one after another, so that the reported row *is*
the row that a token was drawn from. (Were every place drawn by itself, from the mean over what the
places before may hold, few drafts would be texts.)
A confidence head σ(w·(s_i, W_1[x_{i−1}])) foretells the acceptance of place i. It is read before
the token there is drawn, so whether place i is drafted depends on the tokens before it only, and
verification stays as lossless as it was (THEORY.md, Theorem 12).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from cactus_theory.decoding.drafters._base import Drafting, Setting, nothing
from cactus_theory.decoding.drafters._heads import (
    FeatureDrafter,
    FeatureDrafting,
    FeatureHead,
    HeadShape,
)
from cactus_theory.decoding.drafters.stop import check_stop
from cactus_theory.decoding.models.library import gathered
from cactus_theory.verify.draft import Draft


class BlockHead(FeatureHead):
    """The network of a :class:`BlockDrafter`; ``python -m simulations train-pair`` trains one."""

    kind = "block"

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        self.before = nn.Embedding(shape.vocab, shape.path_rank)
        self.after = nn.Linear(shape.path_rank, shape.vocab, bias=False)
        self.confidence = nn.Linear(shape.width + shape.path_rank, 1)
        nn.init.zeros_(self.after.weight)
        nn.init.zeros_(self.confidence.weight)

    @property
    def marks(self) -> Float[Tensor, "places width"]:
        """Return what the first place's unit is shifted by at the places after it."""
        return self.core.model.embed_tokens.weight

    def logits(
        self, states: Float[Tensor, "*some width"], before: Int[Tensor, "*some"]
    ) -> Float[Tensor, "*some vocab"]:
        """Return the logits of places with these states, after these tokens."""
        return self.vocabulary(self.core.lm_head(states)) + self.after(self.before(before))


@dataclass(frozen=True)
class BlockDrafter(FeatureDrafter):
    """Draft with ``head``, one pass a block; nothing before the target has read the prompt.

    ``greedy`` takes the likeliest token at every place; such drafts are certain. ``stop`` ends a
    row's draft before the place at which the product of the foretold acceptances, its own
    included, falls below it; at least one token is drafted.

    Raises
    ------
    ValueError
        A ``stop`` outside [0, 1]; when decoding begins, a head made for another target.

    Examples
    --------
    >>> from cactus_theory.decoding.drafters.block import BlockHead, HeadShape
    >>> shape = HeadShape(vocab=2048, hidden=192, reads=(3, 7, 11))
    >>> untrained = BlockDrafter(BlockHead(shape).eval())
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> generate(pair.target, untrained, ids, policy="speculative", max_new_tokens=8).num_tokens
    8
    """

    head: BlockHead
    greedy: bool = False
    stop: float | None = None

    def __post_init__(self) -> None:
        check_stop(self.stop)

    @classmethod
    def load(
        cls, folder: str | Path, *, greedy: bool = False, stop: float | None = None
    ) -> "BlockDrafter":
        """Return a drafter with the head in a folder; see :meth:`FeatureHead.load`."""
        return cls(BlockHead.load(folder), greedy, stop)

    def begin(self, setting: Setting) -> Drafting:
        """Return this drafter at work on one decode."""
        return BlockDrafting(setting, self.head, self.greedy, self.stop)


class BlockDrafting(FeatureDrafting):
    """A block head at work."""

    head: BlockHead

    def __init__(self, setting: Setting, head: BlockHead, greedy: bool, stop: float | None) -> None:
        super().__init__(setting, head, greedy)
        self.stop = None if self.certain else stop
        self.marks, self.before = head.marks, head.before.weight

    def propose(self, wanted: Sequence[int], coins: Float[Tensor, "batch K"]) -> Draft:
        """Run the decoder once, and draw the tokens one after another."""
        lengths = self.planned(wanted)
        if not any(lengths):
            return nothing(self.texts)
        states = self._states(max(lengths) + self.next_row, lengths)
        of_states = self.logits(states)
        self.clock.lap("draft")
        products = [1.0] * len(lengths)
        ends = [length - 1 for length in self.texts.lengths]
        before, tokens = self.texts.take(ends, [1] * len(ends))[:, 0], []
        for place in range(states.shape[1]):
            path = F.embedding(before, self.before)
            if self.stop is not None:
                self._stop(place, lengths, products, torch.cat([states[:, place], path], -1))
            if place >= max(lengths) + self.next_row:
                break
            logits = self.maps["after"](path).add_(of_states[:, place])[:, None]
            if place == max(lengths):
                self.law(logits, place, lengths)
                break
            before = self.draw(logits, place, lengths, coins[:, place])
            tokens.append(before)
        self.clock.lap("draft")
        return Draft(torch.stack(tokens, 1), lengths, self.rows(len(tokens)))

    def _states(self, places: int, lengths: Sequence[int]) -> Float[Tensor, "batch places width"]:
        """Feed the new units and the marks of the places after the first; return their states."""
        units, counts = self.fresh(lengths)
        last = [max(count - 1, 0) for count in counts]
        x = units
        if places > 1:
            marked = gathered(units, last, [1] * len(last)) + self.marks[1:places]
            x = _joined(units, marked, counts)
        fed = [count + places - 1 if count else 0 for count in counts]
        states = gathered(self.run(x, fed), last, [places] * len(last))
        self.cache.extend(counts)  # marks are written over by the next units
        return states

    def _stop(self, place: int, lengths: list[int], products: list[float], x: Tensor) -> None:
        """Learn the acceptance foretold of a place; end drafts that probably will not reach it."""
        chances = self.maps["confidence"](x)[:, 0].sigmoid().tolist()
        for row, chance in enumerate(chances):
            products[row] *= chance
            if place and lengths[row] > place and products[row] < (self.stop or 0.0):
                lengths[row] = place


def _joined(
    units: Float[Tensor, "batch most width"],
    marked: Float[Tensor, "batch more width"],
    counts: Sequence[int],
) -> Float[Tensor, "batch new width"]:
    """Return the first ``counts[b]`` units of each row, and the marked ones after them."""
    if min(counts) == max(counts):
        return torch.cat([units, marked], 1)
    at = torch.arange(units.shape[1] + marked.shape[1], device=units.device)
    lengths = torch.tensor(list(counts), device=units.device)[:, None]
    row = torch.arange(len(counts), device=units.device)[:, None]
    after = marked[row, (at - lengths).clamp(0, marked.shape[1] - 1)]
    before = units[:, at.clamp(max=units.shape[1] - 1)]
    return torch.where((at < lengths)[..., None], before, after)
