"""What an engine counted: rates by position, or the tokens of a call, and over how many rounds."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jaxtyping import Float

from cactus_theory import _arguments as check

# counters of vLLM, which end in _total in its Prometheus text, and the gauge of SGLang
DRAFTS, DRAFTED, BY_POSITION = (
    f"vllm:spec_decode_num_{name}" for name in ("drafts", "draft_tokens", "accepted_tokens_per_pos")
)
LENGTH = "sglang:spec_accept_length"
LINE = re.compile(r"([a-zA-Z_:][\w:]*)(\{.*\})?\s+(\S+)(?:\s+-?\d+)?\s*")
POSITION, MODEL = re.compile(r'[{,]\s*position="(\d+)"'), re.compile(r'[{,]\s*model_name="([^"]*)"')
# a few rounds at the end of answers draft fewer tokens than the rest
FEWER = 0.05
Samples = dict[str, dict[str, float]]


@dataclass(frozen=True, eq=False)
class Observation:
    """What was counted.

    Attributes
    ----------
    accepted : (K,) shares of rounds that reach and accept each position; or one number, the new
        tokens per target call.
    rounds : how many were counted.
    rounding : standard deviations of what was rounded away.
    is_length : whether it is tokens per call, the one that was not drafted among them.

    Examples
    --------
    >>> Observation(np.array([0.8, 0.55]), 1000, np.zeros(2)).accepted
    array([0.8 , 0.55])
    """

    accepted: Float[np.ndarray, "K"]
    rounds: float
    rounding: Float[np.ndarray, "K"]
    is_length: bool = False


def observed_rates(text: str, rounds: float | None) -> Observation:
    """Return what an engine prints: accepted at each position over drafts, or tokens per call.

    Raises
    ------
    ValueError
        Numbers that are neither, or that rise; no rounds.
    """
    words = [word.strip() for word in text.split(",")]
    rates = np.array([check.number("--observed", word, 0) for word in words])
    if (len(rates) > 1 and rates.max() > 1) or (np.diff(rates) > 0).any():
        raise ValueError(
            "--observed: must be shares of all drafts that accept each position, which cannot "
            "rise (of those that reached it: multiply them up), or the tokens of a call; "
            f"got {text!r}"
        )
    if rounds is None:
        raise ValueError(
            "--rounds: must say over how many rounds (drafts, target calls) the observed numbers "
            "were counted, as their error depends on it; got none"
        )
    digits = [17 if "e" in word.lower() else len(word.partition(".")[2]) for word in words]
    rounding = 10.0 ** -np.array(digits) / np.sqrt(12)
    is_length = len(rates) == 1 and rates[0] > 1
    return Observation(rates, check.number("--rounds", rounds, 1), rounding, bool(is_length))


def read_metrics(path: str | Path, before: str | Path | None, rounds: float | None) -> Observation:
    """Return what the Prometheus text of vLLM or SGLang says; ``before`` is taken off counters.

    Raises
    ------
    OSError, ValueError
        Files that cannot be read, that hold neither engine's numbers, or several models.
    """
    now = _samples(path)
    if DRAFTS in now:
        return _counted(path, now, {} if before is None else _samples(before))
    lengths = list(now.get(LENGTH, {}).values())
    if len(lengths) != 1 or before is not None:
        raise ValueError(
            f"--metrics: must hold {DRAFTS}_total, or {LENGTH} once in one file, as it is no "
            f"counter; got {len(lengths)} lines in {path}"
        )
    return replace(observed_rates(repr(lengths[0]), rounds), is_length=True)


def _counted(path: str | Path, now: Samples, before: Samples) -> Observation:
    counts = {
        name: {
            labels: value - before.get(name, {}).get(labels, 0.0) for labels, value in own.items()
        }
        for name, own in now.items()
    }
    drafts, drafted = (sum(counts.get(name, {}).values()) for name in (DRAFTS, DRAFTED))
    places: dict[int, float] = {}
    for labels, value in counts.get(BY_POSITION, {}).items():
        if place := POSITION.search(labels):
            places[int(place[1])] = places.get(int(place[1]), 0.0) + value
    width = len(places)
    if not width or sorted(places) != list(range(width)) or drafts <= 0:
        raise ValueError(
            "--metrics: must count drafts, after the earlier file if two are given, and accepted "
            f"tokens at positions 0, 1, …; got {drafts:g} drafts, positions {sorted(places)}"
        )
    if abs(drafted / drafts - width) > FEWER * width:
        raise ValueError(
            f"--metrics: rounds must draft {width} tokens, as there are positions; got "
            f"{drafted / drafts:.2f} in {path}"
        )
    rates = np.array([places[number] for number in range(width)]) / drafts
    if rates[0] > 1 or rates[-1] < 0 or (np.diff(rates) > 0).any():
        raise ValueError(
            f"--metrics: counts must not rise with the position; got {rates} in {path}"
        )
    return Observation(rates, drafts, np.zeros(width))


def _samples(path: str | Path) -> Samples:
    """Return name without _total → labels → value, of the lines that are of interest."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OSError(f"--metrics: must be a readable text; {error}") from None
    found: Samples = {}
    models = set()
    for parts in filter(None, map(LINE.fullmatch, lines)):
        name, labels = parts[1].removesuffix("_total"), parts[2] or ""
        if name in (DRAFTS, DRAFTED, BY_POSITION, LENGTH):
            value = check.number(f"--metrics: {parts[1]} in {path}", parts[3], 0)
            found.setdefault(name, {})[labels] = value
            models.update(MODEL.findall(labels))
    if len(models) > 1:
        raise ValueError(f"--metrics: must be of one model; got {', '.join(sorted(models))}")
    return found
