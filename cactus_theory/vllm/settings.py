"""What a server was asked for in its environment, and what one request may change.

======================  ===================================================================
``CACTUS_POLICY``       spec of the policy, such as ``band:price=2.0``; unset or empty: the
                        server is left as it is
``CACTUS_VERIFIER``     ``chain`` (default) or ``block``
``CACTUS_DIVERGENCE``   what the meter reads, such as ``kl`` (default) or ``renyi:a=2``
``CACTUS_METER``        ``off``, or n: one verified row in n is measured, chosen at random
                        (default 16; 1: all of them)
``CACTUS_REQUESTS``     what a request may ask for: ``stricter`` (default), ``any``, ``off``
``CACTUS_CAP``          nats of KL that an answer may spend per token, at every length it may
                        end at; ``inf``: only where its request sets one
``CACTUS_READINGS``     ``log``, or a file: a line of each request's own numbers at its end
                        (see :mod:`cactus_theory.vllm.requests`); every row is measured
``CACTUS_MARGIN``       of the logits processor alone: see :mod:`cactus_theory.vllm.certain`
======================  ===================================================================

Another variable that begins with ``CACTUS_`` stops the start, whether a policy is set or not: it is
a setting that nobody would read. Those of the project's tests (``CACTUS_THEORY_…``) and the ones
that Kubernetes makes of a service named cactus are left alone.

A request may choose its own policy in ``SamplingParams.extra_args`` (over HTTP: ``vllm_xargs``):
``{"cactus": "band:price=4"}``, ``{"cactus": {"policy": "band", "price": 4}}``, or knobs of the
server's policy alone, ``{"cactus": {"price": 4}}`` or ``{"cactus": "price=4"}``, and lower its
cap, ``{"cactus_cap": 0.01}``; see :mod:`cactus_theory.vllm.admission` for what is
admitted. Nothing here imports torch before a policy is asked for.

:func:`require_parameters` and :func:`require_names` compare what is relied on in vLLM with what
there is; :func:`stop` ends the start of a server with one line.
"""

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cactus_theory.divergences import Divergence
    from cactus_theory.policies import Policy
    from cactus_theory.verify import Verifier

POLICY, VERIFIER = "CACTUS_POLICY", "CACTUS_VERIFIER"
DIVERGENCE, METER = "CACTUS_DIVERGENCE", "CACTUS_METER"
REQUESTS, CAP, READINGS = "CACTUS_REQUESTS", "CACTUS_CAP", "CACTUS_READINGS"
MARGIN = "CACTUS_MARGIN"
NAMES = (POLICY, VERIFIER, DIVERGENCE, METER, REQUESTS, CAP, READINGS, MARGIN)
PREFIX = "CACTUS_"
OF_OTHERS = re.compile(r"CACTUS_(THEORY_.*|(\w+_)?(SERVICE_HOST|SERVICE_PORT|PORT)(_\w+)?)")
ARGUMENT, CAP_ARGUMENT = "cactus", "cactus_cap"  # keys of ``extra_args``
MODES = ("stricter", "any", "off")
LOG = "log"
MEASURED = 16  # measuring a row of a large vocabulary costs as much as verifying a whole batch
LONGEST_LINE = 1000  # characters of a refusal
# run in an engine here; the first eight parameters were read in 0.18.0, 0.22.0, 0.27.0 and 0.33.0
TESTED = ("0.32.0",)


@dataclass(frozen=True)
class Settings:
    """What a server was asked for."""

    policy: "Policy"  # of every request that does not choose its own
    verifier: "Verifier"
    divergence: "Divergence"
    meter: int = MEASURED  # one verified row in so many is measured; 0: none
    requests: str = MODES[0]
    cap: float | None = None  # nats a token of an answer; inf: only where a request sets one
    readings: str = ""  # ``log`` or a file for the numbers of single requests


def is_set(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a policy was asked for."""
    return bool(environ.get(POLICY, "").strip())


def check_names(environ: Mapping[str, str] = os.environ) -> None:
    """Raise ValueError for a variable whose name nobody reads, such as ``CACTUS_VERIFER``."""
    for name in environ:
        begins = name.upper().startswith(PREFIX)
        if begins and name not in NAMES and not OF_OTHERS.fullmatch(name):
            raise ValueError(f"{name}: must be one of {', '.join(NAMES)}")


def read(environ: Mapping[str, str] = os.environ) -> Settings | None:
    """Return what the environment asks for, None if it does not ask for a policy.

    ValueError, in one line: the variable, what it must be (every valid name), and its value.
    """
    check_names(environ)
    if not is_set(environ):
        return None
    from cactus_theory.divergences import divergence
    from cactus_theory.policies import policy

    rule = named(POLICY, policy, environ[POLICY].strip())
    verifier = named(VERIFIER, _chain_or_block, environ.get(VERIFIER, "").strip() or "chain")
    named(VERIFIER, verifier.check, rule)
    divergence_spec = environ.get(DIVERGENCE, "").strip() or "kl"
    readings = _readings(environ)
    return Settings(
        rule, verifier, named(DIVERGENCE, divergence, divergence_spec), _meter(environ, readings),
        requests_of(environ), _cap(environ, rule), readings,
    )  # fmt: skip


def requests_of(environ: Mapping[str, str]) -> str:
    """Return what a request may ask for; ValueError for another word."""
    from cactus_theory.base.arguments import one_of

    return one_of(REQUESTS, environ.get(REQUESTS, "").strip() or MODES[0], MODES)


def _chain_or_block(name: str) -> "Verifier":
    from cactus_theory.base.arguments import one_of
    from cactus_theory.verify import find_verifier

    return find_verifier(one_of("verifier", name, ("chain", "block")))


def _meter(environ: Mapping[str, str], readings: str) -> int:
    text = environ.get(METER, "").strip()
    if readings:
        if text not in ("", "1"):
            raise ValueError(f"{METER}: must be 1 or unset beside {READINGS}; got {text!r}")
        return 1
    if text.lower() in ("off", "0"):
        return 0
    if text and not (text.isascii() and text.isdigit()):
        raise ValueError(f"{METER}: must be off or a whole number; got {text!r}")
    return int(text) if text else MEASURED


def _cap(environ: Mapping[str, str], rule: "Policy") -> float | None:
    from cactus_theory.base.arguments import number
    from cactus_theory.decoding.ledger import Ledger

    text = environ.get(CAP, "").strip()
    if not text:
        return None
    cap = number(CAP, text, 0)
    named(CAP, Ledger, rule, min(cap, 1.0))  # a policy that a ledger cannot follow stops here
    return cap


def _readings(environ: Mapping[str, str]) -> str:
    text = environ.get(READINGS, "").strip()
    if text and text != LOG:
        named(READINGS, Path(text).open, "a").close()
    return text


def named(name: str, function: Any, *arguments: Any) -> Any:
    """Call a function, and name the setting in what it raises for it, in one short line."""
    try:
        return function(*arguments)
    except (ValueError, TypeError, OSError, ArithmeticError) as error:
        message = " ".join(str(error).split())
        raise ValueError(f"{name}: {message[:LONGEST_LINE]}") from None


class UnknownVersion(RuntimeError):
    """A version of vLLM that this package was not written against."""


def vllm_version() -> str:
    """Return the version of vLLM, ``not installed`` if there is none."""
    try:
        import vllm  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        return "not installed"
    return str(getattr(vllm, "__version__", "unknown"))


def unknown_version(difference: str, tested: Sequence[str] = TESTED) -> UnknownVersion:
    """Return the one-line refusal."""
    return UnknownVersion(
        f"vllm {vllm_version()}: {difference}; "
        f"cactus-theory was tested with vllm {', '.join(tested)}. "
        "Install one of these, or unset CACTUS_POLICY"
    )


def require_parameters(
    function: Callable[..., Any],
    names: Sequence[str],
    where: str,
    tested: Sequence[str] = TESTED,
) -> None:
    """Raise UnknownVersion unless the first parameters of a function have these names."""
    parameters = tuple(inspect.signature(function).parameters)[: len(names)]
    if parameters != tuple(names):
        raise unknown_version(
            f"{where} takes ({', '.join(parameters)}), not ({', '.join(names)})", tested
        )


def require_names(
    thing: Any, names: Sequence[str], where: str, tested: Sequence[str] = TESTED
) -> None:
    """Raise UnknownVersion unless a module, class or dataclass has these names."""
    field_names = {field.name for field in fields(thing)} if is_dataclass(thing) else set()
    missing = [name for name in names if name not in field_names and not hasattr(thing, name)]
    if missing:
        raise unknown_version(f"{where} has no {', '.join(missing)}", tested)


def stop(line: str) -> None:
    """End the process with one line: what a plugin raises besides is logged, or a traceback."""
    raise SystemExit(f"cactus-theory: {line}")
