"""Drafters: a model, a head on the target's states, the text's own past."""

from pathlib import Path
from typing import Any

from cactus_theory.decoding.drafters._base import DraftContext, Drafting
from cactus_theory.decoding.drafters._base import Drafter as Drafter
from cactus_theory.decoding.drafters.early_exit import EarlyExit as EarlyExit
from cactus_theory.decoding.drafters.model import ModelDrafter as ModelDrafter
from cactus_theory.decoding.drafters.ngram import NGram as NGram
from cactus_theory.decoding.drafters.recurrent import RecurrentDrafter as RecurrentDrafter
from cactus_theory.decoding.drafters.recurrent_head import is_head
from cactus_theory.decoding.drafters.siblings import Siblings as Siblings

__all__ = ["DraftContext", "Drafting"]


def as_drafter(draft_model: Any) -> Drafter:
    """Return a drafter for a drafter, a causal LM or the folder of a head, or raise TypeError."""
    if isinstance(draft_model, Drafter):
        return draft_model
    if isinstance(draft_model, str | Path):
        if not is_head(draft_model):
            raise ValueError(f"draft_model: must be a head's folder; got {str(draft_model)!r}")
        return RecurrentDrafter.load(draft_model)
    if hasattr(draft_model, "forward") and hasattr(draft_model, "config"):
        return ModelDrafter(draft_model)
    raise TypeError(
        "draft_model: must be a causal LM, a Drafter or the folder of a head; "
        f"got {type(draft_model).__name__}"
    )
