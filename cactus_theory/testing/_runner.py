"""Check a rule against properties on a pool of rows; keep the simplest counterexample of each."""

import time
from collections.abc import Callable, Iterable
from typing import Any

from cactus_theory.policies import Policy
from cactus_theory.policies._function import VECTORISE, FunctionPolicy
from cactus_theory.testing._clock import ONCE, Clock, Hang, time_limit
from cactus_theory.testing._examples import Group
from cactus_theory.testing._judge import Checker, measure
from cactus_theory.testing._report import Finding, Report, Verdict, declared
from cactus_theory.testing.laws import LAWS, Behaviour, other_knobs

__all__ = [
    "Finding",
    "Hang",
    "Report",
    "Verdict",
    "check_rule",
    "declared",
    "measure",
    "time_limit",
]

# additional seconds for the very first call, which may import packages
FIRST = 10.0
# rows on which a rule is tried at each other value of its knob
ROWS_AT_OTHER_KNOBS = 24
# the most tokens of such a row
NARROW = 8
# after a longer check of a plain function the report says how to make it faster
SLOW_SECONDS = 20.0


def check_rule(
    rule: Policy,
    groups: Iterable[Group],
    *,
    laws: Iterable[str] | None = None,
    verify: Callable[..., Any] | None = None,
    limit: float | None = None,
    shrink_seconds: float = 10.0,
    elsewhere: bool = True,
    seed: int = 0,
    progress: Callable[[str], None] = lambda prop: None,
    done: Callable[[Verdict], None] = lambda verdict: None,
    waiting: Callable[[float], None] = lambda seconds: None,
) -> Report:
    """Return the report on ``rule`` for every property, or the named ones, on batches of rows.

    ``limit`` is in seconds for one property on few rows and grows with the rows and with the
    time of the first calls; if a rule takes longer, the property is ``inconclusive``.
    ``shrink_seconds`` is for shrinking one counterexample (0 keeps the rows as they are).
    With ``elsewhere`` some rows are also tried at values of the knob between those of the
    ladder, drawn with ``seed``. ``progress`` is called with a property's name before it is
    checked, ``done`` with its verdict, ``waiting`` with the seconds that a call may take.
    """
    checker = Checker(rule, verify, Clock(limit, waiting), shrink_seconds)
    chosen = list(LAWS) if laws is None else list(laws)
    first = LAWS["answers"]
    verdicts = []
    start = time.monotonic()
    progress(first.name)
    groups = list(groups)
    others = _at_other_knobs(checker, groups, seed) if elsewhere else []
    _time_one_row(checker, groups)
    behaviours, crashed = checker.without_crashes(first, map(checker.behaviour, groups))
    for name in chosen:
        prop = LAWS[name]
        progress(name)
        if prop is first and crashed:
            finding = checker.crash(prop, *crashed[0])
            count = sum(len(seen.q) for seen in behaviours) + len(crashed)
            kind = "inconclusive" if isinstance(crashed[0][1], Hang) else "fails"
            verdict = Verdict(name, prop.statement, kind, count, finding.margin, finding)
        elif not prop.applies(rule):
            verdict = Verdict(name, prop.statement, "not declared", 0, None)
        else:
            verdict = checker.judge(prop, behaviours + (others if prop.at_other_knobs else []))
        if prop is first:  # one mistake, one finding: the other properties use the sound rows
            behaviours = [b for b in map(checker.with_numbers, behaviours) if len(b.q)]
            others = _sound(checker, others)
        verdicts.append(verdict)
        done(verdict)
    slow = time.monotonic() - start > SLOW_SECONDS
    scalar = isinstance(rule, FunctionPolicy) and not rule.source.vectorised
    advice = f"slow: {VECTORISE}" if slow and scalar else ""
    return Report(rule.spec, declared(rule), verdicts, advice)


def _time_one_row(checker: Checker, groups: list[Group]) -> None:
    """Tell the clock how long the rule takes for a single row, if it returns."""
    q, p = min(groups, key=lambda group: group[0].shape[-1], default=(None, None))
    if q is None or p is None or checker.clock.least is None:
        return
    seen = checker.behaviour((q[:1], p[:1]))
    start = time.monotonic()
    try:
        measure(LAWS["answers"], seen, checker.clock.least + FIRST)
        start = time.monotonic()
        measure(LAWS["answers"], seen.on(seen.q, seen.p), checker.clock.limit(seen, ONCE))
        checker.clock.took(seen, time.monotonic() - start)
    except Exception:  # noqa: BLE001, S110  found again, and reported, on these very rows
        pass


def _at_other_knobs(checker: Checker, groups: list[Group], seed: int) -> list[Behaviour]:
    """Return the rule at other values of its knob, on some rows of a few tokens."""
    narrow = [group for group in groups if 3 <= group[0].shape[-1] <= NARROW]
    if not narrow or checker.rule.knob is None:
        return []
    q, p = max(narrow, key=lambda group: len(group[0]))
    rows = q[:ROWS_AT_OTHER_KNOBS], p[:ROWS_AT_OTHER_KNOBS]
    return [
        checker.behaviour(rows, made, {checker.rule.knob: value})
        for value, made in other_knobs(checker.rule, seed)
    ]


def _sound(checker: Checker, others: list[Behaviour]) -> list[Behaviour]:
    """Return those on which the rule returns finite numbers, without the other rows."""
    answering = (b for b in others if checker.error_on(LAWS["answers"], b) is None)
    return [b for b in map(checker.with_numbers, answering) if len(b.q)]
