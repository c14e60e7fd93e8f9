"""Drafters: a smaller model, an EAGLE-3 head, n-grams of the text, the target's own weights."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from cactus_theory.base.names import DRAFTERS
from cactus_theory.base.specs import parse_knobs
from cactus_theory.decoding.drafters.eagle3 import Eagle3Drafter as Eagle3Drafter
from cactus_theory.decoding.drafters.eagle3_head import holds_head
from cactus_theory.decoding.drafters.interface import DraftContext, Drafting
from cactus_theory.decoding.drafters.interface import Drafter as Drafter
from cactus_theory.decoding.drafters.model import ModelDrafter as ModelDrafter
from cactus_theory.decoding.drafters.ngram import NGram as NGram
from cactus_theory.decoding.drafters.own_weights import EarlyExit as EarlyExit
from cactus_theory.decoding.drafters.own_weights import FourBit as FourBit
from cactus_theory.decoding.drafters.own_weights import SkipLayers as SkipLayers
from cactus_theory.decoding.drafters.siblings import Siblings as Siblings

__all__ = ["DraftContext", "Drafting"]


# names that take a number of layers → their drafter, and a number for the error's example
OF_LAYERS = {"exit": (EarlyExit, 20), "skip": (SkipLayers, 3)}


def as_drafter(draft_model: Any) -> Drafter:
    """Return a Drafter from a drafter, a causal LM, a name or the folder of a head."""
    if isinstance(draft_model, Drafter):
        return draft_model
    if isinstance(draft_model, str | Path):
        if (named := named_drafter(draft_model)) is not None:
            return named
        if not holds_head(draft_model):
            raise ValueError(
                f"draft_model: must be one of {DRAFTERS}, or a head's folder (read_drafter loads "
                f"models); got {str(draft_model)!r}"
            )
        return Eagle3Drafter.load(draft_model)
    if hasattr(draft_model, "forward") and hasattr(draft_model, "config"):
        return ModelDrafter(draft_model)
    raise TypeError(
        "draft_model: must be a causal LM, a Drafter or the folder of a head; "
        f"got {type(draft_model).__name__}"
    )


def drafter_by(mode: str, draft_model: Any) -> Drafter:
    """Return a drafter that samples, or with mode ``greedy`` takes the likeliest tokens.

    Drafters without this choice, such as NGram, are returned unchanged.
    """
    drafter: Any = as_drafter(draft_model)
    return replace(drafter, greedy=mode == "greedy") if hasattr(drafter, "greedy") else drafter


def named_drafter(name: str | Path) -> Drafter | None:
    """Return the drafter of a name that needs no files, such as ``exit:20``; None for other names.

    ValueError for ``exit`` and ``skip`` without a number of layers, and for unknown knobs.
    """
    kind, _, rest = str(name).partition(":")
    if kind in OF_LAYERS:
        drafter, example = OF_LAYERS[kind]
        if not rest.isdecimal():
            rule = f"must say how many layers, as {kind}:{example}"
            raise ValueError(f"draft: {rule}; got {str(name)!r}")
        return drafter(int(rest))
    if str(name) == "4bit":
        return FourBit()
    if kind != "ngram":
        return None
    knobs, known = parse_knobs(rest, str(name)), [field.name for field in fields(NGram)]
    for knob, value in knobs.items():
        if knob not in known or not value.isdecimal():
            whole = f"ngram takes whole numbers for {' and '.join(known)}"
            raise ValueError(f"draft: {whole}; got {knob}={value} in {str(name)!r}")
    return NGram(**{knob: int(value) for knob, value in knobs.items()})
