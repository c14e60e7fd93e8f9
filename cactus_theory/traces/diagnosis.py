"""Compare an engine's counts with expected acceptance: which position is off, and by how much.

Positions are compared among the rounds that accept the one before, since an early fault lowers
every later count, and shown among those that reach them. An end of text is a place that is not
reached, on both sides or on none. Errors are the expectation's over texts, and those of the
counts: the coins', and again those of texts, of which an engine may have fewer and longer ones
than were logged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from operator import ne
from typing import Any

import numpy as np

from cactus_theory.base.significance import QUIET
from cactus_theory.traces.counters import FEWEST, Column, Observation
from cactus_theory.traces.estimate import CannotSay, Estimate, check_texts
from cactus_theory.traces.expect import Expectation, critical
from cactus_theory.traces.faults import CHECKED_FIRST

GAP = "position", "expected", "expected_error", "observed", "observed_error", "errors", "off"
ASKED = {
    "behind_ends": "--behind-ends: must say whether the engine's numbers have places behind an end "
    "of text in them (in, as vLLM's; out)",
    "short_ends": "--drafted: must say how many tokens were drafted in these rounds, as engines "
    "draft less where a text ends",
}


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """An observation against an expectation and against known faults.

    A gap, keys GAP, is of a position that enough rounds reached; ``errors`` is how many standard
    errors it is off.
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
        known, look = f"of {self.known} known faults", "(an unknown fault can look the same)"
        if not self.not_excluded:
            return f"not as expected; {known} all are excluded {look}"
        return f"not as expected; {known} not excluded {look}: {', '.join(self.not_excluded)}"


def compare_observed(
    healthy: Expectation, seen: Observation, signatures: Mapping[str, Expectation] | None = None
) -> Diagnosis:
    """Return where counts are off, and which faults would explain them.

    Of a healthy engine all tests together raise an alarm with probability 1 − QUIET at most, about:
    each position on both sides, and on one side, for each fault that shows, the sum of gaps in
    whose direction it does, weighted by its size over the counts' variance. Once there is an alarm
    a fault is not excluded if its own test, taken alone, refuses healthy, and no position is off
    from its signature, both at EXPECTED: settings that may have been asked for come first, then the
    nearest. That does not make it the one there is: a fault that has no signature here can look
    the same. A fault may have several signatures: what stands behind a space in their names does
    not count. What the observation does not know is tried both ways.

    Raises
    ------
    ValueError
        Another number of positions than is expected; something unknown on which the verdict
        depends; CannotSay for too few texts.
    """
    check_texts(healthy.texts)
    seen.check_width(len(healthy.accepted))
    record, unlike = healthy.record, {"behind_ends": (seen.behind_ends,), "short_ends": (False,)}
    if seen.behind_ends is None:
        unlike["behind_ends"] = (False,) if record.going.all() else (False, True)
    if seen.drafted is seen.shares is None and (record.left < record.lengths).any():
        unlike["short_ends"] = (False, True)
    found = {}
    for way in product(*unlike.values()):
        options = dict(zip(unlike, way, strict=True))
        faults = {name: own.counted(**options) for name, own in (signatures or {}).items()}
        found[way] = _compared(healthy.counted(**options), seen, faults)
    for one, other in combinations(found, 2):
        if found[one].alarm != found[other].alarm and sum(map(ne, one, other)) == 1:
            asked = ASKED["behind_ends" if one[0] != other[0] else "short_ends"]
            raise ValueError(f"{asked}; the verdict depends on it; got none")
    return next(iter(found.values()))


def _compared(
    healthy: Expectation, seen: Observation, signatures: Mapping[str, Expectation]
) -> Diagnosis:
    base, tests = _Gaps(healthy, seen), []
    reach = critical(len(base.places), healthy.freedom)
    invisible: dict[str, bool] = {}
    for spec, signature in signatures.items():
        name, fault = spec.partition(" ")[0], _Gaps(signature, seen, base.places)
        step = fault.expected - base.expected
        visible = bool((np.abs(step) > reach * base.step_error(fault)).any())
        invisible[name] = invisible.get(name, True) and not visible
        if visible:
            towards = base.towards(step / base.observed_error**2)
            tests.append((name not in CHECKED_FIRST, fault.worst, name, fault.fits, towards))
    limit = critical(len(base.places) + len(tests) / 2, healthy.freedom, QUIET)
    gaps: list[dict[str, Any]] = [
        dict(zip(GAP, (int(place), *numbers, abs(numbers[-1]) > limit), strict=True))
        for place, *numbers in zip(*(column.tolist() for column in base.columns), strict=True)
    ]
    alarm = any(gap["off"] for gap in gaps) or any(towards > limit for *_, towards in tests)
    single = critical(1 / 2, healthy.freedom)
    fitting = dict.fromkeys(
        name for _, _, name, fits, towards in sorted(tests) if alarm and fits and towards > single
    )
    alike = tuple(name for name in invisible if invisible[name])
    return Diagnosis(gaps, alarm, tuple(fitting), alike, len(invisible))


class _Gaps:
    """Expected and observed numbers, one a position.

    They are shares of rounds that accept the place before; ``columns`` shows them of those that
    reach it. Errors are the standard errors of what is expected and of what was counted.
    """

    def __init__(self, expectation: Expectation, seen: Observation, places: Any = None) -> None:
        self.expectation = expectation
        before = np.concatenate([[1.0], seen.accepted[:-1]])
        mass, on, reached = expectation.mass
        if places is None:
            enough = np.minimum(before * seen.rounds, mass[: len(before)]) >= FEWEST
            places = np.flatnonzero(enough)
        if not len(places):
            raise CannotSay(f"cannot say: at least {FEWEST} rounds must be expected and counted")
        self.places = places
        self.means = [expectation.if_accepted[place] for place in places]
        self.expected = np.nan_to_num([mean.value for mean in self.means])
        self.expected_error = np.nan_to_num([expectation.error(mean) for mean in self.means])
        self.shown = (reached / np.maximum(mass, 1e-300))[places]
        # texts are as many in the counts as here, over this: as many rounds, or fewer and longer
        of_texts = expectation.texts / seen.answers if seen.answers else 0.0
        self.fewer = max(expectation.rounds / seen.rounds, of_texts)
        if seen.by_request is not None:  # errors of requests have in them what texts share
            self.fewer = 0.0
        low = high = seen.accepted[places] / before[places]
        if seen.drafted is not None or seen.shares is not None:
            own = (reached / np.maximum(on, 1e-300))[places]
            low, high = (low * own / share[places] for share in reversed(seen.drafted_share()))
        self.observed: Column = np.clip(self.expected, low, high)
        self._errors(seen, before[places])

    def _errors(self, seen: Observation, before: Column) -> None:
        """Set what is counted as errors, and by how many the counts are off."""
        count, places = before * seen.rounds, self.places
        earlier = np.concatenate([[0.0], seen.rounding[:-1]])[places]
        rounding = np.hypot(seen.rounding[places], self.observed * earlier) / before
        coins = np.array([self.expectation.coins(place) for place in places]) / count
        # of a rate near 0 or 1, and where rounds of a text differ less than coins: binomial
        rate = (count * np.clip(self.expected, 0, 1) + 0.5) / (count + 1)
        binomial = rate * (1 - rate) / count
        texts = self.expected_error**2 * self.fewer
        requests = 0.0 if seen.by_request is None else seen.by_request[places] ** 2
        own = np.maximum(np.maximum(coins, binomial - texts), requests)
        self.alone = own + rounding**2  # what texts do not share
        self.observed_error = np.sqrt(texts + self.alone)
        self.gap = self.observed - self.expected
        size = np.maximum(np.abs(self.gap) - 0.5 / count, 0.0)
        error = np.hypot(self.observed_error, self.expected_error)
        self.errors: Column = np.sign(self.gap) * size / np.maximum(error, 1e-300)
        self.worst = float(np.abs(self.errors).max(initial=0.0))
        self.fits = self.worst <= critical(len(places), self.expectation.freedom)

    @property
    def columns(self) -> tuple[Column, ...]:
        """Return the columns of GAP but the last one."""
        numbers = self.expected, self.expected_error, self.observed, self.observed_error
        return self.places + 1.0, *(own / self.shown for own in numbers), self.errors

    def step_error(self, other: "_Gaps") -> Column:
        """Return the standard errors of differences of what is expected of one trace."""
        pairs = zip(self.means, other.means, strict=True)
        return np.nan_to_num([self.expectation.error(first - second) for first, second in pairs])

    def towards(self, weights: Column) -> float:
        """Return by how many standard errors the weighted sum of gaps is above 0."""
        left_out = np.nan_to_num([mean.left_out for mean in self.means])
        errors = [self.expectation.error(Estimate(0.0, own @ left_out, ""))
                  for own in (weights, weights * np.sqrt(self.fewer))]  # fmt: skip
        error = np.sqrt(np.square(errors).sum() + (weights**2 * self.alone).sum())
        return float(weights @ self.gap / max(error, 1e-300))
