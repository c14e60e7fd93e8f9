"""Replace functions of vLLM after checking their names and parameters.

Used by :mod:`cactus_theory.vllm.install`. A difference from the expected names is reported in one
line.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

# version whose engine was run with this package, on a CPU; error messages recommend it
TESTED = "0.32.0"


class UnknownVersion(RuntimeError):
    """A version of vLLM whose functions differ from those that this package replaces."""


def vllm_version() -> str:
    """Return the installed version of vLLM, or ``not installed``."""
    try:
        import vllm  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        return "not installed"
    return str(getattr(vllm, "__version__", "unknown"))


def served_name(config: Any) -> str:
    """Return the name under which vLLM serves a model, the label ``model_name``."""
    return str(config.model_config.served_model_name)


def unknown_version(difference: str) -> UnknownVersion:
    """Return an error of one line that names the difference and the tested version."""
    return UnknownVersion(
        f"vllm {vllm_version()}: {difference}; cactus-theory was tested with vllm {TESTED}. "
        f"Try: pip install 'cactus-theory[vllm]' vllm=={TESTED}; or unset CACTUS_POLICY"
    )


def require_parameters(function: Callable[..., Any], names: Sequence[str]) -> None:
    """Raise UnknownVersion unless the first parameters of a function have these names."""
    parameters = tuple(inspect.signature(function).parameters)[: len(names)]
    if parameters != tuple(names):
        raise unknown_version(
            f"{_name(function)} takes ({', '.join(parameters)}), not ({', '.join(names)})"
        )


def require_names(thing: Any, *names: str) -> None:
    """Raise UnknownVersion unless a module, class or dataclass has these names."""
    field_names = {field.name for field in fields(thing)} if is_dataclass(thing) else set()
    if missing := [name for name in names if name not in field_names and not hasattr(thing, name)]:
        raise unknown_version(f"{_name(thing)} has no {', '.join(missing)}")


def _name(thing: Any) -> str:
    return getattr(thing, "__qualname__", None) or getattr(thing, "__name__", type(thing).__name__)


def stop(line: str) -> None:
    """End the process with one line; vLLM would log other errors, or show them with a traceback."""
    raise SystemExit(f"cactus-theory: {line}")


def wrapped(thing: Any, name: str) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that replaces a function of a module or class.

    The decorated function gets the original function as its first argument.
    """
    original = getattr(thing, name)

    def put(function: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        setattr(thing, name, replacement)
        return replacement

    return put
