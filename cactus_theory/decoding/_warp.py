"""From logits to the rows that tokens are drawn from and verified against."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.base.rows import greedy, scaled, warn_of_probabilities
from cactus_theory.decoding._text import Texts
from cactus_theory.verify.contract import Draft

# processors that read nothing but a row of scores; any other is called position by position
CONTEXT_FREE = frozenset(
    {
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "MinPLogitsWarper",
        "SuppressTokensLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopHLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TypicalLogitsWarper",
    }
)
# processors that compare n-grams of ids: padding of any kind would add n-grams
UNPADDED = frozenset({"NoRepeatNGramLogitsProcessor"})


class Warp:
    """softmax(logits / temperature) after Hugging Face processors; temperature 0 is greedy.

    At temperature 0 a row is exactly 1 at the largest processed logit, the first one on ties.
    A row with NaN, or without a logit above −∞, has no law and is NaN throughout.
    Rows keep the precision of the logits, at least float32, and their memory: without processors,
    which get copies, nothing of the size of the logits is allocated.

    Processors see the ids that the library's own loop would show them: the prompt with its
    padding in front (a row's first token replaces the padding, so that no processor about used
    tokens sees one that the row does not contain), then everything up to the position.
    """

    def __init__(
        self, temperature: float, processors: Sequence[Any] = (), padding: Sequence[int] = ()
    ) -> None:
        self.temperature, self.processors = temperature, list(processors)
        self.padding, self.looked = padding, not self.processors
        # where each row stood in the batch that the processors were made for
        self.places, self.batch = list(range(len(padding))), max(len(padding), 1)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        self.places = [self.places[row] for row in rows]

    @property
    def greedy(self) -> bool:
        """Return whether every row is certain of its token."""
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
            return greedy(scores, scores if out is None else out)
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
        for processor in self.processors:
            if type(processor).__name__ in CONTEXT_FREE:
                flat = logits.reshape(-1, logits.shape[-1])
                # a processor may change what it gets, and keep what it returns
                scores = processor(texts.buffer[:, :1].clone(), flat.clone())
                logits.copy_(scores.reshape(logits.shape))
            else:
                self._in_context(processor, logits, texts, first, drafted, draft)
        if not self.looked:
            self.looked = True
            warn_of_probabilities("logits_processor", logits[0, 0])
        return logits

    def _in_context(
        self,
        processor: Any,
        logits: Tensor,
        texts: Texts,
        first: int,
        drafted: Sequence[int],
        draft: Draft | None,
    ) -> None:
        tree = None if draft is None or draft.parents is None else draft
        for row in range(texts.batch):
            last = min(drafted[row] - first + 1, logits.shape[1])
            for offset in range(last):
                if tree is None:
                    ids = texts.prefix(row, first + offset)
                else:  # ancestors, no cousins
                    ids = texts.along(row, tree.path(row, offset - 1) if offset else [])
                place = self.places[row] if self.places else 0
                if self._pads(processor, place):
                    ids = torch.cat([ids[:, :1].expand(1, self.padding[place]), ids], 1)
                # processors may hold a state per row: show each its row of a whole batch
                shown = ids.expand(self.batch, -1), logits[row, offset].expand(self.batch, -1)
                logits[row, offset] = processor(*(part.clone() for part in shown))[place]

    def _pads(self, processor: Any, place: int) -> bool:
        if not self.padding or type(processor).__name__ in UNPADDED:
            return False
        return self.padding[place] > 0
