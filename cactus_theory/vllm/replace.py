"""Replace functions of vLLM once their names and parameters are compared, or say why not."""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

# run in an engine, on a CPU
TESTED = "0.32.0"


class UnknownVersion(RuntimeError):
    """A version of vLLM that this package was not written against."""


def vllm_version() -> str:
    """Return the version of vLLM, ``not installed`` if there is none."""
    try:
        import vllm  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        return "not installed"
    return str(getattr(vllm, "__version__", "unknown"))


def served_name(config: Any) -> str:
    """Return the name that vLLM serves a model by, its label ``model_name``."""
    return str(config.model_config.served_model_name)


def unknown_version(difference: str) -> UnknownVersion:
    """Return the one-line refusal."""
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
    """End the process with one line; other errors of a plugin are logged or end in a traceback."""
    raise SystemExit(f"cactus-theory: {line}")


def wrapped(thing: Any, name: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorate what replaces a function of a module or class: it gets the original first."""
    original = getattr(thing, name)

    def put(function: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        setattr(thing, name, replacement)
        return replacement

    return put
