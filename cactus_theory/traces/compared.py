"""Hold what an engine counted against what is expected: which position is off, and by how much.

Positions are compared among the tokens that reach them, since an early fault lowers every later
count. Errors are the expectation's over texts, and those of the counts: binomial, or larger where
rounds of one text are alike in the trace. Counts do not say which text they are from, so these
are rough.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from cactus_theory.traces.estimate import Estimate
from cactus_theory.traces.expect import Expectation, critical
from cactus_theory.traces.observed import Observation

# of all tests of one comparison together: of 50 healthy engines one may raise an alarm
QUIET = 0.98
# a position that fewer rounds reached is not judged: its share is no normal number
FEWEST = 10
Column = Float[np.ndarray, "numbers"]


GAP: tuple[str, ...] = (
    "position",
    "expected",
    "expected_error",
    "observed",
    "observed_error",
    "errors",
    "off",
)


@dataclass(frozen=True, eq=False)
class Verdict:
    """An observation against an expectation and against known faults.

    Attributes
    ----------
    gaps : one a position that enough rounds reached, keys GAP; at position 0 tokens per call, if
        those were counted. ``errors`` is how many standard errors it is off.
    alarm : whether healthy is refused: by a gap, or in favour of some fault.
    named : of an alarm, faults that fit and are nearer than healthy, the nearest first.
    alike : faults that would look healthy here.
    """

    gaps: Sequence[dict[str, Any]]
    alarm: bool
    named: tuple[str, ...]
    alike: tuple[str, ...]


def compare_observed(
    healthy: Expectation, seen: Observation, signatures: Mapping[str, Expectation] | None = None
) -> Verdict:
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
    >>> seen = Observation(np.array([0.51, 0.24, 0.1, 0.05]), 500, np.zeros(4))
    >>> healthy, faulty = (of("simulations/data/trace") for of in (expect, row_signatures))
    >>> compare_observed(healthy, seen, faulty).named
    ('no-draft-law',)
    """
    signatures = {} if signatures is None else signatures
    base, shown = _Numbers(healthy, seen), []
    least = critical(len(base.places), healthy.freedom)
    for name, signature in signatures.items():
        other = _Numbers(signature, seen)
        step = other.expected - base.expected
        if (np.abs(step) > least * base.apart(other)).any():
            shown.append((name.partition(" ")[0], other, base.along(step / base.spread**2)))
    reach = critical(len(base.places) + len(shown) / 2, healthy.freedom, QUIET)
    columns = base.places, base.expected, base.known, base.observed, base.spread, base.errors
    lines = zip(*(own.tolist() for own in columns), strict=True)
    gaps = [dict(zip(GAP, (*own, abs(own[-1]) > reach), strict=True)) for own in lines]
    alarm = any(gap["off"] for gap in gaps) or any(towards > reach for *_, towards in shown)
    alone = critical(1 / 2, healthy.freedom)
    named = [
        (other.worst, name)
        for name, other, towards in shown
        if alarm and towards > alone and other.fits
    ]
    nearest = dict.fromkeys(name for _, name in sorted(named))
    names = dict.fromkeys(name.partition(" ")[0] for name in signatures)
    alike = names.keys() - {name for name, *_ in shown}
    return Verdict(gaps, alarm, tuple(nearest), tuple(own for own in names if own in alike))


class _Numbers:
    """Expected and observed numbers, one a position, or tokens per call alone at place 0.

    ``known`` and ``spread`` are the standard errors of what is expected and of what was counted.
    """

    def __init__(self, own: Expectation, seen: Observation) -> None:
        self.own, width = own, len(own.if_reached)
        count, self.observed, rounding = np.array([seen.rounds]), seen.accepted, seen.rounding
        self.places, self.means, step = np.zeros(1, int), [own.tokens_per_call], 0.0
        scatter = np.array([own.length_scatter])
        if seen.is_length and seen.accepted[0] > width + 1:
            raise ValueError(
                f"observed: tokens per call must be at most {width + 1}, all {width} drafted and "
                f"one more; got {seen.accepted[0]:g}"
            )
        if not seen.is_length:
            if len(seen.accepted) != width:
                raise ValueError(
                    f"observed: must have the {width} positions that are expected (another K is "
                    f"another decode); got {len(seen.accepted)}"
                )
            before = np.concatenate([[1.0], seen.accepted[:-1]])
            on = np.flatnonzero(before * seen.rounds >= FEWEST)
            before, earlier = before[on], np.concatenate([[0.0], rounding[:-1]])[on]
            count, step, self.places = before * seen.rounds, 0.5, on + 1
            self.observed = seen.accepted[on] / before
            rounding = np.hypot(rounding[on], self.observed * earlier) / before
            self.means = [own.if_reached[place] for place in on.tolist()]
            # of a rate near 0 or 1, and where rounds of a text differ less than coins: binomial
            rates = np.clip(np.nan_to_num([mean.value for mean in self.means]), 0, 1)
            near = (count * rates + 0.5) / (count + 1)
            scatter = np.nan_to_num([own.scatter(place) for place in on.tolist()])
            scatter = np.maximum(scatter, near * (1 - near))
        self.expected = np.nan_to_num(np.array([mean.value for mean in self.means]))
        self.known = np.nan_to_num(np.array([own.error(mean) for mean in self.means]))
        self.spread = np.hypot(np.sqrt(scatter / count), rounding)
        gap = self.observed - self.expected
        less = np.sign(gap) * np.maximum(np.abs(gap) - step / count, 0.0)
        self.errors: Column = less / np.hypot(self.spread, self.known)

        self.worst = float(np.abs(self.errors).max())
        self.fits = self.worst <= critical(len(self.places), own.freedom)

    def apart(self, other: "_Numbers") -> Column:
        """Return the standard errors of differences of what is expected, paired if of one trace."""
        if self.own.replay.source != other.own.replay.source:
            return np.hypot(self.known, other.known)
        pairs = zip(self.means, other.means, strict=True)
        return np.nan_to_num([self.own.error(first - second) for first, second in pairs])

    def along(self, weights: Column) -> float:
        """Return by how many standard errors the weighted sum of gaps is above 0."""
        value = float(weights @ (self.observed - self.expected))
        left_out = weights @ np.nan_to_num(np.array([mean.left_out for mean in self.means]))
        known = self.own.error(Estimate(value, left_out, ""))
        return value / float(np.hypot(np.linalg.norm(weights * self.spread), known) + 1e-300)
