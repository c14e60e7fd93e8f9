"""Compare an engine's counts with expected acceptance: which position is off, and by how much.

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
from cactus_theory.traces.faults import CHECKED_FIRST

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
# most missing share of K drafted tokens a round: rounds at the end of answers draft fewer
FEWER = 0.05
# standard deviation of the correction for those rounds, as a share of it
UNSURE = 0.5
# most rounds: whole numbers are exact in float64 up to here
MOST_ROUNDS = 2.0**53
# probability of no alarm on a healthy engine, all tests of a comparison together
QUIET = 0.98
# least rounds that reach a judged position: the share of fewer is not normal
FEWEST = 10
GAP = "position", "expected", "expected_error", "observed", "observed_error", "errors", "off"
Column = Float[np.ndarray, "numbers"]


@dataclass(frozen=True, eq=False)
class Observation:
    """Acceptance counted by an engine.

    Attributes
    ----------
    accepted : (K,) shares, of rounds that drafted each position, that reach and accept it; or one
        number, the new tokens per target call.
    rounds : how many drafted each position, (K,), or one number for all.
    rounding : standard deviations of what was rounded away.
    is_length : whether it is tokens per call, the one that was not drafted among them.

    Raises
    ------
    ValueError
        Shares that rise or are none, fewer than FEWEST rounds or too many to count.
    """

    accepted: Float[np.ndarray, "K"]
    rounds: int | float | Float[np.ndarray, "K"]
    rounding: Float[np.ndarray, "K"]
    is_length: bool = False

    def __post_init__(self) -> None:
        steps = np.diff(self.accepted, prepend=np.inf if self.is_length else 1.0, append=0.0)
        if not len(self.accepted) or not (steps <= 0).all():
            raise ValueError(
                "observed: must be shares of all rounds, from 0 to 1, that do not rise with the "
                "position (of those that reached it: multiply them up), or the tokens of a call; "
                f"got {self.accepted}"
            )
        check.number("rounds", np.max(self.rounds), FEWEST, MOST_ROUNDS)

    @staticmethod
    def of_counts(
        accepted: Sequence[float], rounds: float, drafted: float, rounding: Any = 0.0
    ) -> "Observation":
        """Return the shares of rounds that drafted each position, from an engine's counters.

        Parameters
        ----------
        accepted : how many rounds reach and accept each position.
        rounds, drafted : how many drafted anything, and how many tokens they drafted together. At
            the end of an answer a round drafts no more than is left of it; lengths of shorter
            drafts are taken to be as often 1 as K − 1.
        rounding : standard deviations of the shares of all rounds.

        Raises
        ------
        ValueError
            Counts that rise or exceed the rounds, and rounds that draft other than K tokens, or
            fewer in more than a few of them.
        """
        width, counts = len(accepted), np.asarray(accepted, float)
        check.number("rounds", rounds, FEWEST, MOST_ROUNDS)
        if abs(drafted / rounds - width) > FEWER * width or drafted > rounds * width:
            raise ValueError(
                f"drafted: rounds must draft {width} tokens, as there are positions, or fewer at "
                f"the end of answers; got {drafted / rounds:.2f}"
            )
        places = np.arange(width)
        missing = 2 * (rounds * width - drafted) * places / max(width * (width - 1), 1)
        took_part = rounds - missing
        whole = Observation(counts / rounds, rounds, np.zeros(width))
        rates = np.minimum.accumulate(np.minimum(counts / took_part, 1.0))
        errors = np.hypot(rounding, UNSURE * (rates - whole.accepted))
        return Observation(rates, took_part, errors)

    def check_width(self, width: int) -> None:
        """Raise ValueError unless drafts of ``width`` tokens can have been counted so."""
        if self.is_length and not 1 <= self.accepted[0] <= width + 1:
            raise ValueError(
                f"observed: tokens per call must be from 1 to {width + 1}, all {width} drafted and "
                f"one more; got {self.accepted[0]:g}"
            )
        if not self.is_length and len(self.accepted) != width:
            raise ValueError(
                f"observed: must have the {width} positions that are expected (another K is "
                f"another decode: --num-draft-tokens); got {len(self.accepted)}"
            )


def observed_rates(
    text: str, rounds: float | None, width: int, drafted: float | None = None
) -> Observation:
    """Read printed numbers: accepted at each position over drafts, or tokens per call.

    ``drafted`` is how many tokens were drafted in these rounds, if that was printed, too. Raises
    ValueError for numbers that are neither, that rise, or that drafts of ``width`` tokens cannot
    have, and without rounds.
    """
    words = [word.strip() for word in text.split(",")]
    rates = np.array([check.number("--observed", word, 0, MOST_ROUNDS) for word in words])
    is_length = len(rates) == 1 and bool(rates[0] > 1)
    return _rated(rates, _digits(words), rounds, width, drafted, is_length)


def _digits(words: Sequence[str]) -> Column:
    """Return the standard deviations of the rounding errors of printed numbers."""
    digits = [17 if "e" in word.lower() else len(word.partition(".")[2]) for word in words]
    return 10.0 ** -np.array(digits) / np.sqrt(12)


def _rated(
    rates: Column,
    rounding: Column,
    rounds: float | None,
    width: int,
    drafted: float | None,
    is_length: bool,
) -> Observation:
    """Return the checked observation; errors in the numbers come before missing rounds."""
    seen = Observation(rates, FEWEST, rounding, is_length)
    seen.check_width(width)
    if rounds is None:
        raise ValueError(
            "--rounds: must say over how many rounds (drafts, target calls) the observed numbers "
            "were counted, as their error depends on it; got none"
        )
    check.number("--rounds", rounds, FEWEST, MOST_ROUNDS)
    if drafted is None or is_length:
        return replace(seen, rounds=rounds)
    return Observation.of_counts((rates * rounds).tolist(), rounds, drafted, rounding)


def read_metrics(
    path: str | Path, before: str | Path | None, rounds: float | None, width: int
) -> Observation:
    """Read the Prometheus text of vLLM or SGLang; ``before`` is subtracted from counters.

    Raises OSError or ValueError for files that cannot be read, that hold neither engine's numbers,
    several models, or numbers that drafts of ``width`` tokens cannot have.
    """
    now = _samples(path)
    if not any(name == DRAFTS for name, _ in now):
        lengths = [value for (name, _), value in now.items() if name == LENGTH]
        if len(lengths) != 1 or before is not None:
            raise ValueError(
                f"--metrics: must hold {DRAFTS}_total, or {LENGTH} once in one file, as it is no "
                f"counter; got {len(lengths)} lines in {path}"
            )
        rounding = _digits([repr(lengths[0])])
        return _rated(np.array(lengths), rounding, rounds, width, None, True)
    earlier = {} if before is None else _samples(before)
    counts, places = defaultdict[str, float](float), defaultdict[int, float](float)
    for (name, labels), value in now.items():
        count = value - earlier.get((name, labels), 0.0)
        counts[name] += count
        if name == BY_POSITION and (place := POSITION.search(labels)):
            places[int(place[1])] += count
    if counts[DRAFTS] < FEWEST:
        since = "" if before is None else f" since {before}"
        raise ValueError(
            f"--metrics: must have counted at least {FEWEST} drafts{since} (an engine that has "
            f"just started has counted none); got {counts[DRAFTS]:g} in {path}"
        )
    if not places or sorted(places) != list(range(len(places))):
        raise ValueError(
            "--metrics: must count accepted tokens at positions 0, 1, …; got positions "
            f"{sorted(places)} in {path}"
        )
    accepted = [places[number] for number in range(len(places))]
    try:
        seen = Observation.of_counts(accepted, counts[DRAFTS], counts[DRAFTED])
    except ValueError as error:
        raise ValueError(f"--metrics: {error} in {path}") from None
    seen.check_width(width)
    return seen


def _samples(path: str | Path) -> dict[tuple[str, str], float]:
    """Return name without _total and labels → value, of the lines that are of interest."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise OSError(f"--metrics: must be a readable text; {error}") from None
    samples = {
        (name, labels): check.number(f"--metrics: {written} in {path}", value, 0, MOST_ROUNDS)
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
    not_excluded: tuple[str, ...]  # of an alarm, faults that fit and are nearer: see below
    alike: tuple[str, ...]  # faults that cannot be told from healthy here
    known: int  # how many faults were held against it

    @property
    def sentence(self) -> str:
        """Return the verdict, which names no fault as the one there is."""
        if not self.alarm:
            return "as expected: nothing is off"
        among = f"among {self.known} known faults; an unknown one can look the same"
        if not self.not_excluded:
            return f"not as expected, and every one is excluded {among}"
        return f"not as expected; not excluded {among}: {', '.join(self.not_excluded)}"


def compare_observed(
    healthy: Expectation, seen: Observation, signatures: Mapping[str, Expectation] | None = None
) -> Diagnosis:
    """Return where counts are off, and which faults would explain them.

    Of a healthy engine all tests together raise an alarm with probability 1 − QUIET at most, about:
    each position on both sides, and on one side, for each fault that shows, the sum of gaps in
    whose direction it does, weighted by its size over the counts' variance. Once there is an alarm
    a fault is not excluded if its own test, taken alone, refuses healthy, and no position is off
    from its signature, both at LEVEL: settings that may have been asked for come first, then the
    nearest. That does not make it the one there is: a fault that has no signature here can look
    the same. A fault may have several signatures: what stands behind a
    space in their names does not count.

    Raises
    ------
    ValueError
        Another number of positions than is expected, or more tokens per call than K + 1.
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
            tests.append((name not in CHECKED_FIRST, fault.worst, name, fault.fits, towards))
    limit = critical(len(base.places) + len(tests) / 2, healthy.freedom, QUIET)
    columns = (base.places, base.expected, base.expected_error,
               base.observed, base.observed_error, base.errors)  # fmt: skip
    gaps: list[dict[str, Any]] = [
        dict(zip(GAP, (*numbers, abs(numbers[-1]) > limit), strict=True))
        for numbers in zip(*(column.tolist() for column in columns), strict=True)
    ]
    alarm = any(gap["off"] for gap in gaps) or any(towards > limit for *_, towards in tests)
    single = critical(1 / 2, healthy.freedom)
    fitting = dict.fromkeys(
        name for _, _, name, fits, towards in sorted(tests) if alarm and fits and towards > single
    )
    alike = tuple(name for name in invisible if invisible[name])
    return Diagnosis(gaps, alarm, tuple(fitting), alike, len(invisible))


class _Gaps:
    """Expected and observed numbers, one a position, or tokens per call alone at place 0.

    Errors are the standard errors of what is expected and of what was counted.
    """

    def __init__(self, expectation: Expectation, seen: Observation) -> None:
        self.expectation = expectation
        seen.check_width(len(expectation.if_reached))
        before = np.concatenate([[1.0], seen.accepted[:-1]])
        rounds = np.broadcast_to(seen.rounds, before.shape)
        places = np.flatnonzero(seen.is_length | (before * rounds >= FEWEST))
        before, earlier = before[places], np.concatenate([[0.0], seen.rounding[:-1]])[places]
        self.observed = seen.accepted[places] / before
        rounding = np.hypot(seen.rounding[places], self.observed * earlier) / before
        if seen.is_length:
            self.places, self.means, half = places, [expectation.tokens_per_call], 0.0
            scatter = np.array([expectation.length_scatter])
        else:
            self.places, half = places + 1, 0.5  # continuity correction of a count
            self.means = [expectation.if_reached[place] for place in places.tolist()]
            scatter = np.nan_to_num([expectation.scatter(place) for place in places.tolist()])
        count = before * rounds[places]
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
