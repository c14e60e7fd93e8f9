"""Check properties of one policy: its errors become findings, and failing rows are shrunk.

``_check_policies.check_policy`` uses the :class:`Checker` of this module.
"""

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cactus_theory.policies import Policy, read_policy
from cactus_theory.testing.definition import Property, Worst, finding, measure
from cactus_theory.testing.properties import Behaviour
from cactus_theory.testing.report import Finding, PropertyVerdict

Pair = tuple[Tensor, Tensor]
Fails = Callable[[Tensor, Tensor], bool]

# most tokens of a row for which a finding prints a call that reproduces it; longer calls would
# fill the screen
PASTED = 60
# decimal places to which shrinking rounds entries, fewest first: few digits are easiest to read
DIGITS = (1, 2, 3, 4, 6)


def shrink(q: Tensor, p: Tensor, fails: Fails, seconds: float = 10.0) -> Pair:
    """Return the simplest pair of rows (V,) found for which ``fails`` is still true.

    A greedy heuristic: of the :func:`candidates` of the best pair so far, the first that is smaller
    (:func:`size`) and fails becomes the best pair, and the search starts again. So the best pair
    always fails and its size always falls. The search ends when no candidate is smaller and fails,
    or after ``seconds``. Then the tokens are sorted, so that the result does not depend on the
    order in which they were drawn.
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
    """Return a pair's size: numbers of tokens, of characters of all entries, of nonzero entries."""
    entries = torch.cat(pair).tolist()
    return len(pair[0]), sum(len(repr(x)) for x in entries), sum(x != 0 for x in entries)


def candidates(q: Tensor, p: Tensor) -> Iterator[Pair]:
    """Yield simpler pairs, largest reductions first: fewer tokens, one-hot, few digits, zeros."""
    vocab = len(q)
    for size_left in range(2, vocab):  # first tokens only, fewest first: the largest reduction
        yield from _valid(q[:size_left], p[:size_left])
    removable = vocab if vocab > 1 else 0  # the last token stays
    for i in range(removable):
        rest = torch.arange(vocab) != i
        yield from _valid(q[rest], p[rest])
        merged = [row[rest].clone() for row in (q, p)]
        for row, whole in zip(merged, (q, p), strict=True):
            row[i - 1 if i else 0] += whole[i]  # to the token before or, of token 0, after
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
    """Return a row (V,) rounded to ``digits`` decimals; the largest entry makes the sum 1 again."""
    short = (row * 10**digits).round()
    largest = int(short.argmax())
    short[largest] += 10**digits - short.sum()
    return short / 10**digits


def _valid(q: Tensor, p: Tensor) -> Iterator[Pair]:
    """Yield the rows divided by their sums; nothing if a row has sum 0 or a negative entry."""
    rows = []
    for row in (q, p):
        total = row.sum()
        if not total > 0 or (row < 0).any():
            return
        rows.append(row if (total - 1).abs() < 1e-15 else row / total)
    yield rows[0], rows[1]


JUMPS = "or the answer jumps near these rows: if it is meant to, declare continuous=False"

Crash = tuple[Behaviour, Exception]


@dataclass
class Checker:
    """Checks properties of one policy; shrinking one counterexample takes ``shrink_seconds``."""

    policy: Policy
    shrink_seconds: float = 10.0

    def worst(self, prop: Property, seen: Behaviour) -> Worst:
        """Return the entry closest to breaking a property; errors of the policy pass through."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return measure(prop, seen)

    def without_crashes(
        self, prop: Property, behaviours: Iterable[Behaviour]
    ) -> tuple[list[Behaviour], list[Crash]]:
        """Return the behaviours on rows without errors, and (behaviour, error) for other rows."""
        sound: list[Behaviour] = []
        crashed: list[Crash] = []
        for seen in behaviours:
            if (error := self.error_on(prop, seen)) is None:
                sound.append(seen)
                continue
            rows = [seen.on(seen.q[i : i + 1], seen.p[i : i + 1]) for i in range(len(seen.q))]
            errors = [self.error_on(prop, row) for row in rows]
            bad = [(row, each) for row, each in zip(rows, errors, strict=True) if each]
            crashed += bad or [(seen, error)]  # some errors come only with several rows
            good = [i for i, each in enumerate(errors) if each is None]
            if good and bad:
                sound.append(seen.on(seen.q[good], seen.p[good]))
        return sound, crashed

    def error_on(self, prop: Property, seen: Behaviour) -> Exception | None:
        """Return the exception that the policy raises on the rows of ``seen``, or None."""
        try:
            self.worst(prop, seen)
        except Exception as error:  # whatever the user's code raises
            return error
        return None

    def with_numbers(self, seen: Behaviour) -> Behaviour:
        """Return the behaviour on the rows whose acceptances and residuals are all finite."""
        finite = seen.phi.isfinite().all(-1)
        finite[seen.pairs[0][~seen.recovered.isfinite().all(-1)]] = False
        return seen if bool(finite.all()) else seen.on(seen.q[finite], seen.p[finite])

    def crash(self, prop: Property, seen: Behaviour, error: Exception) -> Finding:
        """Return the finding for an error of the policy; if ``seen`` is a single row, shrink it."""
        q, p = seen.q[0], seen.p[0]
        if len(seen.q) == 1:

            def again(q: Tensor, p: Tensor) -> bool:
                return type(self.error_on(prop, seen.on(q[None], p[None]))) is type(error)

            q, p = shrink(q, p, again, self.shrink_seconds)
            error = self.error_on(prop, seen.on(q[None], p[None])) or error
        fault = f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
        worst = Worst(-math.inf, 0, "the rule itself" + _at(seen), "an answer", fault)
        guess = prop.hint if isinstance(error, LookupError | ArithmeticError) else ""
        return self.finding(replace(prop, hint=guess, steady=False), seen, worst, (q, p))

    def counterexample(self, prop: Property, seen: Behaviour, worst: Worst) -> Finding:
        """Return the finding for a broken property, on the simplest rows found that break it."""

        def broken(q: Tensor, p: Tensor) -> bool:
            other = seen.on(q[None], p[None])
            try:
                margin = self.worst(prop, other).margin
            except Exception:  # whatever the user's code raises
                return False
            # a wrong number is not shrunk to one that is not finite, nor the other way round
            return margin < 0 and math.isfinite(margin) == math.isfinite(worst.margin)

        q, p = seen.q[worst.row], seen.p[worst.row]
        smallest = seen.on(q[None], p[None])
        if broken(q, p):
            q, p = shrink(q, p, broken, self.shrink_seconds)
            smallest = seen.on(q[None], p[None])
            worst = self.worst(prop, smallest)
        worst.about += _at(seen)
        return self.finding(prop, seen, worst, (q, p), emitted=smallest.emitted[0].tolist())

    def finding(
        self, prop: Property, seen: Behaviour, worst: Worst, pair: Pair, **more: Any
    ) -> Finding:
        """Return the finding on a pair of rows, with a likely cause and a call that fails again."""
        jumps = prop.steady and seen.policy.declares.continuous
        hint = f"{prop.hint}; {JUMPS}" if jumps else prop.hint
        q, p = (row.tolist() for row in pair)
        call = f"assert_policy_properties({_written(seen.policy)}, properties=[{prop.name!r}]"
        again = f"{call}, rows=({q}, {p}))" if len(q) <= PASTED else ""
        return finding(prop, worst, (q, p), hint=hint, again=again, **more)

    def verdict_on(self, prop: Property, behaviours: list[Behaviour]) -> PropertyVerdict:
        """Return the verdict on one property; if it fails, the verdict has a finding."""
        verdict = partial(PropertyVerdict, prop.name, prop.statement)
        counted, least, failing = 0, math.inf, None
        for seen in behaviours:
            if not prop.applies(seen.policy):
                continue
            try:
                worst = self.worst(prop, seen)
            except Exception:  # whatever the user's code raises
                _, crashed = self.without_crashes(prop, [seen])
                if not crashed:  # an error that does not come again on the same rows proves nothing
                    continue
                fault = self.crash(prop, *crashed[0])
                return verdict("fails", counted, fault.margin, fault)
            counted += worst.counted if not seen.knobs else 0  # other knobs are tried on these rows
            least = min(least, worst.margin)
            if worst.margin < 0 and failing is None:
                failing = (seen, worst)
        if failing is not None:
            return verdict("fails", counted, least, self.counterexample(prop, *failing))
        return verdict("holds", counted, least) if counted else verdict("not checked", 0, None)


def _written(policy: Policy) -> str:
    """Return Python text that makes a policy: its spec, or a call if the spec makes another one."""
    with suppress(Exception):  # comparing values of the user's class may raise anything
        if read_policy(policy.spec) == policy:
            return repr(policy.spec)
    knobs = [f"{knob}={value!r}" for knob, value in vars(policy).items()]
    return f"ct.policy({', '.join([type(policy).__name__, *knobs])})"


def _at(seen: Behaviour) -> str:
    """Return text such as `` at delta=0.1`` for the changed knobs, empty if none was changed."""
    return "".join(f" at {name}={value:.6g}" for name, value in seen.knobs.items())
