"""Draft with a cheap drafter first, and with another one where it finds nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from cactus_theory.decoding.drafters._base import Drafter, Drafting, Setting
from cactus_theory.decoding.drafters.ngram import NGram
from cactus_theory.verify.draft import Draft


@dataclass(frozen=True)
class Cascade(Drafter):
    """Draft with ``first``; rows for which it finds nothing are drafted by ``second``.

    A model that stops early may be either: ``Cascade(ModelDrafter(model, stop=0.3))``.

    Examples
    --------
    >>> ids = torch.tensor([[5, 6, 7, 5, 6]])
    >>> drafter = Cascade(ModelDrafter(pair.draft), first=NGram())
    >>> generate(pair.target, drafter, ids, policy="speculative", max_new_tokens=8).num_tokens
    8
    """

    second: Drafter
    first: Drafter = NGram()

    def begin(self, setting: Setting) -> Drafting:
        """Return this drafter at work on one decode."""
        return CascadeDrafting(setting, self.first, self.second)

    def check(self, target_model: Any) -> dict[str, Any]:
        """Raise where either drafter does, or drafts trees."""
        for drafter in (self.first, self.second):
            if drafter.nodes(1) > 1:
                name = type(drafter).__name__
                raise ValueError(f"drafter: must draft paths inside a Cascade; got {name}")
        return self.first.check(target_model) | self.second.check(target_model)

    def reads(self, target_model: Any) -> Sequence[int]:
        """Return the layers that either drafter asks for."""
        return (*self.first.reads(target_model), *self.second.reads(target_model))


class CascadeDrafting(Drafting):
    """Both drafters at work."""

    def __init__(self, setting: Setting, first: Drafter, second: Drafter) -> None:
        self.texts = setting.texts
        setting = replace(setting, next_row=False)  # rows of two drafters: none follows them
        self.first, self.second = first.begin(setting), second.begin(setting)

    def propose(self, wanted: Sequence[int], coins: Float[Tensor, "batch K"]) -> Draft:
        """Return the first drafter's tokens where it has any, else the second's."""
        cheap = self.first.propose(wanted, coins)
        rows = zip(wanted, cheap.lengths, strict=True)
        missing = [0 if drafted else length for length, drafted in rows]
        if not any(missing):
            return cheap
        second = self.second.propose(missing, coins)
        self.calls = self.first.calls + self.second.calls
        return self._merged(cheap, second) if any(cheap.lengths) else second

    def _merged(self, cheap: Draft, second: Draft) -> Draft:
        drafted = torch.tensor([count > 0 for count in cheap.lengths], device=self.texts.device)
        width = max(cheap.token_ids.shape[1], second.token_ids.shape[1])
        drafts = cheap.token_ids, second.token_ids
        wide = (F.pad(ids, (0, width - ids.shape[1])) for ids in drafts)
        ids = torch.where(drafted[:, None], *wide)
        self.texts.propose_all(ids)
        counts = [max(pair) for pair in zip(cheap.lengths, second.lengths, strict=True)]
        if second.probs is None:
            return Draft(ids, counts, None)
        # certain tokens become one-hot rows, as the other rows of the batch have probabilities
        probs = F.pad(second.probs, (0, 0, 0, width - second.probs.shape[1]))
        certain = torch.zeros_like(probs).scatter_(-1, ids[..., None], 1.0)
        beyond = torch.arange(width, device=ids.device) >= second.token_ids.shape[1]
        probs = torch.where((drafted[:, None] | beyond)[..., None], certain, probs)
        return Draft(ids, counts, probs)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows in both."""
        self.first.keep(rows)
        self.second.keep(rows)

    def settle(self) -> None:
        """Update both."""
        self.first.settle()
        self.second.settle()
