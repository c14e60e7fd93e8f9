"""Drafters: a model, heads on the target's states, the text's own past."""

from pathlib import Path
from typing import Any

from cactus_theory.decoding.drafters._base import Drafter, Drafting, Setting
from cactus_theory.decoding.drafters._heads import described, is_head
from cactus_theory.decoding.drafters.block import BlockDrafter
from cactus_theory.decoding.drafters.early_exit import EarlyExit
from cactus_theory.decoding.drafters.model import ModelDrafter
from cactus_theory.decoding.drafters.ngram import NGram
from cactus_theory.decoding.drafters.recurrent import RecurrentDrafter
from cactus_theory.decoding.drafters.siblings import Siblings

__all__ = [
    "BlockDrafter",
    "Drafter",
    "Drafting",
    "EarlyExit",
    "ModelDrafter",
    "NGram",
    "RecurrentDrafter",
    "Setting",
    "Siblings",
    "load",
]

HEADS = {"block": BlockDrafter, "recurrent": RecurrentDrafter}


def load(folder: str | Path) -> BlockDrafter | RecurrentDrafter:
    """Return a drafter with the head in a folder, of the kind that its ``head.json`` names.

    Raises
    ------
    ValueError
        A folder without a head, a kind that is not known, weights that do not fit.
    """
    try:
        kind = described(folder)["kind"] if is_head(folder) else None
    except (ValueError, KeyError, TypeError, OSError):
        kind = None
    if kind not in HEADS:
        raise ValueError(
            f"folder: must hold a head.json of kind {' or '.join(HEADS)}; got {kind!r} in "
            f"{str(folder)!r}"
        )
    return HEADS[kind].load(folder)


def as_drafter(draft_model: Any) -> Drafter:
    """Return a drafter for a drafter, a causal LM or the folder of a head, or raise TypeError."""
    if isinstance(draft_model, Drafter):
        return draft_model
    if isinstance(draft_model, str | Path):
        if not is_head(draft_model):
            raise ValueError(f"draft_model: must be a head's folder; got {str(draft_model)!r}")
        return load(draft_model)
    if hasattr(draft_model, "forward") and hasattr(draft_model, "config"):
        return ModelDrafter(draft_model)
    raise TypeError(
        "draft_model: must be a causal LM, a Drafter or the folder of a head; "
        f"got {type(draft_model).__name__}"
    )
