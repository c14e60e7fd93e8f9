"""The loop of every check: measure properties on examples, keep the simplest counterexample.

:func:`broken` is all that verifiers, drafters, schedules and divergences need. A policy may come
from a stranger: a :class:`Checker` bears its errors, limits its time and shrinks its rows.
"""

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
from cactus_theory.testing._property import Property, Seen
from cactus_theory.testing._report import Finding, Verdict, message
from cactus_theory.testing._shrink import Pair, shrink
from cactus_theory.testing.laws import Behaviour

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

    margin: float = math.inf
    row: int = 0
    about: str = ""
    expected: str = ""
    found: str = ""
    counted: int = 0


def measure(prop: Property, seen: Seen) -> Worst:
    """Return the worst entry of a property on a batch; foreign exceptions pass through."""
    worst, counted = Worst(), set()
    if seen.width > prop.widest:
        return worst
    for bounds in prop.measure(seen):
        margins = bounds.margins()
        if not margins.numel():
            continue
        owners = torch.arange(len(margins)) if bounds.rows is None else bounds.rows
        used = slice(None)
        if bounds.counts is not None:
            used = bounds.counts.reshape(len(margins), -1).any(-1)
        counted |= set(owners[used].tolist())
        if float(margins.min()) < worst.margin:
            # numpy's unravel_index, as the first call of torch's imports for a second
            found = np.unravel_index(int(margins.argmin()), tuple(margins.shape))
            index = tuple(int(i) for i in found)
            worst = Worst(float(margins.min()), int(owners[index[0]]), *bounds.describe(index))
        if worst.margin < 0:  # a property's first bounds are the easiest to understand
            break
    worst.counted = len(counted)
    return worst


def finding(
    prop: Property, worst: Worst, rows: tuple[list[float], list[float]] = ([], []), **more: Any
) -> Finding:
    """Return what is known about a broken property; ``more`` are the last fields."""
    numbers = worst.about, worst.expected, worst.found, worst.margin
    return Finding(prop.name, prop.statement, *rows, *numbers, **more)


def broken(thing: str, examples: Iterable[Seen], properties: Iterable[Property]) -> str:
    """Return what a failing test says of the first broken property; nothing if all hold.

    The examples come in the order of their size: the first that fails is the smallest.
    """
    chosen = list(properties)
    for seen in examples:
        for prop in chosen:
            worst = measure(prop, seen)
            if worst.margin < 0:
                fault = finding(prop, worst, hint=prop.hint)
                again = seen.again(worst.row, prop.name)
                return message(thing, fault, example=seen.shown(worst.row), again=again)
    return ""


@dataclass
class Checker:
    """How properties are checked; see :func:`cactus_theory.testing._policies.check_rule`."""

    rule: Policy
    verify: Callable[..., Any] | None = None
    clock: Clock = field(default_factory=lambda: Clock(None))
    shrink_seconds: float = 10.0

    def behaviour(
        self, group: Pair, rule: Policy | None = None, knobs: dict[str, float] | None = None
    ) -> Behaviour:
        """Return the rule, or the rule at other knobs, on a batch of rows."""
        return Behaviour(self.rule if rule is None else rule, *group, self.verify, knobs)

    def worst(self, prop: Property, seen: Behaviour, limit: float | None = None) -> Worst:
        """Return the worst entry of a property, in limited time; the rule's exceptions pass."""
        asked = ONCE if prop.name == "answers" else ASKED
        seconds = self.clock.limit(seen, asked) if limit is None else limit
        with warnings.catch_warnings(), time_limit(seconds):
            warnings.simplefilter("ignore")
            return measure(prop, seen)

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
                self.worst(prop, seen)
                self.clock.took(seen, time.monotonic() - start)
                sound.append(seen)
            except Exception as error:  # whatever the user's code raises
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
            asked = ONCE if prop.name == "answers" else ASKED
            self.worst(prop, seen, self.clock.limit_again(seen, asked))
        except Exception as error:  # whatever the user's code raises
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
        found = f"{type(error).__name__}: {said}"[:500]
        worst = Worst(-math.inf, 0, "the rule itself" + _at(seen), "an answer", found)
        hint = "" if isinstance(error, Hang) else _likeliest(prop, seen)
        return finding(prop, worst, (q.tolist(), p.tolist()), knobs=seen.knobs, hint=hint)

    def counterexample(self, prop: Property, seen: Behaviour, worst: Worst) -> Finding:
        """Return the finding for a broken property, on rows as simple as possible."""

        def broken(q: Tensor, p: Tensor) -> bool:
            other = seen.on(q[None], p[None])
            try:
                margin = self.worst(prop, other).margin
            except Exception:  # whatever the user's code raises
                return False
            return margin < 0 and math.isfinite(margin) == math.isfinite(worst.margin)

        q, p = seen.q[worst.row], seen.p[worst.row]
        found = seen.on(q[None], p[None])
        if broken(q, p):
            q, p = shrink(q, p, broken, self.shrink_seconds)
            found = seen.on(q[None], p[None])
            worst = self.worst(prop, found)
        worst.about += _at(seen)
        more = {"knobs": seen.knobs, "hint": _likeliest(prop, found)}
        rows = q.tolist(), p.tolist()
        return finding(prop, worst, rows, emitted=found.emitted[0].tolist(), **more)

    def judge(self, prop: Property, behaviours: list[Behaviour]) -> Verdict:
        """Return the verdict on all rows; broken outweighs late."""
        counted, least, failing, late = 0, math.inf, None, None
        for seen in behaviours:
            if not prop.applies(seen.rule):
                continue
            try:
                worst = self.worst(prop, seen)
            except Exception:  # whatever the user's code raises
                _, crashed = self.without_crashes(prop, [seen])
                if not crashed:
                    continue
                fault = self.crash(prop, *crashed[0])
                if isinstance(crashed[0][1], Hang):
                    late = late or fault
                    continue
                return Verdict(prop.name, prop.statement, "fails", counted, fault.margin, fault)
            counted += worst.counted if not seen.knobs else 0
            least = min(least, worst.margin)
            if worst.margin < 0 and failing is None:
                failing = (seen, worst)
        if failing is not None:
            fault = self.counterexample(prop, *failing)
            return Verdict(prop.name, prop.statement, "fails", counted, least, fault)
        if late is not None:
            return Verdict(prop.name, prop.statement, "inconclusive", counted, late.margin, late)
        if not counted:
            return Verdict(prop.name, prop.statement, "not checked", 0, None)
        return Verdict(prop.name, prop.statement, "holds", counted, least)


def _printable(text: str) -> str:
    """Return a text without codes that a terminal obeys or that cannot be written as UTF-8."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


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
    except Exception:  # whatever the user's code raises on moved rows
        pass
    return prop.hint
