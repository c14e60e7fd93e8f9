"""Up to which length of a text forward passes over a cache equal those without one."""

import sys
from collections.abc import Iterator
from typing import Any

from cactus_theory.decoding.models.cache import text_config


def check_reach(model: Any, capacity: int) -> None:
    """Raise if the library's own parts treat a text of ``capacity`` positions differently.

    Raises
    ------
    ValueError
        A rotary table that changes once a text outgrows its original length, while the cached
        keys keep the old one; a sliding window that the library's caches apply and the model's
        forward pass does not.
    """
    name = type(model).__name__
    for most in _rotary_lengths(text_config(model)):
        if capacity > most:
            raise ValueError(
                f"model: prompt and new tokens of {name} must stay within {most} positions, "
                f"where its rotary table changes under cached keys; got {capacity}"
            )
    window = getattr(text_config(model), "sliding_window", None)
    if isinstance(window, int) and capacity > window and not _applies_windows(model):
        raise ValueError(
            f"model: prompt and new tokens of {name} must stay within its sliding window of "
            f"{window}, which its forward pass does not apply; got {capacity}"
        )


def _rotary_lengths(config: Any) -> Iterator[int]:
    given = getattr(config, "rope_parameters", None) or {}
    for one in (given, *(own for own in given.values() if isinstance(own, dict))):
        if one.get("rope_type") == "longrope":
            yield one.get("original_max_position_embeddings") or config.max_position_embeddings


def _applies_windows(model: Any) -> bool:
    """Return whether the file of a library model makes masks with windows; others may."""
    module = type(model).__module__
    return not module.startswith("transformers.") or hasattr(
        sys.modules[module], "create_sliding_window_causal_mask"
    )
