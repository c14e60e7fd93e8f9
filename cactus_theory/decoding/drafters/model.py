r"""Draft with a smaller causal LM of the same vocabulary, and stop where the model is unsure.

Verification ends at the first rejection, so that tokens drafted after a doubtful token are mostly
wasted. With a threshold ``stop``, a draft ends where its tokens will probably not all be accepted.
Let φ̂(p) be the expected acceptance of a token that was drafted with probability p. The draft goes
on after tokens d_1..d_j iff

.. math:: \prod_{i \le j} \hat φ(p_i(d_i)) \ge threshold

The rule is a heuristic, as φ̂ is an estimate, but the emitted law does not depend on the rule: all
of d_1..d_j are verified, including d_j, and whether d_{j+1} is drafted depends on earlier tokens
only (THEORY.md, Theorem 12). Dropping d_j because of p(d_j) would change the law: with
q = (0.5, 0.5) and p = (0.8, 0.2), dropping drafted tokens with p(d) < 0.3 emits (0.6, 0.4).

At least one token is drafted, at most K. Deterministic drafts (greedy decoding, n-grams, all drafts
at temperature 0) have p(d) = 1, which says nothing about acceptance, and are not stopped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from numpy import interp
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.decoding.drafters.interface import (
    DraftContext,
    Drafter,
    Drafting,
    SampledDrafting,
    nothing,
)
from cactus_theory.decoding.models import CachedModel, longest_text, text_config
from cactus_theory.decoding.text import check_model_vocabularies, fitted
from cactus_theory.verify.draft import Draft

# Lossless acceptance at temperature 1 as a function of p(d), linear between measurements of two
# small trained pairs (3,000 and 1,500 verified rows, standard errors 0.01 to 0.04). Fitting it to
# one pair and policy gave 0.09 % more tokens at equal cost (mean of 20 settings), so it is fixed.
PLACES = (0.0, 0.02, 0.25, 0.5, 1.0)
ACCEPTANCE = (0.45, 0.55, 0.63, 0.74, 0.98)


@dataclass(frozen=True)
class ModelDrafter(Drafter):
    """Draft with a causal LM, token by token, under the target's temperature and processors.

    With ``greedy`` the likeliest token is drafted instead of a sampled token, and drafts are
    deterministic, that is, verified as one-hot rows. ``stop``, a threshold in [0, 1], ends a text's
    draft early, where the estimated probability that all drafted tokens are accepted is below
    ``stop``.

    The model's vocabulary may be padded to a different size than the target's: tokens that the
    model lacks have p = 0, and tokens that the target lacks are cut. Drafting stops where the
    model's positions end.

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
        return ModelDrafting(setting, self.model, self.greedy, self.stop)

    def check(self, target_model: Any) -> dict[str, Any]:
        check_model_vocabularies(target_model, self.model)
        return {"draft_model": self.model}


def check_stop(stop: float | None) -> None:
    """Raise unless ``stop`` is None or a threshold in [0, 1]; a draft never stops early at 0."""
    if stop is not None:
        check.number("stop", stop, 0, 1)


class ModelDrafting(SampledDrafting):
    """State of a draft model in one decode: its cache, which may lag behind the texts."""

    def __init__(
        self, setting: DraftContext, model: Any, greedy: bool, stop: float | None = None
    ) -> None:
        super().__init__(setting, greedy)
        self.sizes = [text_config(each).vocab_size for each in (setting.target_model, model)]
        self.positions = min(self.texts.capacity, longest_text(model) or self.texts.capacity)
        self.model = CachedModel(
            model,
            self.positions,
            self.texts.batch,
            slack=1,  # a reserve: ``propose`` ends drafts within ``positions``
            fast_forward=setting.fast_forward,
            drafts=True,
        )
        self.stop = None if self.deterministic else stop

    def propose(self, wanted: Sequence[int], coins: Float[Tensor, "batch K"]) -> Draft:
        room = [max(self.positions - length, 0) for length in self.texts.lengths]
        lengths, tokens = list(map(min, wanted, room)), []
        if not any(lengths):
            return nothing(self.texts)
        self.expected = [1.0] * len(lengths)  # product of φ̂ over each text's drafted tokens
        while len(tokens) < max(lengths):
            tokens.append(self._step(len(tokens), lengths, coins[:, len(tokens)]))
            if self.stop is not None and len(tokens) < max(lengths):
                self._shorten(lengths, len(tokens), tokens[-1])
        self.clock.lap("other")
        return Draft(torch.stack(tokens, 1), lengths, self.rows(len(tokens)))

    def _shorten(self, lengths: list[int], drafted: int, token: Int[Tensor, "batch"]) -> None:
        """End the draft of each row after ``drafted`` tokens if the rule of ``stop`` says so.

        Each row's p of the last drafted token is read from the device, in one transfer. So on CUDA
        the host waits after each drafted token. Rows whose draft has ended are skipped.
        """
        assert self.probs is not None and self.stop is not None
        p = self.probs[:, drafted - 1].gather(1, token[:, None])[:, 0]
        for row, acceptance in enumerate(interp(p.tolist(), PLACES, ACCEPTANCE).tolist()):
            if lengths[row] > drafted:
                self.expected[row] *= acceptance
                if self.expected[row] < self.stop:
                    lengths[row] = drafted

    def _step(self, offset: int, draft_lengths: Sequence[int], coin: Tensor) -> Tensor:
        """Feed the tokens that the cache lacks, and draw drafted token number ``offset``."""
        cached = self.model.lengths
        rows = zip(self.texts.lengths, cached, draft_lengths, strict=True)
        counts = [
            length + offset - held if drafted > offset else 0  # 0 if the row's draft has ended
            for length, held, drafted in rows
        ]
        fed = self.texts.take(cached, counts)
        self.clock.lap("other")
        logits = self._feed(fed, counts)
        self.clock.lap("draft")
        return self.draw(logits, offset, draft_lengths, coin)

    def _feed(self, ids: Tensor, counts: Sequence[int]) -> Float[Tensor, "batch 1 vocab"]:
        """Return the logits after the last fed tokens, over the target's vocabulary."""
        target, vocab = self.sizes
        if vocab < target:  # any id may stand for a missing token: drafts do not change the law
            ids = ids.clamp(max=vocab - 1)
        logits = self.model.feed(ids, counts, [1] * len(counts))
        self.calls = self.model.calls
        return fitted(logits, target)

    def keep(self, rows: Sequence[int]) -> None:
        super().keep(rows)
        self.model.keep(rows)

    def settle(self) -> None:
        """Roll the cache back to the text without its last token, which the next round feeds."""
        for row, cached in enumerate(self.model.lengths):
            self.model.rollback(row, min(cached, self.texts.lengths[row] - 1))
