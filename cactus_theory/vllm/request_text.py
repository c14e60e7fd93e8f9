"""Read words, knobs and numbers of a request within bounds.

Lengths are bounded before anything is parsed, and refusals repeat a short part of what was said.
"""

from collections.abc import Mapping
from typing import Any

from cactus_theory.base.specs import names_a_file, parse_knobs, parse_spec
from cactus_theory.vllm.bias import Cut
from cactus_theory.vllm.settings import ARGUMENT

# most characters of a spec; this package's longest, every knob to its last digit, has about 130
LONGEST = 200
MOST_KNOBS = 8
LONGEST_INTEGER = 64  # most bits of a knob's integer
SHOWN = 60  # characters of a value that a refusal repeats
NamedKnobs = tuple[str | None, dict[str, Any]]
# part of a cut → its largest value, and the requirement that a refusal states
CUTS = {
    "top_p": (1.0, "must lie in (0, 1]"),
    "top_k": (2**31, "must be a whole number of at least 0"),
    "min_p": (1.0, "must lie in [0, 1]"),
}


def extra_arg(extra_args: Mapping[str, Any] | None, key: str) -> Any:
    """Return the value of a request's key, None without one."""
    if extra_args is None:
        return None
    if not isinstance(extra_args, Mapping):
        raise ValueError(f"extra_args: must be a mapping; got {shown(extra_args)}")
    return extra_args.get(key)


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


def cut_of(extra_args: Mapping[str, Any] | None) -> Cut:
    """Return the cuts of ``cactus_top_p``, ``cactus_top_k`` and ``cactus_min_p``."""
    cut: dict[str, Any] = {}
    for name, (most, requirement) in CUTS.items():
        argument = f"{ARGUMENT}_{name}"
        asked = extra_arg(extra_args, argument)
        if asked is None:
            continue
        value = number(argument, asked, most, requirement)
        if (name == "top_k" and value != int(value)) or (name == "top_p" and not value):
            raise ValueError(f"{argument}: {requirement}; got {value}")
        cut[name] = int(value) if name == "top_k" else value
    return Cut(**cut)


def _split(spec: str) -> NamedKnobs:
    text = _plain("policy", spec)
    if "=" in text.partition(":")[0]:
        return None, dict(parse_knobs(text, f":{text}"))
    if names_a_file(text):
        raise ValueError(f"policy: must be a registered name, not a file; got {shown(text)}")
    name, knobs = parse_spec(text)
    return name, dict(knobs)


def _plain(name: str, text: str) -> str:
    """Return the text; ValueError unless it is short and printable ASCII."""
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
