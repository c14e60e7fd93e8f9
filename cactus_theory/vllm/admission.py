"""What a request may ask for: read within bounds, compared with the server's, built and tried once.

``CACTUS_REQUESTS`` says what is admitted:

======================  ===================================================================
``stricter`` (default)  the server's policy with its knob moved to where less is accepted (by the
                        ``direction`` that the policy declares), or ``speculative``, which is
                        lossless; every other knob must equal the server's
``any``                 any registered policy
``off``                 nothing: the server's policy decides for every request
======================  ===================================================================

Requests come from strangers. Lengths are bounded before anything is parsed, refusals repeat a
short part of what was said, and no file is opened: a policy in a file and a knob that holds text
other than ``TEXTS`` are the server's alone. An admitted policy has judged drafts in the
functions that the sampler calls, and is kept as that object; a bounded number of them are
remembered by a digest.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cactus_theory.base.specs import names_a_file, parse_knobs, parse_spec
from cactus_theory.policies import Policy, _knobs, _registry
from cactus_theory.policies._function import FunctionPolicy
from cactus_theory.policies.speculative import Speculative
from cactus_theory.vllm.settings import ARGUMENT, CAP_ARGUMENT, Settings, named

# the longest spec of a policy of this package, with every knob to its last digit, has about 130
LONGEST = 200
MOST_KNOBS = 8
LONGEST_INTEGER = 64  # bits
SHOWN = 60  # characters of a value that a refusal repeats
REMEMBERED = 1024  # policies
# a bias on logits, T ln r, stays far inside float32; rows are uniform to their last digit before
HOTTEST = 1e6
# knobs that hold text a request may choose: names that are looked up in the package's own lists
TEXTS = ("divergence", "form", "recover")
NamedKnobs = tuple[str | None, dict[str, Any]]
KEYS = (ARGUMENT, CAP_ARGUMENT)
# what the logits processor reads besides
PROCESSOR_KEYS = (*KEYS, "cactus_margin", "cactus_top_p", "cactus_top_k", "cactus_min_p")


class Admission:
    """Decides what requests get.

    ``trial`` calls what the sampler calls: what it raises refuses a policy. ``policies`` are kept
    by the digest of what asked for them; ``keys`` are those of ``extra_args`` that are read here.
    """

    def __init__(
        self,
        settings: Settings,
        trial: Callable[[Policy, Settings], None],
        keys: Sequence[str] = KEYS,
    ) -> None:
        self.settings, self.trial, self.keys = settings, trial, keys
        self.policies: dict[bytes, Policy] = {}

    def check(self, sampling_params: Any) -> None:
        """Raise ValueError for a request that is not served as it asks."""
        extra = sampling_params.extra_args
        check_keys(extra, self.keys)
        self.policy_of(extra)
        self.cap_of(extra)
        check_temperature(getattr(sampling_params, "temperature", None))

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
            self.settings.verifier.check(policy)
        except ValueError as error:  # which verifies is not a request's choice
            refusal, _, _ = str(error).partition("; try verifier=")
            raise ValueError(f'{refusal}; this server takes "speculative"') from None
        try:
            self.trial(policy, self.settings)
        except Exception as error:
            raise ValueError(
                f"policy: must judge a few rows without an error; {policy.name} raised "
                f"{type(error).__name__}: {error}"
            ) from None
        return policy


def extra_arg(extra_args: Mapping[str, Any] | None, key: str) -> Any:
    """Return what a request says under a key, None for nothing."""
    if extra_args is None:
        return None
    if not isinstance(extra_args, Mapping):
        raise ValueError(f"extra_args: must be a mapping; got {shown(extra_args)}")
    return extra_args.get(key)


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


def name_and_knobs(value: Any) -> NamedKnobs:
    """Return the name (None: the server's policy) and the knobs of a request, within bounds."""
    if isinstance(value, str):
        return _split(value)
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(
            f'must be a spec or knobs, such as "band:price=2" or "price=2"; got {shown(value)}'
        )
    if len(value) > MOST_KNOBS:
        raise ValueError(f"must name at most {MOST_KNOBS} knobs; got {len(value)}")
    other_knobs = {_plain("knob", key).strip(): _value(key, value) for key, value in value.items()}
    spec = other_knobs.pop("policy", None)
    if spec is not None and not isinstance(spec, str):
        raise ValueError(f"policy: must be a spec string; got {shown(spec)}")
    name, knobs = (None, {}) if spec is None else _split(spec)
    repeated = knobs.keys() & other_knobs.keys()
    if repeated or len(other_knobs) + (spec is not None) < len(value):
        raise ValueError(f"{min(repeated, default='knob')}: must be given once")
    return name, knobs | other_knobs


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
        return _knobs.built(kind, label, label, values)
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


def number(name: str, value: Any, most: float, requirement: str) -> float:
    """Return a number in [0, most]; ``requirement`` is what a refusal says."""
    try:
        amount = float(_value(name, value))
    except (TypeError, ValueError):
        amount = float("nan")
    if not 0 <= amount <= most or isinstance(value, bool):
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


def _split(spec: str) -> NamedKnobs:
    text = _plain("policy", spec)
    if "=" in text.partition(":")[0]:
        return None, dict(parse_knobs(text, f":{text}"))
    if names_a_file(text):
        raise ValueError(f"policy: must be a registered name, not a file; got {shown(text)}")
    name, knobs = parse_spec(text)
    return name, dict(knobs)


def _plain(name: str, text: str) -> str:
    """Return text that is short, and printed as it is."""
    if len(text) > LONGEST:
        raise ValueError(f"{name}: must have at most {LONGEST} characters; got {shown(text)}")
    if not (text.isascii() and text.isprintable()):
        raise ValueError(f"{name}: must be printable ASCII; got {shown(text)}")
    return text


def _value(knob: str, value: Any) -> Any:
    """Return a knob's value if it is short text, a number, true, false or none."""
    if isinstance(value, str):
        return _plain(knob, value)
    large = isinstance(value, int) and value.bit_length() > LONGEST_INTEGER
    if large or not (value is None or isinstance(value, int | float)):
        raise ValueError(
            f"{knob}: must be text, a number of at most {LONGEST_INTEGER} bits, true, "
            f"false or none; got {shown(value)}"
        )
    return value


def _source(policy: Policy) -> Any:
    """Return the function of a policy that calls one."""
    return policy.source.function if isinstance(policy, FunctionPolicy) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
