"""Tell models and drafters apart without keeping where they came from."""

import hashlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from cactus_theory.decoding.drafters import Drafter, as_drafter

# entries of every weight that are compared: other weights of the same shape differ in them
ENTRIES = 8


def name_of(thing: Any) -> str:
    """Return the name of a model's folder, without where it lies, or that of its class.

    Of a drafter with a model it is the model's.
    """
    model = getattr(thing, "model", thing) if isinstance(thing, Drafter) else thing
    folder = Path(str(getattr(model, "name_or_path", "") or "")).name
    return folder or type(model).__name__


def identity(thing: Any) -> str:
    """Return a text that differs for another model, another drafter or other options."""
    if hasattr(thing, "state_dict"):
        return _weights(thing)
    if is_dataclass(thing) and not isinstance(thing, type):
        options = (
            f"{field.name}={identity(getattr(thing, field.name))}" for field in fields(thing)
        )
        return f"{type(thing).__name__}({', '.join(options)})"
    if isinstance(thing, list | tuple):
        return f"({', '.join(map(identity, thing))})"
    if isinstance(thing, int | float | str | bool) or thing is None:
        return repr(thing)
    return type(thing).__name__


def check_weights(name: str, known: Mapping[str, Any], target_model: Any, draft_model: Any) -> None:
    """Raise unless both are those that ``target_weights`` and ``draft_weights`` tell.

    Raises
    ------
    ValueError
        Another model; ``name`` is of what was made with those.
    """
    drafter = as_drafter(draft_model)
    for part, thing in (("target", target_model), ("draft", drafter)):
        wanted, found = known.get(f"{part}_weights"), identity(thing)
        if wanted is not None and wanted != found:
            given = f"{name_of(thing)}, weights {found}"
            raise ValueError(
                f"{name}: was made for another {part} ({wanted}); got {given}. "
                "Are target and draft swapped?"
            )


def _weights(model: Any) -> str:
    held = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        first = weight.flatten()[:ENTRIES].double().cpu().tolist()
        held.update(f"{name} {tuple(weight.shape)} {weight.dtype} {first}\n".encode())
    return f"{type(model).__name__}:{held.hexdigest()[:16]}"
