"""How a stranger's policy is checked: its errors are borne, its time limited, its rows shrunk."""

import math
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor

from cactus_theory.policies import Policy
from cactus_theory.testing._property import Property, Worst, finding, measure
from cactus_theory.testing._report import Finding, Verdict
from cactus_theory.testing.properties import Behaviour

# the first property makes each call about once, others up to this often (at values of a knob)
ONCE, OFTEN = 2, 40
# factor for a machine that becomes busier than it was during the first calls
BUSIER = 5.0
# seconds after which a row that hung once counts as hanging again
HANG_AGAIN = 1.0
# seconds between two messages to the process that waits for this one
QUIET = 0.2


class Hang(Exception):
    """A rule did not answer in time."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise Hang after so many seconds, where the system can interrupt Python."""
    possible = (
        seconds is not None
        and hasattr(signal, "setitimer")
        and threading.current_thread() is threading.main_thread()
    )
    if not possible:
        yield
        return

    def ring(number: int, frame: FrameType | None) -> NoReturn:
        raise Hang(f"no answer within {seconds:.3g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds or 0.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Clock:
    """The time limit for one property on some rows; None everywhere if ``least`` is None."""

    def __init__(
        self, least: float | None, tell: Callable[[float], None] = lambda seconds: None
    ) -> None:
        self.least = least  # seconds that are always allowed; more rows get more
        self.tell = tell  # called with the seconds that the next answer may take
        self.each = 0.0  # seconds that one drafted token took, the slowest answer so far
        self.last = (-math.inf, 0.0)  # when ``tell`` was called, and with what

    def limit(self, prop: Property, seen: Behaviour, again: bool = False) -> float | None:
        """Return the seconds for a property; ``again`` for a row that may be without an answer."""
        if self.least is None:
            return None
        calls = ONCE if prop.name == "answers" else OFTEN
        seconds = self.least + calls * BUSIER * self.each * _questions(seen)
        now = time.monotonic()
        if now - self.last[0] > QUIET or seconds > self.last[1]:
            self.last = now, seconds
            self.tell(seconds)
        return seconds - self.least + min(self.least / 5, HANG_AGAIN) if again else seconds

    def took(self, seen: Behaviour, seconds: float) -> None:
        """Record how long it took to make each call once."""
        self.each = max(self.each, seconds / _questions(seen))


def _questions(seen: Behaviour) -> int:
    return max(1, int(seen.drafted.sum()))


Pair = tuple[Tensor, Tensor]
Fails = Callable[[Tensor, Tensor], bool]

# decimal places that entries are rounded to, fewest first
DIGITS = (1, 2, 3, 4, 6)


def shrink(q: Tensor, p: Tensor, fails: Fails, seconds: float = 10.0) -> Pair:
    """Return the simplest pair (V,) found that still fails, within a time limit.

    Greedy: leave out or merge tokens, make rows one-hot, uniform or equal, empty single
    entries, round to few digits; start again after every success. At last the tokens are put in
    order, so that what is found does not depend on the order in which they were drawn.
    """
    end = time.monotonic() + seconds
    best = (q, p)
    moved = True
    while moved and time.monotonic() < end:
        moved = False
        for pair in candidates(*best):
            if time.monotonic() >= end:
                break
            if size(pair) < size(best) and fails(*pair):
                best, moved = pair, True
                break
    q, p = best
    order = sorted(range(len(q)), key=lambda token: (-float(q[token]), float(p[token])))
    ordered = q[order], p[order]  # by falling target and rising draft probability
    return ordered if time.monotonic() < end and fails(*ordered) else best


def size(pair: Pair) -> tuple[int, int, int]:
    """Return what shrinking reduces: tokens, digits to write down, entries that are not 0."""
    entries = torch.cat(pair).tolist()
    return len(pair[0]), sum(len(repr(x)) for x in entries), sum(x != 0 for x in entries)


def candidates(q: Tensor, p: Tensor) -> Iterator[Pair]:
    """Yield simpler pairs, the largest reductions first."""
    vocab = len(q)
    for size_left in range(2, vocab):  # halve quickly: keep the first tokens only
        yield from _valid(q[:size_left], p[:size_left])
    for i in range(vocab if vocab > 1 else 0):
        rest = torch.arange(vocab) != i
        yield from _valid(q[rest], p[rest])
        merged = [row[rest].clone() for row in (q, p)]
        for row, whole in zip(merged, (q, p), strict=True):
            row[i - 1 if i else 0] += whole[i]
        yield from _valid(*merged)
    uniform = torch.full_like(q, 1 / vocab)
    hot = torch.eye(vocab, dtype=q.dtype)
    yield (uniform, uniform)
    yield from ((uniform, p), (q, uniform), (p, p), (q, q))
    for row in hot:
        yield from ((row, p), (q, row))
    for digits in DIGITS:
        yield from _valid(_rounded(q, digits), _rounded(p, digits))
        yield from _valid(_rounded(q, digits), p)
        yield from _valid(q, _rounded(p, digits))
    for i in range(vocab):
        for which in (0, 1):
            rows = [q.clone(), p.clone()]
            rows[which][i] = 0.0
            yield from _valid(*rows)


def _rounded(row: Tensor, digits: int) -> Tensor:
    """Return the row rounded, its largest entry taking what is left over."""
    short = (row * 10**digits).round()
    largest = int(short.argmax())
    short[largest] += 10**digits - short.sum()
    return short / 10**digits


def _valid(q: Tensor, p: Tensor) -> Iterator[Pair]:
    """Yield the pair with both rows normalised, nothing if one is empty or negative."""
    rows = []
    for row in (q, p):
        total = row.sum()
        if not total > 0 or (row < 0).any():
            return
        rows.append(row if (total - 1).abs() < 1e-15 else row / total)
    yield rows[0], rows[1]


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
        seconds = self.clock.limit(prop, seen) if limit is None else limit
        with warnings.catch_warnings(), time_limit(seconds):
            warnings.simplefilter("ignore")
            return measure(prop, seen)

    def without_crashes(
        self, prop: Property, behaviours: Iterable[Behaviour]
    ) -> tuple[list[Behaviour], list[Crash]]:
        """Return what the rows without errors do, and the others' errors, up to a few hangs."""
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
            self.worst(prop, seen, self.clock.limit(prop, seen, again=True))
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
        text = _printable(" ".join(str(error).split()))
        fault = f"{type(error).__name__}: {text}"[:500]
        worst = Worst(-math.inf, 0, "the rule itself" + _at(seen), "an answer", fault)
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
        smallest = seen.on(q[None], p[None])
        if broken(q, p):
            q, p = shrink(q, p, broken, self.shrink_seconds)
            smallest = seen.on(q[None], p[None])
            worst = self.worst(prop, smallest)
        worst.about += _at(seen)
        more = {"knobs": seen.knobs, "hint": _likeliest(prop, smallest)}
        rows = q.tolist(), p.tolist()
        return finding(prop, worst, rows, emitted=smallest.emitted[0].tolist(), **more)

    def judge(self, prop: Property, behaviours: list[Behaviour]) -> Verdict:
        """Return the verdict on all rows; broken outweighs late."""
        verdict = partial(Verdict, prop.name, prop.statement)
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
                return verdict("fails", counted, fault.margin, fault)
            counted += worst.counted if not seen.knobs else 0
            least = min(least, worst.margin)
            if worst.margin < 0 and failing is None:
                failing = (seen, worst)
        if failing is not None:
            return verdict("fails", counted, least, self.counterexample(prop, *failing))
        if late is not None:
            return verdict("inconclusive", counted, late.margin, late)
        return verdict("holds", counted, least) if counted else verdict("not checked", 0, None)


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
