"""A draft model whose passes see the wrong tokens, positions or attention; without a cache."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.decoding.drafters import Drafter
from cactus_theory.decoding.drafters._base import Drafting, Setting, nothing
from cactus_theory.decoding.models import text_config
from cactus_theory.decoding.vocabulary import check_model_vocabularies
from cactus_theory.verify.contract import Draft
from cactus_theory.verify.draw import pick

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
class Misled(Drafter):
    """Draft with ``model`` by passes that are shown what ``view`` says; ``whole``: no window."""

    model: Any
    greedy: bool
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

    def check(self, target_model: Any) -> dict[str, Any]:
        """Raise for a model of another vocabulary."""
        check_model_vocabularies(target_model, self.model)
        return {"draft_model": self.model}


class MisledDrafting(Drafting):
    """Such a drafter at work: one whole pass a token and text."""

    def __init__(self, setting: Setting, own: Misled) -> None:
        self.texts, self.warp, self.own = setting.texts, setting.warp, own
        self.certain = own.greedy or setting.warp.greedy
        self.lost: list[set[int]] = [set() for _ in range(setting.texts.batch)]
        self.drafted_from = [(length, 0) for length in setting.texts.lengths]

    def propose(self, wanted: Sequence[int], coins: Float[Tensor, "batch K"]) -> Draft:
        """Draft token by token."""
        if not any(wanted):
            return nothing(self.texts)
        self.drafted_from = list(zip(self.texts.lengths, wanted, strict=True))
        tokens, rows = [], []
        for offset in range(max(wanted)):
            logits = torch.stack([self._logits(row, offset) for row in range(self.texts.batch)])
            if self.certain:
                scores = self.warp.scores(logits, self.texts, offset, wanted)
                tokens.append(scores[:, 0].argmax(-1))
            else:
                rows.append(self.warp(logits, self.texts, offset, wanted)[:, 0])
                tokens.append(pick(rows[-1], coins[:, offset]).clamp(min=0))
            self.texts.propose(offset, tokens[-1])
        probs = torch.stack(rows, 1) if rows else None
        return Draft(torch.stack(tokens, 1), list(wanted), probs)

    @torch.inference_mode()
    def _logits(self, row: int, offset: int) -> Float[Tensor, "1 vocab"]:
        model, device = self.own.model, self.texts.device
        fed = self.own.view(self.texts.lengths[row], offset, self.lost[row])
        places, positions = (torch.tensor(list(own), device=device) for own in fed)
        more: dict[str, Any] = {}
        if self.own.whole:
            least = torch.finfo(model.dtype).min
            shape = (1, 1, len(places), len(places))
            barred = torch.full(shape, least, dtype=model.dtype, device=device)
            more["attention_mask"] = barred.triu(1)
        self.calls += 1
        ids = self.texts.prefix(row, offset)[:, places]
        logits = model(input_ids=ids, position_ids=positions[None], use_cache=False, **more).logits
        return logits[0, -1:].clone()

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self.lost = [self.lost[row] for row in rows]
        self.drafted_from = [self.drafted_from[row] for row in rows]

    def settle(self) -> None:
        """Note what a faulty cache loses after a refusal: the last tokens but the newest."""
        for length, (before, drafted), lost in zip(
            self.texts.lengths, self.drafted_from, self.lost, strict=True
        ):
            if length - before <= drafted:
                lost |= set([place for place in range(length - 1) if place not in lost][-LOST:])
