"""A draft model whose passes see the wrong tokens, positions or attention; without a cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cactus_theory.decoding.drafters import ModelDrafter
from cactus_theory.decoding.drafters._base import Drafting, Setting
from cactus_theory.decoding.drafters.model import ModelDrafting
from cactus_theory.decoding.models import text_config


@dataclass(frozen=True)
class Misled(ModelDrafter):
    """Draft with ``model`` by passes that are shown something else than the text so far.

    ``unseen`` is how many of the last tokens are not fed: the row is that of a slot before.
    ``from_round`` lets drafted tokens' positions begin at 0. ``lost`` is how many tokens a refusal
    costs a cache, which is fed at the positions of its slots. ``whole`` ignores a sliding window.
    """

    unseen: int = 0
    from_round: bool = False
    lost: int = 0
    whole: bool = False

    @classmethod
    def without_window(cls, model: Any, greedy: bool) -> "Misled | None":
        """Return a drafter without the model's sliding window; None for a model that has none."""
        window = getattr(text_config(model), "sliding_window", None)
        return cls(model, greedy, whole=True) if window else None

    def begin(self, setting: Setting) -> Drafting:
        """Return this drafter at work on one decode."""
        return MisledDrafting(setting, self)


class MisledDrafting(ModelDrafting):
    """Such a drafter at work: one whole pass a token and text."""

    def __init__(self, setting: Setting, own: Misled) -> None:
        super().__init__(setting, own.model, own.greedy)
        self.own, self.lost = own, [set[int]() for _ in range(setting.texts.batch)]
        self.drafted_from = [(length, 0) for length in setting.texts.lengths]

    def fed(self, row: int, offset: int) -> tuple[list[int], list[int]]:
        """Return which tokens of a text a pass is shown, and at which positions."""
        length, lost = self.texts.lengths[row], self.lost[row]
        kept = [place for place in range(length + offset) if place not in lost]
        kept = kept[: max(len(kept) - self.own.unseen, 1)]
        positions = [*range(length), *range(offset)] if self.own.from_round else range(len(kept))
        return kept, list(positions)

    @torch.inference_mode()
    def _step(self, offset: int, wanted: Sequence[int], coin: Tensor) -> Tensor:
        """Draw a token; rows are padded behind, where no token of theirs looks."""
        model, texts = self.own.model, self.texts
        if not offset:
            self.drafted_from = list(zip(texts.lengths, wanted, strict=True))
        fed = [self.fed(row, offset) for row in range(texts.batch)]
        last = torch.tensor([len(places) - 1 for places, _ in fed])
        width = int(last.max()) + 1
        ids, positions = torch.zeros(2, texts.batch, width, dtype=torch.int64, device=texts.device)
        for row, (places, own) in enumerate(fed):
            ids[row, : len(places)] = texts.prefix(row, offset)[0, places]
            positions[row, : len(places)] = torch.tensor(own)
        more: dict[str, Any] = {}
        if self.own.whole:
            least = torch.finfo(model.dtype).min
            barred = torch.full((1, 1, width, width), least, dtype=model.dtype)
            more["attention_mask"] = barred.triu(1).to(texts.device)
        self.calls += 1
        logits = model(input_ids=ids, position_ids=positions, use_cache=False, **more).logits
        own_row = logits[torch.arange(texts.batch), last][:, None].clone()
        return self.draw(own_row, offset, wanted, coin)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        super().keep(rows)
        self.lost = [self.lost[row] for row in rows]
        self.drafted_from = [self.drafted_from[row] for row in rows]

    def settle(self) -> None:
        """Note what a faulty cache loses after a refusal: the last tokens but the newest."""
        if not self.own.lost:
            return
        for length, (before, drafted), lost in zip(
            self.texts.lengths, self.drafted_from, self.lost, strict=True
        ):
            if length - before <= drafted:
                kept = [place for place in range(length - 1) if place not in lost]
                lost |= set(kept[-self.own.lost :])
