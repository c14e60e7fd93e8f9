"""Read a server's settings from its environment, and check what a request may change.

SERVING.md has a table of the variables. The server does not start with a ``CACTUS_`` variable that
would have no effect: a misspelt name, or any setting without ``CACTUS_POLICY``. Names of this
project's tests (``CACTUS_THEORY_…``) and those that Kubernetes makes for a service called cactus
are ignored.

Requests are not trusted. In ``SamplingParams.extra_args`` (over HTTP: ``vllm_xargs``) a request may
pick a policy by a name that the server offers, as ``{"cactus": "gentle"}``, or the lossless
``speculative``; and a request may lower the cap of its answer, as ``{"cactus_cap": 0.01}``. Names
are only compared with the names on offer: no text of a request is parsed as a spec or opened as a
file. Error messages repeat a short part of the text, in one line.

This module imports torch only once a policy is set.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from cactus_theory.policies import Policy
    from cactus_theory.verify import Verifier

POLICY, POLICIES, VERIFIER = "CACTUS_POLICY", "CACTUS_POLICIES", "CACTUS_VERIFIER"
METER, CAP, READINGS = "CACTUS_METER", "CACTUS_CAP", "CACTUS_READINGS"
NAMES = (POLICY, POLICIES, VERIFIER, METER, CAP, READINGS)
OF_OTHERS = re.compile(r"CACTUS_(THEORY_.*|(\w+_)?(SERVICE_HOST|SERVICE_PORT|PORT)(_\w+)?)")
KEYS = ARGUMENT, CAP_ARGUMENT = "cactus", "cactus_cap"  # of ``extra_args``
SPECULATIVE = "speculative"  # the lossless policy, which every request may pick
OFFERED = re.compile(r"\s*([A-Za-z0-9_.-]{1,40})\s*=\s*(\S.*?)\s*", flags=re.S)
LOG = "log"
MOST_CAP = 1e6  # largest cap of a request, in nats a token
# highest temperature: rows are uniform long before; a temperature beyond float32 would turn the −∞
# of a masked token into −∞/∞, which is NaN
HOTTEST = 1e6
MEASURED = 16  # one verified row in 16 is measured: a large row takes as long as verifying a batch
LONGEST_LINE = 1000  # most characters of an error message
SHOWN = 60  # most characters of a request's value that an error message repeats


class Grant(NamedTuple):
    """The policy and the cap with which a request is served."""

    policy: "Policy"
    cap: float | None = None  # nats per token of the answer, in the policy's unit


@dataclass(frozen=True)
class Settings:
    """The settings of a server."""

    policy: "Policy"  # of every request that names no policy
    policies: Mapping[str, "Policy"]  # the policies that a request may name, by name
    verifier: "Verifier"
    meter: int = MEASURED  # one verified row in ``meter`` is measured; 0: no row
    cap: float | None = None  # nats per token of an answer; inf: only requests set caps
    readings: str = ""  # ``log``, or a file, for the numbers of single requests

    @property
    def lossless(self) -> "Policy":
        """Return the lossless policy."""
        return self.policies[SPECULATIVE]

    def grant(self, sampling_params: Any) -> Grant:
        """Return the policy and the cap of a request.

        Raises ValueError, in one line, for a request that the server does not allow.
        """
        extra = getattr(sampling_params, "extra_args", None)
        asked = {} if extra is None else extra
        if not isinstance(asked, Mapping):
            raise ValueError(f"extra_args: must be a mapping; got {shown(asked)}")
        for key in asked:
            if isinstance(key, str) and key not in KEYS and key.lower().startswith(ARGUMENT):
                raise ValueError(
                    f"extra_args (over HTTP vllm_xargs): must be one of {', '.join(KEYS)}; "
                    f"got {shown(key)}"
                )
        heat = getattr(sampling_params, "temperature", None)
        if heat is not None and not heat <= HOTTEST:
            raise ValueError(
                f"temperature: must be at most {HOTTEST:g} with a policy of cactus-theory; "
                f"got {shown(heat)}"
            )
        name, cap = asked.get(ARGUMENT), self._cap_of(asked.get(CAP_ARGUMENT))
        if name is None:
            return Grant(self.policy, cap)
        if not isinstance(name, str) or name not in self.policies:
            raise ValueError(
                f"extra_args[{ARGUMENT!r}]: must be one of {', '.join(self.policies)}, as this "
                f"server offers them; got {shown(name)}"
            )
        return Grant(self.policies[name], cap)

    def served(self, sampling_params: Any, warn: Callable[[str], None]) -> Grant:
        """Return the policy and the cap to use for a request.

        Called while a step of the engine runs, so nothing is raised. The policy is lossless in two
        cases: the request is not allowed but was not rejected when it was submitted, or it has a
        regret policy and a temperature above 0. ``warn`` gets the reason.
        """
        from cactus_theory.divergences.regret import REGRET

        try:
            policy, cap = self.grant(sampling_params)
        except ValueError as error:
            warn(f"{error}; the request is served without loss")
            return Grant(self.lossless)
        greedy = getattr(sampling_params, "temperature", None) == 0
        if policy.unit == REGRET and not greedy:
            warn(f"{policy.spec} is for temperature 0; requests above it are judged without loss")
            return Grant(self.lossless, cap)
        if greedy and policy.unit != REGRET and policy != self.lossless:
            warn(
                f"{policy.spec} relaxes nothing at temperature 0, where vLLM decides; "
                "regret:price=20 does, by 20 tokens a nat of regret"
            )
        return Grant(policy, cap)

    def _cap_of(self, value: Any) -> float | None:
        """Return a request's cap in nats per token, or None for no cap.

        Raises ValueError if the server takes no caps, or if ``value`` is not in [0, server's cap].
        """
        if value is None:
            return None if self.cap == float("inf") else self.cap
        if self.cap is None:
            raise ValueError(f"{CAP_ARGUMENT}: must not be given, as this server takes no caps")
        most, is_number = min(self.cap, MOST_CAP), isinstance(value, int | float)
        if not is_number or isinstance(value, bool) or not 0 <= value <= most:
            raise ValueError(
                f"{CAP_ARGUMENT}: must lie in [0, {most:g}], in nats a token; got {shown(value)}"
            )
        return float(value)


def shown(value: Any) -> str:
    """Return a request's value, shortened for an error message."""
    if isinstance(value, str):
        return repr(value) if len(value) <= SHOWN else f"{value[:SHOWN]!r}…"
    if isinstance(value, float) or (isinstance(value, int) and value.bit_length() <= SHOWN):
        return repr(value)
    return f"a value of type {type(value).__name__}"


def read(environ: Mapping[str, str] = os.environ) -> Settings | None:
    """Return the settings of the environment, or None if no ``CACTUS_`` variable is set.

    Raises ValueError, in one line that names the variable, its valid values and its value.
    """
    for name in environ:
        begins = name.upper().startswith("CACTUS_")
        if begins and name not in NAMES and not OF_OTHERS.fullmatch(name):
            raise ValueError(f"{name}: must be one of {', '.join(NAMES)}")
    text = {name: environ.get(name, "").strip() for name in NAMES}
    for name in NAMES:
        if text[name] and not text[POLICY]:
            raise ValueError(
                f"{name}: does nothing without {POLICY}; set that (speculative is lossless), or "
                "unset it"
            )
    if not text[POLICY]:
        return None
    from cactus_theory.base.arguments import number, one_of
    from cactus_theory.decoding.ledger import Ledger
    from cactus_theory.policies import read_policy
    from cactus_theory.verify import find_verifier

    known, chosen = ("chain", "block"), text[VERIFIER] or "chain"
    verifier = find_verifier(named(VERIFIER, one_of, "verifier", chosen, known))
    cap = number(CAP, text[CAP], 0) if text[CAP] else None

    def checked(spec: str) -> "Policy":
        rule = read_policy(spec).at_ends(())  # no tokenizer is loaded here, so no end ids
        named(VERIFIER, verifier.check, rule)
        if cap is not None:
            named(CAP, Ledger, rule, min(cap, 1.0))  # a ledger takes no infinite cap
        return rule

    return Settings(
        policy=named(POLICY, checked, text[POLICY]),
        policies=named(POLICIES, _offered, text[POLICIES], checked),
        verifier=verifier,
        meter=_meter(text[METER], text[READINGS]),
        cap=cap,
        readings=_readings(text[READINGS]),
    )


def _offered(text: str, checked: Callable[[str], "Policy"]) -> dict[str, "Policy"]:
    """Return policies by name from a text such as ``gentle=band:price=4; fast=band:price=1``."""
    policies = {SPECULATIVE: checked(SPECULATIVE)}
    for part in filter(str.strip, text.split(";")):
        line = OFFERED.fullmatch(part)
        if line is None:
            raise ValueError(f"must be name=spec, with ; between two; got {part.strip()!r:.60}")
        name, spec = line.groups()
        if name in policies:
            raise ValueError(f"{name}: must be named once, and {SPECULATIVE} is there anyway")
        policies[name] = named(name, checked, spec)
    return policies


def _meter(text: str, readings: str) -> int:
    """Return n of ``CACTUS_METER``, 1 if readings are kept: one verified row in n is measured."""
    if readings:
        if text not in ("", "1"):
            raise ValueError(f"{METER}: must be 1 or unset beside {READINGS}; got {text!r}")
        return 1
    if text.lower() in ("off", "0"):
        return 0
    if text and not (text.isascii() and text.isdigit()):
        raise ValueError(f"{METER}: must be off or a whole number; got {text!r}")
    return int(text) if text else MEASURED


def _readings(text: str) -> str:
    if text and text != LOG:
        named(READINGS, Path(text).open, "a").close()
    return text


def named(name: str, function: Any, *arguments: Any) -> Any:
    """Call a function; re-raise its error as a ValueError of one line that names the setting."""
    try:
        return function(*arguments)
    except (ValueError, TypeError, OSError, ArithmeticError) as error:
        message = " ".join(str(error).split())
        raise ValueError(f"{name}: {message[:LONGEST_LINE]}") from None
