"""What an engine counted: rates by position, or the tokens of a call, and over how many rounds."""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float

from cactus_theory import _arguments as check

# counters of vLLM, which end in _total in its Prometheus text, and the gauge of SGLang
DRAFTS, DRAFTED, ACCEPTED, BY_POSITION = (
    f"vllm:spec_decode_num_{name}"
    for name in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
)
LENGTH = "sglang:spec_accept_length"
LINE = re.compile(r"([a-zA-Z_:][\w:]*)(\{.*\})?\s+(\S+)(?:\s+-?\d+)?\s*")
POSITION = re.compile(r'[{,]\s*position="(\d+)"')
MODEL = re.compile(r'[{,]\s*model_name="([^"]*)"')
# a few rounds at the end of answers draft fewer tokens than the rest
FEWER = 0.05


@dataclass(frozen=True, eq=False)
class Observation:
    """What was counted.

    Attributes
    ----------
    accepted : (K,) shares of rounds that reach and accept each position; None if only the
        length is known.
    tokens_per_call : new tokens per target call, the one that was not drafted among them.
    rounds : how many were counted.
    rounding : (K,) standard deviations of rounding where numbers were written with few digits;
        the only entry for the length.

    Examples
    --------
    >>> seen = observed_rates("0.8,0.55", 1000)
    >>> seen.accepted, round(seen.tokens_per_call, 2)
    (array([0.8 , 0.55]), 2.35)
    """

    accepted: Float[np.ndarray, "K"] | None
    tokens_per_call: float
    rounds: float
    rounding: Float[np.ndarray, "some"]


def observed_rates(text: str, rounds: float | None) -> Observation:
    """Return rates as an engine prints them, accepted at each position over drafts: ``0.8,0.55``.

    Raises
    ------
    ValueError
        Numbers that are no shares, or that rise; no rounds.
    """
    words = [word.strip() for word in text.split(",")]
    try:
        rates = np.array([float(word) for word in words])
    except ValueError:
        raise ValueError(f"--observed: must be numbers such as 0.81,0.64; got {text!r}") from None
    if not ((rates >= 0) & (rates <= 1)).all() or (np.diff(rates) > 0).any():
        raise ValueError(
            "--observed: must be shares of all drafts that accept each position, which cannot "
            f"rise (of those that reached it: multiply them up); got {text!r}"
        )
    return Observation(rates, 1 + float(rates.sum()), _rounds(rounds), _rounding(words))


def observed_length(text: str, rounds: float | None) -> Observation:
    """Return tokens per call as an engine prints them, the recovered or bonus one included.

    Raises
    ------
    ValueError
        No number from 1 on; no rounds.
    """
    length = check.number("--observed-length", text, 1)
    return Observation(None, length, _rounds(rounds), _rounding([text]))


def read_metrics(path: str | Path, before: str | Path | None, rounds: float | None) -> Observation:
    """Return what the Prometheus text of vLLM or SGLang says; ``before`` is taken off counters.

    Raises
    ------
    OSError, ValueError
        Files that cannot be read, that hold neither engine's numbers, or several models; rounds
        that were counted and are given, too.
    """
    now = _samples(path)
    if DRAFTS in now:
        if rounds is not None:
            raise ValueError(f"--rounds: must not be given with vLLM's counters; got {rounds:g}")
        earlier = {} if before is None else _samples(before)
        return _counted(
            path, {name: _less(own, earlier.get(name, {})) for name, own in now.items()}
        )
    if LENGTH not in now:
        raise ValueError(f"--metrics: must hold {DRAFTS}_total or {LENGTH}; got neither in {path}")
    if len(now[LENGTH]) != 1 or before is not None:
        raise ValueError(
            f"--metrics: {LENGTH} is no counter, so that one file with one line of it is needed; "
            f"got {len(now[LENGTH])} lines{'' if before is None else ' and two files'}"
        )
    return observed_length(repr(next(iter(now[LENGTH].values()))), rounds)


def _counted(path: str | Path, counts: dict[str, dict[str, float]]) -> Observation:
    drafts, drafted = (sum(counts.get(name, {}).values()) for name in (DRAFTS, DRAFTED))
    places: dict[int, float] = {}
    for labels, value in counts.get(BY_POSITION, {}).items():
        if place := POSITION.search(labels):
            number = int(place[1])
            places[number] = places.get(number, 0.0) + value
    if drafts <= 0 or sorted(places) != list(range(len(places))) or not places:
        raise ValueError(
            f"--metrics: must count drafts, and accepted tokens at positions 0, 1, …; got "
            f"{drafts:g} drafts and positions {sorted(places)} in {path}"
        )
    width = len(places)
    if abs(drafted / drafts - width) > FEWER * width:
        raise ValueError(
            f"--metrics: rounds must draft {width} tokens, as there are positions; got "
            f"{drafted / drafts:.2f} in {path}"
        )
    rates = np.array([places[number] for number in range(width)]) / drafts
    if (rates > 1).any() or (np.diff(rates) > 0).any() or (rates < 0).any():
        raise ValueError(f"--metrics: counts must not rise with the position; got {path}")
    return Observation(rates, 1 + float(rates.sum()), drafts, np.zeros(width))


def _samples(path: str | Path) -> dict[str, dict[str, float]]:
    """Return name without _total → labels → value, of the lines that are of interest."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise OSError(f"--metrics: must be a readable text; {error}") from None
    found: dict[str, dict[str, float]] = {}
    models = set()
    for line in text.splitlines():
        if line.startswith("#") or not (parts := LINE.fullmatch(line)):
            continue
        name, labels = parts[1].removesuffix("_total"), parts[2] or ""
        if name in (DRAFTS, DRAFTED, ACCEPTED, BY_POSITION, LENGTH):
            value = check.number(f"--metrics: {parts[1]} in {path}", parts[3], 0)
            found.setdefault(name, {})[labels] = value
            models |= {model[1] for model in [MODEL.search(labels)] if model}
    if len(models) > 1:
        raise ValueError(f"--metrics: must be of one model; got {', '.join(sorted(models))}")
    return found


def _less(now: dict[str, float], earlier: dict[str, float]) -> dict[str, float]:
    found = {labels: value - earlier.get(labels, 0.0) for labels, value in now.items()}
    if min(found.values()) < 0:
        raise ValueError("--metrics: the earlier file must come first; got counters that fall")
    return found


def _rounds(rounds: float | None) -> float:
    if rounds is None:
        raise ValueError(
            "--rounds: must say over how many rounds (drafts, target calls) the observed numbers "
            "were counted, as their error depends on it; got none"
        )
    return check.number("--rounds", rounds, 1)


def _rounding(words: list[str]) -> Float[np.ndarray, "some"]:
    """Return the standard deviations of what was rounded away."""
    digits = [
        len(word.partition(".")[2].strip()) if "e" not in word.lower() else 17 for word in words
    ]
    return 10.0 ** -np.array(digits) / np.sqrt(12)
