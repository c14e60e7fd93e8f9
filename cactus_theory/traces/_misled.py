"""A draft model whose passes see the wrong tokens, positions or attention; without a cache."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.decoding.drafters import ModelDrafter
from cactus_theory.decoding.drafters._base import Drafting, SampledDrafting, Setting, nothing
from cactus_theory.decoding.models import text_config
from cactus_theory.verify.contract import Draft

# how many tokens a refusal costs a draft's cache
LOST = 2
# of settled and drafted tokens, and the places a faulty cache has dropped: which tokens are fed,
# and at which positions
View = Callable[[int, int, Collection[int]], tuple[Sequence[int], Sequence[int]]]


def everything(settled: int, drafted: int, lost: Collection[int]) -> tuple[range, range]:
    """Return all tokens at their positions: no fault."""
    return range(settled + drafted), range(settled + drafted)


def one_slot_off(settled: int, drafted: int, lost: Collection[int]) -> tuple[range, range]:
    """Return all but the last token: the row is that of the slot before."""
    return everything(max(settled + drafted - 1, 1), 0, lost)


def counted_from_the_round(
    settled: int, drafted: int, lost: Collection[int]
) -> tuple[range, list[int]]:
    """Return all tokens, drafted ones at positions that begin at 0."""
    return range(settled + drafted), [*range(settled), *range(drafted)]


def behind_after_refusals(
    settled: int, drafted: int, lost: Collection[int]
) -> tuple[list[int], range]:
    """Return what a cache still holds, at the positions of its slots."""
    places = [place for place in range(settled + drafted) if place not in lost]
    return places, range(len(places))


@dataclass(frozen=True)
class Misled(ModelDrafter):
    """Draft with ``model`` by passes that are shown what ``view`` says; ``whole``: no window."""

    view: View = everything
    whole: bool = False

    @classmethod
    def without_window(cls, model: Any, greedy: bool) -> "Misled | None":
        """Return a drafter without the model's sliding window; None for a model that has none."""
        window = getattr(text_config(model), "sliding_window", None)
        return cls(model, greedy, whole=True) if window else None

    def begin(self, setting: Setting) -> Drafting:
        """Return this drafter at work on one decode."""
        return MisledDrafting(setting, self)


class MisledDrafting(SampledDrafting):
    """Such a drafter at work: one whole pass a token and text."""

    def __init__(self, setting: Setting, own: Misled) -> None:
        super().__init__(setting, own.greedy)
        self.own, self.lost = own, [set[int]() for _ in range(setting.texts.batch)]
        self.drafted_from = [(length, 0) for length in setting.texts.lengths]

    def propose(self, wanted: Sequence[int], coins: Float[Tensor, "batch K"]) -> Draft:
        """Draft token by token."""
        if not any(wanted):
            return nothing(self.texts)
        self.drafted_from = list(zip(self.texts.lengths, wanted, strict=True))
        tokens = [
            self.draw(self._logits(offset), offset, wanted, coins[:, offset])
            for offset in range(max(wanted))
        ]
        return Draft(torch.stack(tokens, 1), list(wanted), self.rows(len(tokens)))

    @torch.inference_mode()
    def _logits(self, offset: int) -> Float[Tensor, "batch 1 vocab"]:
        """Return each row's logits; rows are padded behind, where no token of theirs looks."""
        model, texts = self.own.model, self.texts
        fed = [self.own.view(texts.lengths[row], offset, own) for row, own in enumerate(self.lost)]
        last = torch.tensor([len(places) - 1 for places, _ in fed])
        width = int(last.max()) + 1
        ids, positions = torch.zeros(2, texts.batch, width, dtype=torch.int64, device=texts.device)
        for row, (places, own) in enumerate(fed):
            ids[row, : len(places)] = texts.prefix(row, offset)[0, list(places)]
            positions[row, : len(places)] = torch.tensor(list(own))
        more: dict[str, Any] = {}
        if self.own.whole:
            least = torch.finfo(model.dtype).min
            barred = torch.full((1, 1, width, width), least, dtype=model.dtype)
            more["attention_mask"] = barred.triu(1).to(texts.device)
        self.calls += 1
        logits = model(input_ids=ids, position_ids=positions, use_cache=False, **more).logits
        return logits[torch.arange(texts.batch), last][:, None].clone()

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        super().keep(rows)
        self.lost = [self.lost[row] for row in rows]
        self.drafted_from = [self.drafted_from[row] for row in rows]

    def settle(self) -> None:
        """Note what a faulty cache loses after a refusal: the last tokens but the newest."""
        for length, (before, drafted), lost in zip(
            self.texts.lengths, self.drafted_from, self.lost, strict=True
        ):
            if length - before <= drafted:
                lost |= set([place for place in range(length - 1) if place not in lost][-LOST:])
