"""Hold what an engine counted against what is expected: which position is off, and by how much.

Positions are compared among the tokens that reach them, since an early fault lowers every later
count. Errors are the expectation's over texts, and those of the counts: binomial, or larger as
rounds of one text are alike in the trace. Counts do not say which text they are from, so these
are rough, and texts that both have in common count as if they differed.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from cactus_theory.traces.estimate import Estimate
from cactus_theory.traces.expect import Expectation, critical
from cactus_theory.traces.observed import Observation

# a position that fewer rounds reached is not judged: its share is no normal number
FEWEST = 10
Column = Float[np.ndarray, "features"]


@dataclass(frozen=True)
class Gap:
    """One compared number. ``position`` is 0 for tokens per call; ``errors`` how many it is off."""

    position: int
    expected: float
    expected_error: float
    observed: float
    observed_error: float
    errors: float
    off: bool


@dataclass(frozen=True, eq=False)
class Comparison:
    """An observation against an expectation and against known faults.

    Attributes
    ----------
    gaps : one a position that enough rounds reached; one for tokens per call if that is all
        that was counted.
    alarm : whether healthy is refused: a gap, or the observation moved towards some fault.
    named : faults that fit and that healthy was refused in favour of, the nearest first.
    alike : faults that would look healthy here.
    """

    gaps: tuple[Gap, ...]
    alarm: bool
    named: tuple[str, ...]
    alike: tuple[str, ...]


def compare_observed(
    healthy: Expectation, seen: Observation, signatures: Mapping[str, Expectation] | None = None
) -> Comparison:
    """Return where counts are off, and which faults would explain them.

    Of a healthy engine all tests together raise an alarm with probability 1 − LEVEL, about: each
    position, and for each fault the weighted sum of gaps in whose direction it shows. A fault is
    named if its own test alarms and no position is off from its signature.

    Raises
    ------
    ValueError
        Another number of positions than is expected.

    Examples
    --------
    >>> rows = torch.tensor([[0.5, 0.5], [0.2, 0.8]], dtype=torch.float64)
    >>> cycle = Cycle(0, 0, torch.tensor([1]), rows, torch.tensor([[0.2, 0.8]]).double())
    >>> seen = expect(save_trace("many", [[cycle]] * 9, vocab_size=2, num_draft_tokens=1))
    >>> compare_observed(seen, observed_rates("0.40", 500)).alarm
    True
    """
    signatures = {} if signatures is None else signatures
    base = _Features.of(healthy, seen)
    tests = len(base.places) + len(signatures)
    reach = critical(tests, healthy.freedom)
    errors = base.errors()
    columns = base.places, base.expected, base.known, base.observed, base.spread, errors
    gaps = tuple(
        Gap(int(place), expected, known, observed, spread, off, abs(off) > reach)
        for place, expected, known, observed, spread, off in zip(
            *(own.tolist() for own in columns),
            strict=True,
        )
    )
    named, alike, alarm = [], [], any(gap.off for gap in gaps)
    for name, signature in signatures.items():
        other = _Features.of(signature, seen)
        step = other.expected - base.expected
        noise = np.hypot(base.known, other.known)
        if not (np.abs(step) > reach * noise).any():
            alike.append(name)
            continue
        towards = base.along(step / base.spread**2) > reach
        alarm |= towards
        worst = float(np.abs(other.errors()).max())
        if towards and worst <= critical(len(other.places), signature.freedom):
            named.append((worst, name))
    return Comparison(gaps, alarm, tuple(name for _, name in sorted(named)), tuple(alike))


@dataclass(frozen=True, eq=False)
class _Features:
    """Numbers that are compared, one a position; all that is known of them.

    ``known`` and ``spread`` are the standard errors of what is expected and of what was counted.
    """

    places: Column
    expected: Column
    known: Column
    means: list[Estimate]
    of_means: Expectation
    observed: Column
    spread: Column
    half: Column

    @classmethod
    def of(cls, own: Expectation, seen: Observation) -> "_Features":
        """Return the numbers of an observation, and their errors under an expectation."""
        if seen.accepted is None:
            return cls._made(
                own, np.zeros(1), [own.tokens_per_call], np.array([seen.tokens_per_call]),
                np.array([seen.rounds]), np.array([own.length_scatter]), seen.rounding, 0.0,
            )  # fmt: skip
        width = len(own.if_reached)
        if len(seen.accepted) != width:
            raise ValueError(
                f"observed: must have the {width} positions that are expected (another K is "
                f"another decode); got {len(seen.accepted)}"
            )
        before = np.concatenate([[1.0], seen.accepted[:-1]])
        on = before * seen.rounds >= FEWEST
        rates = seen.accepted[on] / before[on]
        count = before[on] * seen.rounds
        earlier = np.concatenate([[0.0], seen.rounding[:-1]])[on]
        rounding = np.hypot(seen.rounding[on], rates * earlier) / before[on]
        places = np.flatnonzero(on)
        means = [own.if_reached[place] for place in places.tolist()]
        # of a rate near 0 or 1, and where rounds of a text differ less than coins, the binomial's
        near = (count * np.array([mean.value for mean in means]) + 0.5) / (count + 1)
        scatter = np.maximum([own.scatter(place) for place in places.tolist()], near * (1 - near))
        return cls._made(own, places + 1.0, means, rates, count, scatter, rounding, 0.5)

    @classmethod
    def _made(
        cls,
        own: Expectation,
        places: Column,
        means: list[Estimate],
        observed: Column,
        count: Column,
        scatter: Column,
        rounding: Column,
        half: float,
    ) -> "_Features":
        return cls(
            places=places,
            expected=np.nan_to_num(np.array([mean.value for mean in means])),
            known=np.nan_to_num(np.array([own.error(mean) for mean in means])),
            means=means,
            of_means=own,
            observed=observed,
            spread=np.hypot(np.sqrt(scatter / count), rounding),
            half=half / count,
        )

    def errors(self) -> Column:
        """Return by how many standard errors each number is off, less the step of one round."""
        gap = self.observed - self.expected
        gap = np.sign(gap) * np.maximum(np.abs(gap) - self.half, 0.0)
        return gap / np.hypot(self.spread, self.known)

    def along(self, weights: Column) -> float:
        """Return by how many standard errors the weighted sum of gaps is above 0."""
        value = float(weights @ (self.observed - self.expected))
        left_out = weights @ np.nan_to_num(np.array([mean.left_out for mean in self.means]))
        known = self.of_means.error(Estimate(value, left_out, ""))
        return value / float(np.hypot(np.linalg.norm(weights * self.spread), known) + 1e-300)
