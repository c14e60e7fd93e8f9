"""Refuse versions of vLLM whose functions are not the ones this package was written against.

What is replaced are functions that vLLM does not promise to keep. So nothing goes by version
numbers alone: before anything is replaced, names of parameters and fields are compared with
those that are relied on, and a mismatch stops the start-up with one line.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

# run in an engine here; the first eight parameters were read in 0.18.0, 0.22.0, 0.27.0 and 0.33.0
TESTED = ("0.32.0",)


class UnknownVersion(RuntimeError):
    """A version of vLLM that this package was not written against."""


def installed() -> str:
    """Return the version of vLLM, ``not installed`` if there is none."""
    try:
        import vllm  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        return "not installed"
    return str(getattr(vllm, "__version__", "unknown"))


def unknown(found: str, tested: Sequence[str] = TESTED) -> UnknownVersion:
    """Return the one-line refusal."""
    return UnknownVersion(
        f"vllm {installed()}: {found}; cactus-theory was tested with vllm {', '.join(tested)}. "
        "Install one of these, or unset CACTUS_POLICY"
    )


def require_parameters(
    function: Callable[..., Any],
    names: Sequence[str],
    where: str,
    tested: Sequence[str] = TESTED,
) -> None:
    """Raise UnknownVersion unless the first parameters of a function have these names."""
    found = tuple(inspect.signature(function).parameters)[: len(names)]
    if found != tuple(names):
        raise unknown(f"{where} takes ({', '.join(found)}), not ({', '.join(names)})", tested)


def require_names(
    thing: Any, names: Sequence[str], where: str, tested: Sequence[str] = TESTED
) -> None:
    """Raise UnknownVersion unless a module, class or dataclass has these names."""
    own = {field.name for field in fields(thing)} if is_dataclass(thing) else set()
    missing = [name for name in names if name not in own and not hasattr(thing, name)]
    if missing:
        raise unknown(f"{where} has no {', '.join(missing)}", tested)
