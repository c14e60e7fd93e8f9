"""Draft with a smaller causal LM of the same vocabulary."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.decoding._text import check_model_vocabularies, fitted
from cactus_theory.decoding.drafters._base import (
    DraftContext,
    Drafter,
    Drafting,
    SampledDrafting,
    nothing,
)
from cactus_theory.decoding.drafters.stop import Watch, check_stop
from cactus_theory.decoding.models import CachedModel, longest_text, text_config
from cactus_theory.verify.draft import Draft


@dataclass(frozen=True)
class ModelDrafter(Drafter):
    """Draft with ``model``, token by token, under the target's temperature and processors.

    ``greedy`` takes its likeliest token instead of a sampled one; its drafts are then
    deterministic, that is, verified as one-hot rows. ``stop`` ends a row's draft early where its
    tokens will probably not all be accepted: below this expected share, a threshold in [0, 1].

    The model's vocabulary may be padded to another size: a token that it lacks has probability 0,
    and one that the target lacks is cut. It stops drafting where its positions end.

    Examples
    --------
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> unsure = ModelDrafter(pair.draft, stop=0.3)
    >>> ct.generate(pair.target, unsure, ids, policy="speculative", max_new_tokens=8).num_tokens
    8
    """

    model: Any
    greedy: bool = False
    stop: float | None = None

    def __post_init__(self) -> None:
        check_stop(self.stop)

    def begin(self, setting: DraftContext) -> Drafting:
        """Return this drafter at work on one decode."""
        return ModelDrafting(setting, self.model, self.greedy, self.stop)

    def check(self, target_model: Any) -> dict[str, Any]:
        """Raise for a model of another vocabulary."""
        check_model_vocabularies(target_model, self.model)
        return {"draft_model": self.model}


class ModelDrafting(SampledDrafting):
    """A draft model with its cache, which lacks the tokens it has not been fed yet."""

    def __init__(
        self, setting: DraftContext, model: Any, greedy: bool, stop: float | None = None
    ) -> None:
        super().__init__(setting, greedy)
        self.sizes = [text_config(each).vocab_size for each in (setting.target_model, model)]
        self.positions = min(self.texts.capacity, longest_text(model) or self.texts.capacity)
        if self.next_row and self.positions < self.texts.capacity:
            raise ValueError(
                "draft_model: must have positions for the whole text where the verifier reads one "
                f"more draft row ({self.texts.capacity}); got {self.positions}"
            )
        self.model = CachedModel(
            model,
            self.positions,
            self.texts.batch,
            slack=1,  # tokens of a pass that the text does not keep
            fast_forward=setting.fast_forward,
            drafts=True,
        )
        self.stop = None if self.deterministic else stop

    def propose(self, wanted: Sequence[int], coins: Float[Tensor, "batch K"]) -> Draft:
        """Sample (or take the likeliest of) one token per step and row."""
        room = [max(self.positions - length, 0) for length in self.texts.lengths]
        lengths, tokens = list(map(min, wanted, room)), []
        if not any(lengths):
            return nothing(self.texts)
        watch = None if self.stop is None else Watch(self.stop, lengths)
        while len(tokens) < max(lengths):
            tokens.append(self._step(len(tokens), lengths, coins[:, len(tokens)]))
            if watch is not None and self.probs is not None and len(tokens) < max(lengths):
                watch.see(len(tokens), self.probs[:, len(tokens) - 1], tokens[-1])
        if self.next_row:
            self._follow(lengths)
        self.clock.lap("other")
        return Draft(torch.stack(tokens, 1), lengths, self.rows(len(tokens)))

    def _follow(self, drafted: Sequence[int]) -> None:
        """Write each row's probabilities after its last drafted token."""
        lengths = self.model.lengths
        counts = [
            length + count - cached
            for length, cached, count in zip(self.texts.lengths, lengths, drafted, strict=True)
        ]
        logits = self._feed(self.texts.take(lengths, counts), counts)
        memory = self.memory(logits)
        for offset in set(drafted):
            rows = [row for row, count in enumerate(drafted) if count == offset]
            memory[rows, offset] = self.warp(logits.clone(), self.texts, offset, drafted)[rows, 0]
        self.clock.lap("draft")

    def _step(self, offset: int, draft_lengths: Sequence[int], coin: Tensor) -> Tensor:
        lengths = self.model.lengths
        counts = [
            length + offset - cached if drafted > offset else 0
            for length, cached, drafted in zip(
                self.texts.lengths, lengths, draft_lengths, strict=True
            )
        ]
        fed = self.texts.take(lengths, counts)
        self.clock.lap("other")
        logits = self._feed(fed, counts)
        self.clock.lap("draft")
        return self.draw(logits, offset, draft_lengths, coin)

    def _feed(self, ids: Tensor, counts: Sequence[int]) -> Float[Tensor, "batch 1 vocab"]:
        """Return the logits after the last fed tokens, one for each token of the target."""
        target, own = self.sizes
        if own < target:  # whatever stands for a token that it has not: no draft is lossy
            ids = ids.clamp(max=own - 1)
        logits = self.model.feed(ids, counts, [1] * len(counts))
        self.calls = self.model.calls
        return fitted(logits, target)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        super().keep(rows)
        self.model.keep(rows)

    def settle(self) -> None:
        """Roll back what was drafted and not accepted, and the last token, which is fed next."""
        for row, cached in enumerate(self.model.lengths):
            self.model.rollback(row, min(cached, self.texts.lengths[row] - 1))
