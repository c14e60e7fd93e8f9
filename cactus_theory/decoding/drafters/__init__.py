"""Drafters: a model, heads on the target's states, the text's own past, or one after another."""

from typing import Any

from cactus_theory.decoding.drafters._base import Drafter, Drafting, Features, Proposal, Setting
from cactus_theory.decoding.drafters._heads import HeadShape
from cactus_theory.decoding.drafters.block import BlockDrafter, BlockHead
from cactus_theory.decoding.drafters.cascade import Cascade
from cactus_theory.decoding.drafters.early_exit import EarlyExit
from cactus_theory.decoding.drafters.likeliest import LikeliestTree
from cactus_theory.decoding.drafters.model import ModelDrafter
from cactus_theory.decoding.drafters.ngram import NGram
from cactus_theory.decoding.drafters.recurrent import RecurrentDrafter, RecurrentHead
from cactus_theory.decoding.drafters.siblings import Siblings
from cactus_theory.decoding.drafters.stop import DraftStop

__all__ = [
    "BlockDrafter",
    "BlockHead",
    "Cascade",
    "DraftStop",
    "Drafter",
    "Drafting",
    "EarlyExit",
    "Features",
    "HeadShape",
    "LikeliestTree",
    "ModelDrafter",
    "NGram",
    "Proposal",
    "RecurrentDrafter",
    "RecurrentHead",
    "Setting",
    "Siblings",
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
