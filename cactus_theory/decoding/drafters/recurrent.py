"""Draft token by token from the target's hidden states, each step's state standing in for them.

The decoder reads the units of the settled tokens; its state after a token then takes the place of
the target's states in the unit of the next one, which the target has not computed. Source: EAGLE
(Li et al., arXiv 2401.15077) and its successors, which read several layers and unroll in training.
Unit j (token j, from 1 on) is slot j − 1 of the decoder's cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from cactus_theory.decoding.drafters._base import (
    DraftContext,
    Drafter,
    Drafting,
    SampledDrafting,
    nothing,
)
from cactus_theory.decoding.drafters.recurrent_head import RecurrentHead
from cactus_theory.decoding.models.cache import RaggedCache
from cactus_theory.decoding.models.hugging_face_forward import gathered
from cactus_theory.decoding.models.llama_forward import FastForward
from cactus_theory.decoding.models.projections import Linear, prepared
from cactus_theory.verify.draft import Draft

# most numbers of the kept table of all tokens' contributions to units (16 MB)
TABLE_ENTRIES = 2**22


@dataclass(frozen=True)
class RecurrentDrafter(Drafter):
    """Draft with ``head``, one pass a token; nothing before the target has read the prompt.

    ``greedy`` takes the likeliest token at every step; such drafts are deterministic.

    Raises
    ------
    ValueError
        When decoding begins: a head made for another target.

    Examples
    --------
    >>> from cactus_theory.decoding.drafters.recurrent_head import HeadShape, RecurrentHead
    >>> shape = HeadShape(vocab=2048, hidden=192, reads=(3, 7, 11))
    >>> untrained = RecurrentDrafter(RecurrentHead(shape).eval())
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> ct.generate(pair.target, untrained, ids, policy="speculative", max_new_tokens=8).num_tokens
    8
    """

    head: Any  # a RecurrentHead
    greedy: bool = False

    @classmethod
    def load(cls, folder: str | Path, *, greedy: bool = False) -> "RecurrentDrafter":
        """Return a drafter with the head in a folder; see :meth:`RecurrentHead.load`."""
        return cls(RecurrentHead.load(folder), greedy)

    def begin(self, setting: DraftContext) -> Drafting:
        """Return this drafter at work on one decode."""
        return RecurrentDrafting(setting, self.head, self.greedy)

    def check(self, target_model: Any) -> dict[str, Any]:
        """Raise for a target that the head was not made for."""
        self.head.check(target_model)
        return {}

    def reads(self, target_model: Any) -> Sequence[int]:
        """Return the layers that the head reads."""
        return self.head.shape.reads


def packed_maps(
    head: RecurrentHead, embedding: Float[Tensor, "vocab hidden"]
) -> tuple[dict[str, Linear], Tensor | None]:
    """Return a head's linear maps outside its decoder, by name, packed for a few rows.

    And what every token adds to a unit (V, width); None where that is much memory.
    """
    parts = {name: part for name, part in head.named_children() if type(part) is nn.Linear}
    maps = {name: Linear(part.weight, part.bias) for name, part in parts.items()}
    small = len(embedding) * head.shape.width <= TABLE_ENTRIES
    return maps, maps["token"](head.normed(embedding)) if small else None


class RecurrentDrafting(SampledDrafting):
    """The head's state in one decode: its cache of units, and its weights packed for few rows."""

    def __init__(self, setting: DraftContext, head: RecurrentHead, greedy: bool) -> None:
        super().__init__(setting, greedy)
        self.head, self.features, texts = head, setting.features, self.texts
        self.embedding = setting.target_model.get_input_embeddings()
        self.maps, self.table = prepared(head, packed_maps, self.embedding.weight)
        self.cache = RaggedCache(
            head.shape.layers, texts.batch, texts.capacity + head.shape.places + 1
        )
        self.forward = FastForward(head.core, self.cache)
        self.places, self.layers = head.shape.places, head.shape.reads

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
                state = self.run(self.following(state[:, 0], tokens[-1])[:, None], fed)
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

    def planned(self, wanted: Sequence[int]) -> list[int]:
        """Return the number of tokens each row may draft: none before its states are there."""
        places = self.places - self.next_row
        read = [0] * len(wanted) if self.features is None else self.features.lengths
        rows = zip(wanted, read, self.texts.lengths, strict=True)
        return [min(most, places) if 0 < states == ids - 1 else 0 for most, states, ids in rows]

    def fresh(self, lengths: Sequence[int]) -> tuple[Float[Tensor, "batch most width"], list[int]]:
        """Return the units that are not cached yet, none of rows that draft nothing."""
        assert self.features is not None
        starts = list(self.cache.lengths)
        rows = zip(self.features.lengths, starts, lengths, strict=True)
        counts = [(read - start) * bool(drafted) for read, start, drafted in rows]
        states = [self.features.hidden(layer, starts, counts) for layer in self.layers]
        tokens = self.texts.take([start + 1 for start in starts], counts)
        return self.units(torch.stack(states, 2), tokens), counts

    def units(
        self, states: Float[Tensor, "batch most layers hidden"], tokens: Int[Tensor, "batch most"]
    ) -> Float[Tensor, "batch most width"]:
        """Return the units of tokens whose predecessors have these states."""
        units = self.maps["features"](self.head.normed(states).flatten(2).flatten(0, 1))
        return self.embedded(tokens).add_(units.view(*tokens.shape, -1))

    def following(
        self, state: Float[Tensor, "batch width"], tokens: Int[Tensor, "batch"]
    ) -> Float[Tensor, "batch width"]:
        """Return the units of drafted tokens after the decoder's own states."""
        return self.maps["state"](state).add_(self.embedded(tokens))

    def logits(self, states: Float[Tensor, "batch some width"]) -> Tensor:
        """Return the logits of the tokens after these states."""
        rows = self.maps["vocabulary"](self.forward.head(states.reshape(-1, states.shape[-1])))
        return rows.view(*states.shape[:2], -1)

    def run(self, x: Float[Tensor, "batch new width"], counts: Sequence[int]) -> Tensor:
        """Return the decoder's states of tokens that are fed after the cached units."""
        self.calls += 1
        return self.forward.run(x.reshape(-1, x.shape[-1]), (x.shape[0], x.shape[1]), counts)

    def embedded(self, tokens: Int[Tensor, "*some"]) -> Float[Tensor, "*some width"]:
        """Return the contribution of tokens to units."""
        if self.table is not None:
            return F.embedding(tokens, self.table)
        rows = self.head.normed(self.embedding(tokens).flatten(0, -2))
        return self.maps["token"](rows).view(*tokens.shape, -1)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        super().keep(rows)
        self.cache.keep(rows)
