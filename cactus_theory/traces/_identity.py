"""Tell models and drafters apart without keeping where they came from."""

import hashlib
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

# entries of every weight that are compared: other weights of the same shape differ in them
ENTRIES = 8


def name_of(thing: Any) -> str:
    """Return the name of a model's folder, without where it lies, or that of its class."""
    model = getattr(thing, "model", thing)
    folder = Path(str(getattr(model, "name_or_path", "") or "")).name
    return folder or type(thing).__name__


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


def _weights(model: Any) -> str:
    held = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        first = weight.flatten()[:ENTRIES].double().cpu().tolist()
        held.update(f"{name} {tuple(weight.shape)} {weight.dtype} {first}\n".encode())
    return f"{type(model).__name__}:{held.hexdigest()[:16]}"
