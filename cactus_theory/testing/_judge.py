"""Judge one property of one policy on batches of rows, and shrink counterexamples."""

import math
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cactus_theory.policies import Policy
from cactus_theory.testing._clock import ASKED, ONCE, Clock, Hang, time_limit
from cactus_theory.testing._examples import Group
from cactus_theory.testing._report import Finding, Verdict
from cactus_theory.testing._shrink import shrink
from cactus_theory.testing.laws import Behaviour
from cactus_theory.testing.laws import Law as Property

# after this many rows on which the rule hangs, no more are tried
MOST_HANGS = 2
# seconds spent on shrinking such a row
HANG_SECONDS = 3.0
JUMPS = (
    "the answer jumps near these rows; if it is meant to, declare continuous=False, and such "
    "rows are left out"
)

RANGE = "declare knob_range if the knob may not have this value"

Crash = tuple[Behaviour, Exception]


@dataclass
class Worst:
    """The entry with the smallest margin among some rows."""

    margin: float = float("inf")
    row: int = 0
    about: str = ""
    expected: str = ""
    found: str = ""
    counted: int = 0


def measure(prop: Property, seen: Behaviour, limit: float | None = None) -> Worst:
    """Return the worst entry of a property on a batch; a rule's own exceptions pass through."""
    worst, counted = Worst(), set()
    if seen.q.shape[-1] > prop.widest:
        return worst
    with warnings.catch_warnings(), time_limit(limit):
        warnings.simplefilter("ignore")
        for bounds in prop.measure(seen):
            if worst.margin < 0:  # a property's first bounds are the easiest to understand
                break
            margins = bounds.margins()
            owners = torch.arange(len(margins)) if bounds.rows is None else bounds.rows
            counts = torch.ones(margins.shape) if bounds.counts is None else bounds.counts
            used = counts.reshape(len(margins), -1).any(-1)
            counted |= set(owners[used].tolist())
            if margins.numel() and float(margins.min()) < worst.margin:
                # numpy's unravel_index, as the first call of torch's imports for a second
                found = np.unravel_index(int(margins.argmin()), tuple(margins.shape))
                index = tuple(int(i) for i in found)
                worst = Worst(float(margins.min()), int(owners[index[0]]), *bounds.describe(index))
    worst.counted = len(counted)
    return worst


@dataclass
class Checker:
    """How properties are checked; see :func:`cactus_theory.testing._runner.check_rule`."""

    rule: Policy
    verify: Callable[..., Any] | None = None
    clock: Clock = field(default_factory=lambda: Clock(None))
    shrink_seconds: float = 10.0

    def behaviour(
        self, group: Group, rule: Policy | None = None, knobs: dict[str, float] | None = None
    ) -> Behaviour:
        """Return the rule, or the rule at other knobs, on a batch of rows."""
        return Behaviour(self.rule if rule is None else rule, *group, self.verify, knobs)

    def without_crashes(
        self, prop: Property, behaviours: Iterable[Behaviour]
    ) -> tuple[list[Behaviour], list[Crash]]:
        """Return the behaviour on the rows without errors, and the other rows with theirs.

        After a few rows on which the rule hangs, the rest is not tried.
        """
        sound: list[Behaviour] = []
        crashed: list[Crash] = []
        for seen in behaviours:
            try:
                start = time.monotonic()
                measure(prop, seen, self.clock.limit(seen, _asked(prop)))
                self.clock.took(seen, time.monotonic() - start)
                sound.append(seen)
            except Exception as error:  # noqa: BLE001  whatever the user's code raises
                good, bad = self.one_by_one(prop, seen)
                crashed += bad or [(seen, error)]
                if good and bad:
                    sound.append(seen.on(seen.q[good], seen.p[good]))
                if sum(isinstance(e, Hang) for _, e in crashed) >= MOST_HANGS:
                    break
        return sound, crashed

    def one_by_one(self, prop: Property, seen: Behaviour) -> tuple[list[int], list[Crash]]:
        """Return which rows of a batch are sound, and the others with their errors."""
        good: list[int] = []
        bad: list[Crash] = []
        for i in range(len(seen.q)):
            row = seen.on(seen.q[i : i + 1], seen.p[i : i + 1])
            error = self.error_on(prop, row)
            if error is None:
                good.append(i)
                continue
            bad.append((row, error))
            if sum(isinstance(e, Hang) for _, e in bad) >= MOST_HANGS:
                break
        return good, bad

    def error_on(self, prop: Property, seen: Behaviour) -> Exception | None:
        """Return what the rule raises there, if anything."""
        try:
            measure(prop, seen, self.clock.limit_again(seen, _asked(prop)))
        except Exception as error:  # noqa: BLE001  whatever the user's code raises
            return error
        return None

    def with_numbers(self, seen: Behaviour) -> Behaviour:
        """Return the behaviour on the rows where every answer is a finite number."""
        finite = seen.phi.isfinite().all(-1)
        finite[seen.pairs[0][~seen.recovered.isfinite().all(-1)]] = False
        return seen if bool(finite.all()) else seen.on(seen.q[finite], seen.p[finite])

    def crash(self, prop: Property, seen: Behaviour, error: Exception) -> Finding:
        """Return the finding for rows on which the rule raised."""
        q, p = seen.q[0], seen.p[0]
        if len(seen.q) == 1:

            def again(q: Tensor, p: Tensor) -> bool:
                return type(self.error_on(prop, seen.on(q[None], p[None]))) is type(error)

            most = HANG_SECONDS if isinstance(error, Hang) else self.shrink_seconds
            q, p = shrink(q, p, again, min(most, self.shrink_seconds))
            error = self.error_on(prop, seen.on(q[None], p[None])) or error
        said = _printable(" ".join(str(error).split()))
        return Finding(
            prop.name,
            prop.statement,
            q.tolist(),
            p.tolist(),
            "the rule itself" + _at(seen),
            "an answer",
            f"{type(error).__name__}: {said}"[:500],
            -float("inf"),
            knobs=seen.knobs,
            hint="" if isinstance(error, Hang) else _likeliest(prop, seen),
        )

    def counterexample(self, prop: Property, seen: Behaviour, worst: Worst) -> Finding:
        """Return the finding for a broken property, on rows as simple as possible."""

        def broken(q: Tensor, p: Tensor) -> bool:
            other = seen.on(q[None], p[None])
            try:
                margin = measure(prop, other, self.clock.limit(other, _asked(prop))).margin
            except Exception:  # noqa: BLE001  whatever the user's code raises
                return False
            return margin < 0 and math.isfinite(margin) == math.isfinite(worst.margin)

        q, p = seen.q[worst.row], seen.p[worst.row]
        found = seen.on(q[None], p[None])
        if broken(q, p):
            q, p = shrink(q, p, broken, self.shrink_seconds)
            found = seen.on(q[None], p[None])
            worst = measure(prop, found, self.clock.limit(found, _asked(prop)))
        return Finding(
            prop.name,
            prop.statement,
            q.tolist(),
            p.tolist(),
            worst.about + _at(seen),
            worst.expected,
            worst.found,
            worst.margin,
            found.emitted[0].tolist(),
            seen.knobs,
            _likeliest(prop, found),
        )

    def judge(self, prop: Property, behaviours: list[Behaviour]) -> Verdict:
        """Return the verdict on all rows; broken outweighs late."""
        counted, least, failing, late = 0, float("inf"), None, None
        for seen in behaviours:
            if not prop.applies(seen.rule):
                continue
            try:
                worst = measure(prop, seen, self.clock.limit(seen, _asked(prop)))
            except Exception:  # noqa: BLE001  whatever the user's code raises
                _, crashed = self.without_crashes(prop, [seen])
                if not crashed:
                    continue
                finding = self.crash(prop, *crashed[0])
                if isinstance(crashed[0][1], Hang):
                    late = late or finding
                    continue
                return Verdict(prop.name, prop.statement, "fails", counted, finding.margin, finding)
            counted += worst.counted if not seen.knobs else 0
            least = min(least, worst.margin)
            if worst.margin < 0 and failing is None:
                failing = (seen, worst)
        if failing is not None:
            finding = self.counterexample(prop, *failing)
            return Verdict(prop.name, prop.statement, "fails", counted, least, finding)
        if late is not None:
            return Verdict(prop.name, prop.statement, "inconclusive", counted, late.margin, late)
        if not counted:
            return Verdict(prop.name, prop.statement, "not checked", 0, None)
        return Verdict(prop.name, prop.statement, "holds", counted, least)


def _printable(text: str) -> str:
    """Return a text without codes that a terminal obeys or that cannot be written as UTF-8."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _asked(prop: Property) -> int:
    """Return how often a property makes each call."""
    return ONCE if prop.name == "answers" else ASKED


def _at(seen: Behaviour) -> str:
    """Return the knobs that were changed, in words."""
    return "".join(f" at {name}={value:.6g}" for name, value in seen.knobs.items())


def _likeliest(prop: Property, seen: Behaviour) -> str:
    """Return the likeliest cause of a failure: an undeclared jump, or the property's own hint."""
    source = getattr(seen.rule, "source", None)
    if seen.knobs and source is not None and source.knob_range is None:
        return f"{prop.hint}; or {RANGE}" if prop.hint else RANGE
    try:
        if prop.steady and seen.rule.declares.continuous and bool(seen.jumps.any()):
            return JUMPS
    except Exception:  # noqa: BLE001, S110  whatever the user's code raises on moved rows
        pass
    return prop.hint
