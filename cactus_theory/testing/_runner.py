"""Check a rule against laws on a pool of rows and keep the simplest counterexample of each."""

import math
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor

from cactus_theory.policies import Policy
from cactus_theory.testing._examples import Group
from cactus_theory.testing._shrink import shrink
from cactus_theory.testing.laws import LAWS, Behaviour, Law
from cactus_theory.verify import verify_chain

# after this many rows on which the rule never comes back, no more are tried
MOST_HANGS = 2
# a row that hung once is taken to hang again after so many seconds
HANG_AGAIN = 1.0


class Hang(Exception):
    """A rule did not answer in time."""


@dataclass(frozen=True)
class Finding:
    """One way in which a law is broken, on the simplest rows found.

    Attributes
    ----------
    target, draft : the rows; empty if the rule could not be asked at all.
    about, expected, found : the number that is wrong, what it should be and what it is.
    margin : how far inside the law, hence negative; −∞ where there is no number.
    emitted : what the rule emits on these rows, empty if it could not be asked.
    """

    law: str
    statement: str
    target: list[float]
    draft: list[float]
    about: str
    expected: str
    found: str
    margin: float
    emitted: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Verdict:
    """How a law fared.

    Attributes
    ----------
    verdict : ``holds``, ``fails``, ``not declared``, or ``not checked`` if no row was of the
        kind that the law speaks of.
    examples : rows it was checked on. ``worst`` : the smallest margin met, None without rows.
    """

    law: str
    statement: str
    verdict: str
    examples: int
    worst: float | None
    finding: Finding | None = None


@dataclass(frozen=True)
class Report:
    """Everything that a check found out about a rule."""

    rule: str
    declares: str
    laws: list[Verdict]

    @property
    def passed(self) -> bool:
        """Return whether no law is broken."""
        return all(v.verdict != "fails" for v in self.laws)

    @property
    def findings(self) -> list[Finding]:
        """Return the counterexamples."""
        return [v.finding for v in self.laws if v.finding is not None]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {"passed": self.passed} | asdict(self)


@dataclass
class Worst:
    """The entry with the smallest margin among some rows."""

    margin: float = float("inf")
    row: int = 0
    about: str = ""
    expected: str = ""
    found: str = ""
    counted: int = 0


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise Hang after so many seconds, where the system can interrupt Python at all."""
    possible = (
        seconds is not None
        and hasattr(signal, "setitimer")
        and threading.current_thread() is threading.main_thread()
    )
    if not possible:
        yield
        return

    def ring(number: int, frame: FrameType | None) -> NoReturn:
        raise Hang(f"no answer within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds or 0.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def measure(law: Law, seen: Behaviour, limit: float | None = None) -> Worst:
    """Return the worst entry of a law on a batch; a rule's own exceptions pass through."""
    worst, counted = Worst(), set()
    with warnings.catch_warnings(), time_limit(limit):
        warnings.simplefilter("ignore")
        for bounds in law.measure(seen):
            if worst.margin < 0:  # what a law says first is easiest to understand
                break
            margins = bounds.margins()
            owners = torch.arange(len(margins)) if bounds.rows is None else bounds.rows
            counts = torch.ones(margins.shape) if bounds.counts is None else bounds.counts
            used = counts.reshape(len(margins), -1).any(-1)
            counted |= set(owners[used].tolist())
            if margins.numel() and float(margins.min()) < worst.margin:
                flat = int(margins.argmin())
                index = tuple(
                    int(i) for i in torch.unravel_index(torch.tensor(flat), margins.shape)
                )
                worst = Worst(float(margins.min()), int(owners[index[0]]), *bounds.describe(index))
    worst.counted = len(counted)
    return worst


@dataclass
class Checker:
    """A rule, the laws to check and how; see :func:`check_rule`."""

    rule: Policy
    verify: Callable[..., Any] = verify_chain
    limit: float | None = None
    shrink_seconds: float = 10.0

    def behaviour(self, group: Group) -> Behaviour:
        """Return the rule on a batch of rows."""
        return Behaviour(self.rule, *group, self.verify)

    def without_crashes(
        self, law: Law, groups: Iterable[Group]
    ) -> tuple[list[Behaviour], list[tuple[Group, Exception]]]:
        """Return the rule on the rows where the law can be asked; the others with their errors.

        After a few rows on which the rule hangs, the rest is not asked any more.
        """
        sound: list[Behaviour] = []
        crashed: list[tuple[Group, Exception]] = []
        for group in groups:
            seen = self.behaviour(group)
            try:
                measure(law, seen, self.limit)
                sound.append(seen)
            except Exception as error:  # noqa: BLE001  whatever foreign code raises
                good, bad = self.one_by_one(law, group)
                crashed += bad or [(group, error)]
                if good and bad:
                    rows = (torch.stack([group[side][i] for i in good]) for side in (0, 1))
                    sound.append(self.behaviour((next(rows), next(rows))))
                if sum(isinstance(e, Hang) for _, e in crashed) >= MOST_HANGS:
                    break
        return sound, crashed

    def one_by_one(self, law: Law, group: Group) -> tuple[list[int], list[tuple[Group, Exception]]]:
        """Return which rows of a group are sound, and the others with their errors."""
        good: list[int] = []
        bad: list[tuple[Group, Exception]] = []
        for i in range(len(group[0])):
            row = (group[0][i : i + 1], group[1][i : i + 1])
            error = self.error_on(law, row, self.row_limit)
            if error is None:
                good.append(i)
                continue
            bad.append((row, error))
            if sum(isinstance(e, Hang) for _, e in bad) >= MOST_HANGS:
                break
        return good, bad

    def with_numbers(self, seen: Behaviour) -> Behaviour:
        """Return the behaviour on the rows where every answer is a finite number."""
        finite = seen.phi.isfinite().all(-1) & seen.recovered.isfinite().flatten(1).all(-1)
        return seen if bool(finite.all()) else self.behaviour((seen.q[finite], seen.p[finite]))

    @property
    def row_limit(self) -> float | None:
        """Return the time for a single row."""
        return None if self.limit is None else self.limit / 5

    def error_on(self, law: Law, group: Group, limit: float | None) -> Exception | None:
        """Return what the rule raises there, if anything."""
        try:
            measure(law, self.behaviour(group), limit)
        except Exception as error:  # noqa: BLE001
            return error
        return None

    def crash(self, law: Law, group: Group, error: Exception) -> Finding:
        """Return the finding for rows on which the rule raised."""
        q, p = group[0][0], group[1][0]
        if len(group[0]) == 1:
            limit = None if self.row_limit is None else min(self.row_limit, HANG_AGAIN)

            def again(q: Tensor, p: Tensor) -> bool:
                return type(self.error_on(law, (q[None], p[None]), limit)) is type(error)

            q, p = shrink(q, p, again, self.shrink_seconds)
            error = self.error_on(law, (q[None], p[None]), limit) or error
        said = " ".join(str(error).split())
        return Finding(
            law.name,
            law.statement,
            q.tolist(),
            p.tolist(),
            "the rule itself",
            "an answer",
            f"{type(error).__name__}: {said}"[:500],
            -float("inf"),
        )

    def counterexample(self, law: Law, group: Group, worst: Worst) -> Finding:
        """Return the finding for a broken law, on rows as simple as possible."""

        def broken(q: Tensor, p: Tensor) -> bool:
            try:
                margin = measure(law, self.behaviour((q[None], p[None])), self.limit).margin
            except Exception:  # noqa: BLE001
                return False
            return margin < 0 and math.isfinite(margin) == math.isfinite(worst.margin)

        q, p = group[0][worst.row], group[1][worst.row]
        if broken(q, p):
            q, p = shrink(q, p, broken, self.shrink_seconds)
            seen = self.behaviour((q[None], p[None]))
            worst = measure(law, seen, self.limit)
        else:
            seen = self.behaviour((q[None], p[None]))
        emitted = seen.emitted[0].tolist()
        return Finding(
            law.name,
            law.statement,
            q.tolist(),
            p.tolist(),
            worst.about,
            worst.expected,
            worst.found,
            worst.margin,
            emitted,
        )

    def judge(self, law: Law, behaviours: list[Behaviour]) -> Verdict:
        """Return how the law fares on all rows."""
        counted, least, failing = 0, float("inf"), None
        for seen in behaviours:
            try:
                worst = measure(law, seen, self.limit)
            except Exception:  # noqa: BLE001
                _, crashed = self.without_crashes(law, [(seen.q, seen.p)])
                if not crashed:
                    continue
                finding = self.crash(law, *crashed[0])
                return Verdict(law.name, law.statement, "fails", counted, finding.margin, finding)
            counted += worst.counted
            least = min(least, worst.margin)
            if worst.margin < 0 and failing is None:
                failing = (seen, worst)
        if failing is not None:
            seen, worst = failing
            finding = self.counterexample(law, (seen.q, seen.p), worst)
            return Verdict(law.name, law.statement, "fails", counted, least, finding)
        if not counted:
            return Verdict(law.name, law.statement, "not checked", 0, None)
        return Verdict(law.name, law.statement, "holds", counted, least)


def check_rule(
    rule: Policy,
    groups: Iterable[Group],
    *,
    laws: Iterable[str] | None = None,
    verify: Callable[..., Any] = verify_chain,
    limit: float | None = None,
    shrink_seconds: float = 10.0,
    progress: Callable[[str], None] = lambda law: None,
    done: Callable[[Verdict], None] = lambda verdict: None,
) -> Report:
    """Return how ``rule`` fares under every law, or the named ones, on batches of rows.

    ``limit`` is in seconds for one call, ``shrink_seconds`` for making one counterexample small
    (0 keeps the rows as they are); ``progress`` hears a law's name before it is checked,
    ``done`` its verdict.
    """
    checker = Checker(rule, verify, limit, shrink_seconds)
    chosen = list(LAWS) if laws is None else list(laws)
    first = LAWS["answers"]
    verdicts = []
    progress(first.name)
    behaviours, crashed = checker.without_crashes(first, groups)
    for name in chosen:
        law = LAWS[name]
        progress(name)
        if law is first and crashed:
            finding = checker.crash(law, *crashed[0])
            count = sum(len(seen.q) for seen in behaviours) + len(crashed)
            verdict = Verdict(name, law.statement, "fails", count, finding.margin, finding)
        elif not law.applies(rule):
            verdict = Verdict(name, law.statement, "not declared", 0, None)
        else:
            verdict = checker.judge(law, behaviours)
        if law is first:  # one mistake, one finding: the other laws speak of the sound rows
            behaviours = [b for b in map(checker.with_numbers, behaviours) if len(b.q)]
        verdicts.append(verdict)
        done(verdict)
    return Report(rule.spec, declared(rule), verdicts)


def declared(rule: Policy) -> str:
    """Return what a rule declares, in words."""
    said = rule.declares
    parts = [
        f"{entry.name} {getattr(said, entry.name)}".replace("_", " ").removesuffix(" True")
        for entry in fields(said)
        if getattr(said, entry.name) != entry.default
    ]
    return "declares " + ("; ".join(parts) or "nothing") + f" (support {said.support})"
