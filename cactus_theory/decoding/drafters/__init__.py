"""Drafters: a model, the text's own past, the target's first layers, or one after another."""

from typing import Any

from cactus_theory.decoding.drafters._base import Drafter, Drafting, Features, Proposal, Setting
from cactus_theory.decoding.drafters.cascade import Cascade
from cactus_theory.decoding.drafters.early_exit import EarlyExit
from cactus_theory.decoding.drafters.model import ModelDrafter
from cactus_theory.decoding.drafters.ngram import NGram
from cactus_theory.decoding.drafters.stop import DraftStop

__all__ = [
    "Cascade",
    "DraftStop",
    "Drafter",
    "Drafting",
    "EarlyExit",
    "Features",
    "ModelDrafter",
    "NGram",
    "Proposal",
    "Setting",
    "as_drafter",
]


def as_drafter(draft_model: Any) -> Drafter:
    """Return a drafter for a drafter or a causal LM, or raise TypeError."""
    if isinstance(draft_model, Drafter):
        return draft_model
    if hasattr(draft_model, "forward") and hasattr(draft_model, "config"):
        return ModelDrafter(draft_model)
    raise TypeError(
        f"draft_model: must be a causal LM or a Drafter; got {type(draft_model).__name__}"
    )
