"""What a server was asked for in its environment, and what one request may change.

======================  ===================================================================
``CACTUS_POLICY``       spec of the policy, such as ``band:price=2.0``; unset or empty: the
                        server is left as it is
``CACTUS_VERIFIER``     ``chain`` (default) or ``block``
``CACTUS_DIVERGENCE``   what the meter reads, such as ``kl`` (default) or ``renyi:a=2``
``CACTUS_METER``        ``off``, or n: one verified row in n is measured, chosen at random
                        (default 16; 1: all of them)
======================  ===================================================================

A request may choose its own policy in ``SamplingParams.extra_args`` (over HTTP: ``vllm_xargs``):
``{"cactus": "band:price=1"}``, ``{"cactus": {"policy": "band", "price": 1}}``, or knobs of the
server's policy alone, ``{"cactus": {"price": 1}}`` or ``{"cactus": "price=1"}``. It cannot name
files: neither a policy in a file nor a knob that is read from one. Nothing here imports torch
before a policy is asked for.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cactus_theory.divergences import Divergence
    from cactus_theory.policies import Policy
    from cactus_theory.verify import Verifier

POLICY, VERIFIER = "CACTUS_POLICY", "CACTUS_VERIFIER"
DIVERGENCE, METER = "CACTUS_DIVERGENCE", "CACTUS_METER"
ARGUMENT = "cactus"  # the key of ``extra_args``
MEASURED = 16  # measuring a row of a large vocabulary costs as much as verifying a whole batch
# knobs that name files of the server
SERVER_ONLY = ("values",)


@dataclass(frozen=True)
class Settings:
    """What a server was asked for.

    Attributes
    ----------
    policy : of every request that does not choose its own.
    verifier, divergence : as registered.
    meter : one verified row in so many is measured; 0: none.
    """

    policy: "Policy"
    verifier: "Verifier"
    divergence: "Divergence"
    meter: int = MEASURED


def asked(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a policy was asked for."""
    return bool(environ.get(POLICY, "").strip())


def read(environ: Mapping[str, str] = os.environ) -> Settings | None:
    """Return what the environment asks for, None if it does not ask for a policy.

    Raises
    ------
    ValueError
        One line: the variable, what it must be (every valid name), and its value.
    """
    if not asked(environ):
        return None
    from cactus_theory.divergences import divergence
    from cactus_theory.policies import policy

    found = _named(POLICY, policy, environ[POLICY].strip())
    verifier = _named(VERIFIER, _chain_or_block, environ.get(VERIFIER, "").strip() or "chain")
    _named(VERIFIER, verifier.check, found)
    wanted = environ.get(DIVERGENCE, "").strip() or "kl"
    return Settings(found, verifier, _named(DIVERGENCE, divergence, wanted), _meter(environ))


def of_request(settings: Settings, extra_args: Mapping[str, Any] | None) -> "Policy":
    """Return the policy of one request.

    Raises
    ------
    ValueError
        One line: anything but a spec or knobs, an unknown name or knob, a value outside its
        range, a file, a policy that the server's verifier cannot follow.
    """
    given = (extra_args or {}).get(ARGUMENT)
    if given is None:
        return settings.policy
    found = _named(f"extra_args[{ARGUMENT!r}]", _requested, settings.policy, given)
    _named(f"extra_args[{ARGUMENT!r}]", settings.verifier.check, found)
    return found


def _requested(default: "Policy", given: Any) -> "Policy":
    from cactus_theory.policies import policy
    from cactus_theory.policies._file import names_a_file

    spec, knobs = _spec_and_knobs(given)
    if spec is not None and names_a_file(spec):
        raise ValueError(f"policy: must be a registered name, not a file; got {spec!r}")
    forbidden = [knob for knob in SERVER_ONLY if knob in knobs or (spec and f"{knob}=" in spec)]
    if forbidden:
        raise ValueError(f"{forbidden[0]}: is set by the server alone; got {given!r}")
    return policy(default if spec is None else spec, **knobs)


def _spec_and_knobs(given: Any) -> tuple[str | None, dict[str, Any]]:
    """Return the spec (None: the server's policy) and the knobs beside it."""
    from cactus_theory._arguments import parse_spec

    if isinstance(given, str):
        if "=" in given.partition(":")[0]:
            return None, dict(parse_spec(f":{given}")[1])
        return given, {}
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise ValueError(f'must be a spec or knobs, such as {{"price": 2.0}}; got {given!r}')
    knobs = dict(given)
    spec = knobs.pop("policy", None)
    if spec is not None and not isinstance(spec, str):
        raise ValueError(f"policy: must be a spec string; got {spec!r}")
    return spec, knobs


def _chain_or_block(name: str) -> "Verifier":
    from cactus_theory._arguments import one_of
    from cactus_theory.verify import find_verifier

    return find_verifier(one_of("verifier", name, ("chain", "block")))


def _meter(environ: Mapping[str, str]) -> int:
    given = environ.get(METER, "").strip()
    if given.lower() in ("off", "0"):
        return 0
    if given and not (given.isascii() and given.isdigit()):
        raise ValueError(f"{METER}: must be off or a whole number; got {given!r}")
    return int(given) if given else MEASURED


def _named(name: str, function: Any, *given: Any) -> Any:
    """Call a function, and name the setting in what it raises for it."""
    try:
        return function(*given)
    except (ValueError, TypeError, OSError) as error:
        said = " ".join(str(error).split())  # one line
        raise ValueError(f"{name}: {said}") from None
