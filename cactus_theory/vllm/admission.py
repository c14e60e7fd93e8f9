"""Admission of a request's policy: read within bounds, compared with the server's, tried once.

``CACTUS_REQUESTS`` says what is admitted:

======================  ===================================================================
``stricter`` (default)  the server's policy with its knob moved to where less is accepted (by the
                        ``direction`` that the policy declares), or ``speculative``, which is
                        lossless; every other knob must equal the server's
``any``                 any registered policy
``off``                 nothing: the server's policy decides for every request
======================  ===================================================================

Requests come from strangers. What they say is read within bounds (``request_text``), and no file
is opened: a policy in a file and a knob that holds text other than ``TEXTS`` are the server's
alone. An admitted policy has judged drafts in the functions that the sampler calls, and is kept as
that object; a bounded number of them are remembered by a digest.

The hooks of both model runners and the logits processor ask the same :class:`Admission`; what
differs is a :class:`Way`. A request of the logits processor may also ask for a margin (a bias in
logits at temperature 0) and for a cut of q before the policy acts.
"""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from cactus_theory.base.specs import names_a_file
from cactus_theory.policies import Policy, _knobs, _registry, policy
from cactus_theory.policies._user_function import FunctionPolicy
from cactus_theory.policies.speculative import Speculative
from cactus_theory.vllm.batch import try_rows
from cactus_theory.vllm.bias import HOTTEST, Cut, check_policy, is_lossless, try_bias
from cactus_theory.vllm.request_text import CUTS, cut_of, extra_arg, name_and_knobs, number, shown
from cactus_theory.vllm.settings import (
    ARGUMENT,
    CAP_ARGUMENT,
    MOST_MARGIN,
    NAMES,
    Settings,
    named,
    read,
)

REMEMBERED = 1024  # most admitted policies that are kept, by digest
# knobs whose text a request may choose: names that are looked up in the package's own lists
TEXTS = ("divergence", "form", "recover")
LOSSLESS = policy("speculative")
KEYS = (ARGUMENT, CAP_ARGUMENT)
MARGIN_ARGUMENT = f"{ARGUMENT}_margin"
MARGINS = "must be a number of at least 0, in logits, at most 1e6"
PROCESSOR_KEYS = (*KEYS, MARGIN_ARGUMENT, *(f"{ARGUMENT}_{name}" for name in CUTS))


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


class Way(NamedTuple):
    """A way in which policies decide drafts.

    ``keys`` are those of ``extra_args`` that are read; ``fits`` raises ValueError for a policy that
    cannot decide so, ``tried`` whatever it raises where it judges a few rows as the sampler would.
    """

    keys: Sequence[str]
    fits: Callable[[Policy, Settings], None]
    tried: Callable[[Policy, Settings], None]


BY_HOOK = Way(KEYS, lambda policy, settings: settings.verifier.check(policy), try_rows)
BY_BIAS = Way(PROCESSOR_KEYS, lambda one, _: check_policy(one), lambda one, _: try_bias(one))


class Admission:
    """Admits requests and grants them policies, whichever of the three ways serves them.

    ``policies`` are kept by the digest of what asked for them.
    """

    def __init__(self, settings: Settings, way: Way = BY_HOOK) -> None:
        self.settings, self.way = settings, way
        self.policies: dict[bytes, Policy] = {}

    def grant(self, sampling_params: Any) -> Grant:
        """Return the grant of a request; ValueError, in one line, for a request that is refused."""
        extra = getattr(sampling_params, "extra_args", None)
        temperature = getattr(sampling_params, "temperature", None)
        check_keys(extra, self.way.keys)
        policy, cap = self.policy_of(extra), self.cap_of(extra)
        check_temperature(temperature)
        if MARGIN_ARGUMENT not in self.way.keys:
            return Grant(policy, cap)
        granted = Grant(policy, cap, cut_of(extra), self.margin_of(extra))
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

    def policy_of(self, extra_args: Mapping[str, Any] | None) -> Policy:
        """Return the policy of a request; ValueError, in one line, for one that is not admitted."""
        value = extra_arg(extra_args, ARGUMENT)
        if value is None:
            return self.settings.policy
        return named(f"extra_args[{ARGUMENT!r}]", self._policy, value)

    def cap_of(self, extra_args: Mapping[str, Any] | None) -> float | None:
        """Return a request's cap in nats a token, None for none; ValueError above the server's."""
        value, server_cap = extra_arg(extra_args, CAP_ARGUMENT), self.settings.cap
        if value is None:
            return server_cap if server_cap is None or server_cap < float("inf") else None
        if server_cap is None or self.settings.requests == "off":
            raise ValueError(f"{CAP_ARGUMENT}: must not be given, as this server takes no caps")
        requirement = f"must lie in [0, {server_cap:g}], in nats a token"
        return number(CAP_ARGUMENT, value, server_cap, requirement)

    def margin_of(self, extra_args: Mapping[str, Any] | None) -> float:
        """Return a request's margin in logits; ValueError above the server's."""
        most, mode = self.settings.margin, self.settings.requests
        value = extra_arg(extra_args, MARGIN_ARGUMENT)
        margin = most if value is None else number(MARGIN_ARGUMENT, value, MOST_MARGIN, MARGINS)
        if not (margin == most or mode == "any" or (mode == "stricter" and margin < most)):
            raise ValueError(
                f"{MARGIN_ARGUMENT}: must not exceed the server's own, {most}; got {margin}"
            )
        return margin

    def _policy(self, value: Any) -> Policy:
        if self.settings.requests == "off":
            raise ValueError("must not be given: this server decides by one policy")
        name, knobs = name_and_knobs(value)
        words = repr((name, sorted(knobs.items())))
        digest = hashlib.sha256(words.encode()).digest()
        if digest not in self.policies:
            policy = self._built_and_tried(name, knobs)
            if len(self.policies) >= REMEMBERED:
                self.policies.clear()
            self.policies[digest] = policy
        return self.policies[digest]

    def _built_and_tried(self, name: str | None, knobs: dict[str, Any]) -> Policy:
        server = self.settings.policy
        policy = requested_policy(server, name, knobs)
        if self.settings.requests == "stricter":
            check_stricter(policy, server)
        try:
            self.way.fits(policy, self.settings)
        except ValueError as error:  # which verifies is not a request's choice
            refusal, _, _ = str(error).partition("; try verifier=")
            raise ValueError(f'{refusal}; this server takes "speculative"') from None
        try:
            self.way.tried(policy, self.settings)
        except Exception as error:
            raise ValueError(
                f"policy: must judge a few rows without an error; {policy.name} raised "
                f"{type(error).__name__}: {error}"
            ) from None
        return policy


@lru_cache(maxsize=4)
def _of_processor(values: tuple[str, ...]) -> Admission:
    settings = read(dict(zip(NAMES, values, strict=True)), by_bias=True)
    assert settings is not None
    return Admission(settings, BY_BIAS)


def of_processor(environ: Mapping[str, str] = os.environ) -> Admission:
    """Return the admission of the logits processor; ValueError for a bad setting of the server."""
    return _of_processor(tuple(environ.get(name, "") for name in NAMES))


def check_keys(extra_args: Mapping[str, Any] | None, keys: Sequence[str]) -> None:
    """Raise ValueError for a key that begins as this package's do and is not read."""
    if not isinstance(extra_args, Mapping):
        return
    for key in extra_args:
        if not isinstance(key, str) or key in keys or not key.lower().startswith(ARGUMENT):
            continue
        if key in PROCESSOR_KEYS:
            raise ValueError(f"{key}: is read by the logits processor of model runner V2 alone")
        raise ValueError(
            f"extra_args (over HTTP vllm_xargs): must be one of {', '.join(keys)}; got {shown(key)}"
        )


def requested_policy(server: Policy, name: str | None, knobs: dict[str, Any]) -> Policy:
    """Return the policy of a name (None: the server's) and knobs."""
    kind: Any = server if name is None else _registry.POLICIES.find(name)
    label = family(server) if name is None else name
    values = _knobs.readable(kind, label, knobs)
    for knob, value in values.items():
        is_number = isinstance(value, int | float | None)
        if not is_number and (knob not in TEXTS or names_a_file(value)):
            raise ValueError(f"{knob}: is set by the server alone")
    try:
        if not isinstance(kind, type):
            return _knobs.with_knobs(kind, label, values)
        return _knobs.built(kind, label, label, values).at_ends(())
    except Exception as error:  # a rule of the server's own may raise anything
        raise ValueError(str(error)) from None


def check_stricter(requested: Policy, server: Policy) -> None:
    """Raise ValueError unless a policy is the server's at a stricter knob, or lossless."""
    if isinstance(requested, Speculative):
        return
    if type(requested) is not type(server) or _source(requested) is not _source(server):
        raise ValueError(
            f"policy: must be {family(server)}, as the server's, or speculative, which is "
            f"lossless; got {family(requested)}"
        )
    server_values, requested_values = values_of(server), values_of(requested)
    direction = server.declares.direction
    for knob, server_value in server_values.items():
        value = requested_values[knob]
        if value == server_value:
            continue
        numbers = _is_number(server_value) and _is_number(value)
        if knob != server.knob or not direction or not numbers:
            raise ValueError(
                f"{knob}: must be the server's own, {shown(server_value)}; got {shown(value)}"
            )
        if not direction * (value - server_value) <= 0:
            bound = "most" if direction > 0 else "least"
            raise ValueError(
                f"{knob}: must be at {bound} {server_value}, the server's own; got {shown(value)}"
            )


def with_own(cut: Cut, sampling_params: Any) -> Cut:
    """Return a cut and vLLM's own top_p, top_k and min_p, which would act too late, as one cut."""
    own = sampling_params
    sizes = [size for size in (cut.top_k, own.top_k or 0) if size > 0]
    return Cut(min(cut.top_p, own.top_p), min(sizes, default=0), max(cut.min_p, own.min_p or 0.0))


def family(policy: Policy) -> str:
    """Return a policy's name without its knobs, and without the file that it was read from."""
    return policy.name if policy.name in _registry.POLICIES.known else "the server's policy"


def values_of(policy: Policy) -> dict[str, Any]:
    """Return the knobs of a policy with their values."""
    if isinstance(policy, FunctionPolicy):
        return dict(policy.values)
    return {knob: getattr(policy, knob) for knob in _knobs.of(policy)}


def check_temperature(temperature: float | None) -> None:
    """Raise ValueError for a temperature at which logits overflow."""
    if temperature is not None and not temperature <= HOTTEST:
        raise ValueError(
            f"temperature: must be at most {HOTTEST:g} with a policy of cactus-theory; "
            f"got {shown(temperature)}"
        )


def _source(policy: Policy) -> Any:
    """Return the function of a policy that calls one."""
    return policy.source.function if isinstance(policy, FunctionPolicy) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
