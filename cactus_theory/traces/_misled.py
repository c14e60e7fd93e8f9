"""A draft model whose passes see the wrong tokens, positions or attention; without a cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.decoding.drafters import Drafter
from cactus_theory.decoding.drafters._base import Drafting, Setting, nothing
from cactus_theory.decoding.models import text_config
from cactus_theory.decoding.vocabulary import check_model_vocabularies
from cactus_theory.verify.contract import Draft
from cactus_theory.verify.draw import pick

# how many tokens a refusal costs a draft's cache
LOST = 2


@dataclass(frozen=True)
class Sight:
    """What is known when a row of the draft is wanted.

    ``settled`` tokens of the text come first, then ``drafted`` ones; ``lost`` are the places of
    settled tokens that a faulty cache has dropped.
    """

    settled: int
    drafted: int
    lost: frozenset[int]


# which tokens are fed, and at which positions
View = Callable[[Sight], tuple[list[int], list[int]]]


def everything(sight: Sight) -> tuple[list[int], list[int]]:
    """Return all tokens at their positions: no fault."""
    places = list(range(sight.settled + sight.drafted))
    return places, places


def one_slot_off(sight: Sight) -> tuple[list[int], list[int]]:
    """Return all but the last token: the row is that of the slot before."""
    places, _ = everything(sight)
    return places[:-1] or places, places[:-1] or places


def counted_from_the_round(sight: Sight) -> tuple[list[int], list[int]]:
    """Return all tokens, drafted ones at positions that begin at 0."""
    places, _ = everything(sight)
    return places, places[: sight.settled] + list(range(sight.drafted))


def behind_after_refusals(sight: Sight) -> tuple[list[int], list[int]]:
    """Return what a cache still holds, at the positions of its slots."""
    places = [place for place in everything(sight)[0] if place not in sight.lost]
    return places, list(range(len(places)))


def whole_attention(model: Any, greedy: bool) -> "Misled | None":
    """Return a drafter without the model's sliding window; None for a model that has none."""
    if not getattr(text_config(model), "sliding_window", None):
        return None
    return Misled(model, greedy, everything, whole=True)


@dataclass(frozen=True)
class Misled(Drafter):
    """Draft with ``model`` by passes that are shown what ``view`` says."""

    model: Any
    greedy: bool
    view: View
    whole: bool = False

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
        self.before, self.drafted = list(setting.texts.lengths), [0] * setting.texts.batch

    def propose(self, wanted: Sequence[int], coins: Float[Tensor, "batch K"]) -> Draft:
        """Draft token by token."""
        if not any(wanted):
            return nothing(self.texts)
        self.before, self.drafted = list(self.texts.lengths), list(wanted)
        tokens, rows = [], []
        for offset in range(max(wanted)):
            logits = torch.stack([self._logits(row, offset) for row in range(self.texts.batch)])
            if self.certain:
                scores = self.warp.scores(logits[:, None], self.texts, offset, wanted)
                tokens.append(scores[:, 0].argmax(-1))
            else:
                rows.append(self.warp(logits[:, None], self.texts, offset, wanted)[:, 0])
                tokens.append(pick(rows[-1], coins[:, offset]).clamp(min=0))
            self.texts.propose(offset, tokens[-1])
        probs = torch.stack(rows, 1) if rows else None
        return Draft(torch.stack(tokens, 1), list(wanted), probs)

    @torch.inference_mode()
    def _logits(self, row: int, offset: int) -> Float[Tensor, "vocab"]:
        sight = Sight(self.texts.lengths[row], offset, frozenset(self.lost[row]))
        places, positions = self.own.view(sight)
        ids: Int[Tensor, "1 n"] = self.texts.prefix(row, offset)[:, places]
        more: dict[str, Any] = {}
        if self.own.whole:
            dtype, size = self.own.model.dtype, len(places)
            barred = torch.full((size, size), torch.finfo(dtype).min, dtype=dtype).triu(1)
            more["attention_mask"] = barred[None, None].to(ids.device)
        at = torch.tensor([positions], device=ids.device)
        self.calls += 1
        logits = self.own.model(input_ids=ids, position_ids=at, use_cache=False, **more).logits
        return logits[0, -1].clone()

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        for name in ("lost", "before", "drafted"):
            own = getattr(self, name)
            setattr(self, name, [own[row] for row in rows])

    def settle(self) -> None:
        """Note what a faulty cache loses after a refusal: the last tokens but the newest."""
        for row, length in enumerate(self.texts.lengths):
            if length - self.before[row] <= self.drafted[row]:
                held = [place for place in range(length - 1) if place not in self.lost[row]]
                self.lost[row] |= set(held[-LOST:])
