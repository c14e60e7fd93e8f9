"""Admission of requests: which of the server's policies one names, and limits that it lowers.

Requests come from strangers. A request picks a policy by a name that the server offers
(``CACTUS_POLICIES``), or ``speculative``, which is lossless; it may lower the cap of its answer and
the margin of the logits processor, and cut q before the policy acts. No text of a request is parsed
or looked up beyond those names, and refusals repeat a short part of it in one line.

The hooks of both model runners and the logits processor ask the same :class:`Admission`; they
differ in the ``keys`` of ``extra_args`` that are read.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from cactus_theory.policies import Policy, policy
from cactus_theory.vllm.bias import HOTTEST, Cut, is_lossless
from cactus_theory.vllm.settings import ARGUMENT, CAP_ARGUMENT, NAMES, SPECULATIVE, Settings, read

LOSSLESS = policy(SPECULATIVE)
SHOWN = 60  # characters of a value that a refusal repeats
LONGEST_INTEGER = 64  # most bits of a number
# part of a cut → its largest value, and the requirement that a refusal states
CUTS = {
    "top_p": (1.0, "must lie in (0, 1]"),
    "top_k": (2**31, "must be a whole number of at least 0"),
    "min_p": (1.0, "must lie in [0, 1]"),
}
MARGIN_ARGUMENT = f"{ARGUMENT}_margin"
OF_HOOK = (ARGUMENT, CAP_ARGUMENT)
OF_PROCESSOR = (*OF_HOOK, MARGIN_ARGUMENT, *(f"{ARGUMENT}_{name}" for name in CUTS))


class Grant(NamedTuple):
    """The policy, cap, truncation and margin that a request was granted."""

    policy: Policy
    cap: float | None = None  # nats a token of its answer, kept by the hook of model runner V1
    cut: Cut = Cut()  # made by the logits processor at positive temperatures
    margin: float = 0.0  # logits that the logits processor adds at temperature 0

    def acts(self, temperature: float) -> bool:
        """Return whether the logits processor changes logits."""
        lossy = self.cut != Cut() or not is_lossless(self.policy)
        return lossy if temperature > 0 else self.margin > 0


class Admission:
    """Admits requests and grants them policies, whichever of the three ways serves them."""

    def __init__(self, settings: Settings, keys: Sequence[str] = OF_HOOK) -> None:
        self.settings, self.keys = settings, keys

    def grant(self, sampling_params: Any) -> Grant:
        """Return the grant of a request; ValueError, in one line, for a request that is refused."""
        extra = getattr(sampling_params, "extra_args", None)
        temperature = getattr(sampling_params, "temperature", None)
        asked = {} if extra is None else extra
        if not isinstance(asked, Mapping):
            raise ValueError(f"extra_args: must be a mapping; got {shown(asked)}")
        check_keys(asked, self.keys)
        policy, cap = self.policy_of(asked.get(ARGUMENT)), self.cap_of(asked.get(CAP_ARGUMENT))
        check_temperature(temperature)
        if MARGIN_ARGUMENT not in self.keys:
            return Grant(policy, cap)
        granted = Grant(policy, cap, cut_of(asked), self.margin_of(asked.get(MARGIN_ARGUMENT)))
        if temperature and granted.acts(temperature):
            return granted._replace(cut=with_own(granted.cut, sampling_params))
        return granted

    def served(self, sampling_params: Any, warn: Callable[[str], None]) -> Grant:
        """Return the grant of a request in a step; one that was not refused before is lossless."""
        try:
            return self.grant(sampling_params)
        except ValueError as error:
            warn(f"{error}; the request is served without loss")
            return Grant(LOSSLESS)

    def policy_of(self, name: Any) -> Policy:
        """Return the policy of a name that is offered, the server's own for None."""
        if name is None:
            return self.settings.policy
        offered = {SPECULATIVE: LOSSLESS, **self.settings.policies}
        if not isinstance(name, str) or name not in offered:
            names = ", ".join(offered)
            raise ValueError(
                f"extra_args[{ARGUMENT!r}]: must be one of {names}, as this server offers them; "
                f"got {shown(name)}"
            )
        return offered[name]

    def cap_of(self, value: Any) -> float | None:
        """Return a request's cap in nats a token, None for none; ValueError above the server's."""
        most = self.settings.cap
        if value is None:
            return most if most is None or most < float("inf") else None
        if most is None:
            raise ValueError(f"{CAP_ARGUMENT}: must not be given, as this server takes no caps")
        return number(CAP_ARGUMENT, value, most, f"must lie in [0, {most:g}], in nats a token")

    def margin_of(self, value: Any) -> float:
        """Return a request's margin in logits; ValueError above the server's."""
        most = self.settings.margin
        requirement = f"must lie in [0, {most:g}], in logits"
        return most if value is None else number(MARGIN_ARGUMENT, value, most, requirement)


@lru_cache(maxsize=4)
def _of_processor(values: tuple[str, ...]) -> Admission:
    settings = read(dict(zip(NAMES, values, strict=True)), by_bias=True)
    assert settings is not None
    return Admission(settings, OF_PROCESSOR)


def of_processor(environ: Mapping[str, str] = os.environ) -> Admission:
    """Return the admission of the logits processor; ValueError for a bad setting of the server."""
    return _of_processor(tuple(environ.get(name, "") for name in NAMES))


def check_keys(extra_args: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Raise ValueError for a key that begins as this package's do and is not read."""
    for key in extra_args:
        if not isinstance(key, str) or key in keys or not key.lower().startswith(ARGUMENT):
            continue
        if key in OF_PROCESSOR:
            raise ValueError(f"{key}: is read by the logits processor of model runner V2 alone")
        raise ValueError(
            f"extra_args (over HTTP vllm_xargs): must be one of {', '.join(keys)}; got {shown(key)}"
        )


def cut_of(extra_args: Mapping[str, Any]) -> Cut:
    """Return the cuts of ``cactus_top_p``, ``cactus_top_k`` and ``cactus_min_p``."""
    cut: dict[str, Any] = {}
    for name, (most, requirement) in CUTS.items():
        argument = f"{ARGUMENT}_{name}"
        if (asked := extra_args.get(argument)) is None:
            continue
        value = number(argument, asked, most, requirement)
        if (name == "top_k" and value != int(value)) or (name == "top_p" and not value):
            raise ValueError(f"{argument}: {requirement}; got {value}")
        cut[name] = int(value) if name == "top_k" else value
    return Cut(**cut)


def with_own(cut: Cut, sampling_params: Any) -> Cut:
    """Return a cut and vLLM's own top_p, top_k and min_p, which would act too late, as one cut."""
    own = sampling_params
    sizes = [size for size in (cut.top_k, own.top_k or 0) if size > 0]
    return Cut(min(cut.top_p, own.top_p), min(sizes, default=0), max(cut.min_p, own.min_p or 0.0))


def check_temperature(temperature: float | None) -> None:
    """Raise ValueError for a temperature at which logits overflow."""
    if temperature is not None and not temperature <= HOTTEST:
        raise ValueError(
            f"temperature: must be at most {HOTTEST:g} with a policy of cactus-theory; "
            f"got {shown(temperature)}"
        )


def number(name: str, value: Any, most: float, requirement: str) -> float:
    """Return a number in [0, most]; ``requirement`` is what a refusal says."""
    amount, kinds = float("nan"), (int, float, str)  # text, as some clients send no numbers
    short = not isinstance(value, str) or len(value) <= SHOWN
    small = not isinstance(value, int) or value.bit_length() <= LONGEST_INTEGER
    if isinstance(value, kinds) and not isinstance(value, bool) and short and small:
        try:
            amount = float(value)
        except ValueError:
            pass
    if not 0 <= amount <= most:
        raise ValueError(f"{name}: {requirement}; got {shown(value)}")
    return amount


def shown(value: Any) -> str:
    """Return a value in as many characters as a refusal repeats."""
    if isinstance(value, int) and value.bit_length() > LONGEST_INTEGER:
        return f"a whole number of {value.bit_length():,} bits"
    if value is None or isinstance(value, int | float):
        return repr(value)
    if not isinstance(value, str):
        return f"a {type(value).__name__}"
    if len(value) <= SHOWN:
        return repr(value)
    return f"{value[:SHOWN]!r}… ({len(value):,} characters)"
