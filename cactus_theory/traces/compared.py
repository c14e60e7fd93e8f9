"""What an engine counted, held against what is expected: which position is off, and by how much.

Positions are compared among the tokens that reach them, since an early fault lowers every later
count. Errors are the expectation's over texts, and those of the counts: binomial, or larger where
rounds of one text are alike in the trace. Counts do not say which text they are from, so these
are rough.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from cactus_theory.base import arguments as check
from cactus_theory.traces.estimate import Estimate
from cactus_theory.traces.expect import Expectation, critical

# counters of vLLM, which end in _total in its Prometheus text, and the gauge of SGLang
DRAFTS, DRAFTED, BY_POSITION = (
    f"vllm:spec_decode_num_{name}" for name in ("drafts", "draft_tokens", "accepted_tokens_per_pos")
)
LENGTH = "sglang:spec_accept_length"
LINE = re.compile(
    rf"^(({DRAFTS}|{DRAFTED}|{BY_POSITION}|{LENGTH})(?:_total)?)(\{{.*\}})?[ \t]+(\S+)"
    r"(?:[ \t]+-?\d+)?[ \t]*$",
    re.MULTILINE,
)
POSITION, MODEL = re.compile(r'[{,]\s*position="(\d+)"'), re.compile(r'[{,]\s*model_name="([^"]*)"')
# a few rounds at the end of answers draft fewer tokens than the rest
FEWER = 0.05
# of all tests of one comparison together: of 50 healthy engines one may raise an alarm
QUIET = 0.98
# a position that fewer rounds reached is not judged: its share is no normal number
FEWEST = 10
GAP = "position", "expected", "expected_error", "observed", "observed_error", "errors", "off"
Column = Float[np.ndarray, "numbers"]


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

    Raises ValueError for numbers that are neither, or that rise, and without rounds.
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

    Raises OSError or ValueError for files that cannot be read, that hold neither engine's numbers,
    or several models.
    """
    now = _samples(path)
    if not any(name == DRAFTS for name, _ in now):
        lengths = [value for (name, _), value in now.items() if name == LENGTH]
        if len(lengths) != 1 or before is not None:
            raise ValueError(
                f"--metrics: must hold {DRAFTS}_total, or {LENGTH} once in one file, as it is no "
                f"counter; got {len(lengths)} lines in {path}"
            )
        return replace(observed_rates(repr(lengths[0]), rounds), is_length=True)
    earlier = {} if before is None else _samples(before)
    counts, places = defaultdict[str, float](float), defaultdict[int, float](float)
    for (name, labels), value in now.items():
        count = value - earlier.get((name, labels), 0.0)
        counts[name] += count
        if name == BY_POSITION and (place := POSITION.search(labels)):
            places[int(place[1])] += count
    drafts, drafted, width = counts[DRAFTS], counts[DRAFTED], len(places)
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


def _samples(path: str | Path) -> dict[tuple[str, str], float]:
    """Return name without _total and labels → value, of the lines that are of interest."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise OSError(f"--metrics: must be a readable text; {error}") from None
    samples = {
        (name, labels): check.number(f"--metrics: {written} in {path}", value, 0)
        for written, name, labels, value in LINE.findall(text)
    }
    models = {model for _, labels in samples for model in MODEL.findall(labels)}
    if len(models) > 1:
        raise ValueError(f"--metrics: must be of one model; got {', '.join(sorted(models))}")
    return samples


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """An observation against an expectation and against known faults.

    A gap, keys GAP, is of a position that enough rounds reached, or of tokens per call, if those
    were counted, at position 0; ``errors`` is how many standard errors it is off.
    """

    gaps: Sequence[dict[str, Any]]
    alarm: bool  # whether healthy is refused: by a gap, or in favour of some fault
    named: tuple[str, ...]  # of an alarm, faults that fit and are nearer, the nearest first
    alike: tuple[str, ...]  # faults that would look healthy here


def compare_observed(
    healthy: Expectation, seen: Observation, signatures: Mapping[str, Expectation] | None = None
) -> Diagnosis:
    """Return where counts are off, and which faults would explain them.

    Of a healthy engine all tests together raise an alarm with probability 1 − QUIET at most, about:
    each position on both sides, and on one side, for each fault that shows, the sum of gaps in
    whose direction it does, weighted by its size over the counts' variance. Once there is an alarm
    a fault is named if its own test, taken alone, refuses healthy, and no position is off from its
    signature, both at LEVEL. A fault may have several signatures: what stands behind a space in
    their names does not count.

    Raises
    ------
    ValueError
        Another number of positions than is expected, or more tokens per call than K + 1.

    Examples
    --------
    >>> from cactus_theory.traces.faults import row_signatures
    >>> seen = Observation(np.array([0.51, 0.24, 0.1, 0.05]), 500, np.zeros(4))
    >>> healthy, faulty = (of("simulations/data/trace") for of in (expect, row_signatures))
    >>> compare_observed(healthy, seen, faulty).named
    ('no-draft-law',)
    """
    base, tests = _Gaps(healthy, seen), []
    reach = critical(len(base.places), healthy.freedom)
    invisible: dict[str, bool] = {}
    for spec, signature in (signatures or {}).items():
        name, fault = spec.partition(" ")[0], _Gaps(signature, seen)
        step = fault.expected - base.expected
        visible = bool((np.abs(step) > reach * base.step_error(fault)).any())
        invisible[name] = invisible.get(name, True) and not visible
        if visible:
            towards = base.towards(step / base.observed_error**2)
            tests.append((fault.worst, name, fault.fits, towards))
    limit = critical(len(base.places) + len(tests) / 2, healthy.freedom, QUIET)
    columns = (base.places, base.expected, base.expected_error,
               base.observed, base.observed_error, base.errors)  # fmt: skip
    gaps: list[dict[str, Any]] = [
        dict(zip(GAP, (*numbers, abs(numbers[-1]) > limit), strict=True))
        for numbers in zip(*(column.tolist() for column in columns), strict=True)
    ]
    alarm = any(gap["off"] for gap in gaps) or any(towards > limit for *_, towards in tests)
    single = critical(1 / 2, healthy.freedom)
    named = dict.fromkeys(
        name for _, name, fits, towards in sorted(tests) if alarm and fits and towards > single
    )
    alike = tuple(name for name in invisible if invisible[name])
    return Diagnosis(gaps, alarm, tuple(named), alike)


class _Gaps:
    """Expected and observed numbers, one a position, or tokens per call alone at place 0.

    Errors are the standard errors of what is expected and of what was counted.
    """

    def __init__(self, expectation: Expectation, seen: Observation) -> None:
        self.expectation, width = expectation, len(expectation.if_reached)
        if seen.is_length and seen.accepted[0] > width + 1:
            raise ValueError(
                f"observed: tokens per call must be at most {width + 1}, all {width} drafted and "
                f"one more; got {seen.accepted[0]:g}"
            )
        if not seen.is_length and len(seen.accepted) != width:
            raise ValueError(
                f"observed: must have the {width} positions that are expected (another K is "
                f"another decode); got {len(seen.accepted)}"
            )
        before = np.concatenate([[1.0], seen.accepted[:-1]])
        places = np.flatnonzero(seen.is_length | (before * seen.rounds >= FEWEST))
        before, earlier = before[places], np.concatenate([[0.0], seen.rounding[:-1]])[places]
        self.observed = seen.accepted[places] / before
        rounding = np.hypot(seen.rounding[places], self.observed * earlier) / before
        if seen.is_length:
            self.places, self.means, half = places, [expectation.tokens_per_call], 0.0
            scatter = np.array([expectation.length_scatter])
        else:
            self.places, half = places + 1, 0.5  # of a count, which is a whole number
            self.means = [expectation.if_reached[place] for place in places.tolist()]
            scatter = np.nan_to_num([expectation.scatter(place) for place in places.tolist()])
        count = before * seen.rounds
        self.expected = np.nan_to_num([mean.value for mean in self.means])
        self.expected_error = np.nan_to_num([expectation.error(mean) for mean in self.means])
        # of a rate near 0 or 1, and where rounds of a text differ less than coins: binomial
        rate = (count * np.clip(self.expected, 0, 1) + 0.5) / (count + 1)
        coins = np.sqrt(np.maximum(scatter, rate * (1 - rate)) / count)
        self.observed_error = np.hypot(coins, rounding)
        gap = self.observed - self.expected
        size = np.maximum(np.abs(gap) - half / count, 0.0)
        self.errors: Column = (
            np.sign(gap) * size / np.hypot(self.observed_error, self.expected_error)
        )
        self.worst = float(np.abs(self.errors).max())
        self.fits = self.worst <= critical(len(self.places), expectation.freedom)

    def step_error(self, other: "_Gaps") -> Column:
        """Return the standard errors of differences of what is expected, paired if of one trace."""
        if self.expectation.replay.source != other.expectation.replay.source:
            return np.hypot(self.expected_error, other.expected_error)
        pairs = zip(self.means, other.means, strict=True)
        return np.nan_to_num([self.expectation.error(first - second) for first, second in pairs])

    def towards(self, weights: Column) -> float:
        """Return by how many standard errors the weighted sum of gaps is above 0."""
        value = float(weights @ (self.observed - self.expected))
        left_out = weights @ np.nan_to_num([mean.left_out for mean in self.means])
        expected_error = self.expectation.error(Estimate(value, left_out, ""))
        observed_error = np.linalg.norm(weights * self.observed_error)
        return value / float(np.hypot(observed_error, expected_error) + 1e-300)
