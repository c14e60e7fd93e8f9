"""Solve the knob of a policy for given nats, or for a given acceptance.

On fixed rows, without drawn coins, what a policy spends (or accepts) is a function of its knob, and
nearly a power of the looseness x. The search steps from the first x towards the level. Once the
amounts (nats or acceptance) at two neighbouring x enclose the level, these x are a bracket. The
next x is where the line between the two, in logarithms, reaches the level, or the middle at every
fourth step, so that the bracket always shrinks. The search stops when an amount is within the
tolerance. A bracket too narrow to hold a further value of the knob contains a jump over the level.
If no bracket is left, a grid over the range is tried for policies that may not be monotone (a
heuristic).
"""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from cactus_theory.base import arguments as check
from cactus_theory.base import defaults
from cactus_theory.base.rows import load_rows, pair_of
from cactus_theory.base.specs import blamed
from cactus_theory.divergences import Divergence, read_divergence
from cactus_theory.divergences.regret import REGRET
from cactus_theory.policies import Policy
from cactus_theory.policies.rule import SLOW_SECONDS, faster_form
from cactus_theory.traces.replays import draft_width, replay_widths, shares_rows
from cactus_theory.traces.rows import SavedRows, Source, row_means
from cactus_theory.traces.trace import Trace
from cactus_theory.tuning.families import Family, family_of

# nats of regret are a sum over few tokens, and rise in steps: a knob that spends at most this share
# less than the level is taken if the next step is above the level; and the share for divergences,
# which rise in steps under a user's rule with a threshold
STEP, NATS_STEP = 0.05, 0.01
# largest relative error of solved nats where several K share replays (a tenth of the standard error
# over 20 texts), of solved nats otherwise, and of a solved acceptance
TOLERANCE, EXACT, CLOSE = 2e-3, 5e-4, 2e-4
# largest step in x, as a factor, while all amounts are on one side of the level; and the power of x
# that nats are assumed to follow while one point is known
STRIDE = 8.0
SLOPE = 1.5
# least distance of the next x from the ends of its bracket, as a share of the bracket in ln x
MARGIN = 0.02
# steps between two halvings: with lines alone, a bent curve may leave one end of the bracket fixed
HALVING = 4
# relative width at which a bracket counts as a jump over the level
NARROW = 1e-6
MOST_STEPS = 100
# numbers of points of the grid: spaced geometrically over the range, and evenly
POWERS, EVEN = 16, 12
# neighbours above the level whose amounts differ by less than this share count as a plateau (a
# heuristic): a rule that jumps at its lossless end spends one amount at all small x
FLAT = 0.01
Point = tuple[float, float]
Run = Callable[[Policy, int], dict[int, Any]]


# tilts to try: the first, the factor to the next, the largest, the least factor; errors that are
# allowed: of a surprise in nats, of a tilt (relative), of the nats while a tilt is searched
FIRST_TILT, FARTHER, MOST_TILT, LEAST_STEP = 0.02, 3.0, 20.0, 1.02
CLOSE_SURPRISE, CLOSE_TILT, ROUGH = 1e-3, 1e-2, 5e-3


class Unsolved(ValueError):
    """Error for a policy without a free knob, or without a value of the knob at the level."""


class Knobs:
    """Solver of a family's knob at several K; it keeps all runs at values that were tried.

    Parameters
    ----------
    family : the family whose knob is solved.
    widths : every K at which the knob may be solved.
    run : function of a policy and K that returns runs (replays, or means over rows) by K: at this
        K, and at further K if the run gives them, too.
    amount : function of a run: the number that has to reach the level.
    tolerance : largest relative error of the amount.
    step : largest relative distance below the level that is accepted if the amount jumps over it.
    on_pass : called before every run.
    """

    def __init__(
        self,
        family: Family,
        widths: Sequence[int],
        run: Run,
        amount: Callable[[Any], float],
        tolerance: float = TOLERANCE,
        step: float = NATS_STEP,
        on_pass: Callable[[], Any] = lambda: None,
    ) -> None:
        self.family, self.run, self.amount = family, run, amount
        self.tolerance, self.step, self.on_pass, self.passes = tolerance, step, on_pass, 0
        self.solved: dict[int, float] = {}
        self.replays: dict[int, dict[float, Any]] = {width: {} for width in widths}
        self.spent: dict[int, dict[float, float]] = {width: {} for width in widths}
        self.errors: dict[float, Exception] = {}

    def at(self, width: int, level: float) -> Any:
        """Return the run at K = ``width`` whose amount is ``level``, or None if there is none.

        ``solved[width]`` is then the looseness of this run: the number x that sets the knob.
        """
        points = self.spent[width]
        for step in range(1, MOST_STEPS):
            for x, amount in sorted(points.items()):
                if abs(amount - level) <= self.tolerance * level:
                    self.solved[width] = x
                    return self.replays[width][x]
            if (x := self._next(width, level, step)) is None:
                break
            self._try(x, width)
        # where the amount jumps over the level: of the points just below, the one with most
        least = level * (1 - self.step)
        below = [(amount, x) for x, amount in points.items() if least <= amount <= level]
        if not below:
            return None
        _, self.solved[width] = max(below)
        return self.replays[width][self.solved[width]]

    def within(self, width: int, level: float) -> Any:
        """Return the run at the level, else the run closest below it; None if all are above."""
        if (found := self.at(width, level)) is None:
            if not self.spent[width] and self.errors:
                raise next(iter(self.errors.values()))
            below = [(amount, x) for x, amount in self.spent[width].items() if amount <= level]
            found = self.replays[width][max(below)[1]] if below else None
        return found

    def why(self, width: int, level: float, unit: str) -> str:
        """Return in words why no value of the knob reaches the level."""
        family, points = self.family, sorted(self.spent[width].items())
        errors = [*self.errors.values()][:1]
        raised = [f"raises {blamed(one) or f'{type(one).__name__}: {one}'}" for one in errors]
        if not points:
            return raised[0]
        knob = lambda x: f" at {family.varied}={family.value(x):g}" if family.varied else ""  # noqa: E731
        for (x, low), (y, high) in pairwise(points):
            if (low - level) * (high - level) < 0:
                return (
                    f"jumps past {level:g} {unit}, from {low:.4g}{knob(x)} to {high:.4g}{knob(y)}"
                )
        # no two neighbours enclose the level, so all amounts are on one side of it
        all_below = points[0][1] < level
        x, end = (max if all_below else min)(points, key=lambda point: point[1])
        reach = f"reaches {'at most' if all_below else 'at least'} {end:.4g} {unit}{knob(x)}"
        return ", elsewhere ".join([reach, *raised])

    def _try(self, looseness: float, width: int) -> None:
        """Run the policy at a looseness; keep the run and its amount, or its error."""
        self.on_pass()
        self.passes += 1
        start = time.monotonic()
        try:
            runs = self.run(policy := self.family.policy(looseness), width)
            spent = {k: self.amount(run) for k, run in runs.items()}
            if math.isnan(spent[width]):
                raise ValueError("must spend a number of nats; got NaN")
        except Exception as error:  # a user's rule may raise anything
            self.errors[looseness] = error
            return
        for k, run in runs.items():
            self.replays[k][looseness], self.spent[k][looseness] = run, spent[k]
        taken, faster = time.monotonic() - start, faster_form(policy)
        if self.passes == 1 and taken > SLOW_SECONDS and faster:
            told = f"{policy.name}: took {taken:.0f} s at one value of its knob, of about ten"
            warnings.warn(f"{told} that the search tries; {faster}", stacklevel=2)

    def _next(self, width: int, level: float, step: int) -> float | None:
        """Return the looseness to try next; None if no value is left to try.

        Returned is a point inside a bracket; without a bracket, a step towards the level that stays
        in the range and short of values that raise errors; else, unless the family is trusted, a
        point of the grid that is not on a plateau (between two points with nearly equal amounts).
        """
        family, points = self.family, sorted(self.spent[width].items())
        tried = {*self.spent[width], *self.errors}
        if not points and not tried:  # start where the knob was solved at the largest K so far
            return self.solved.get(max(self.solved, default=0), family.first)
        # plateaus above the level (FLAT), from x to x; points of the grid on them are left out
        pairs = ((low, high) for low, high in pairwise(points) if level < low[1])
        flat = [(low[0], high[0]) for low, high in pairs if abs(high[1] - low[1]) <= FLAT * low[1]]
        for low, high in pairwise(points):
            if (low[1] - level) * (high[1] - level) < 0 and self._wide(low[0], high[0]):
                return _between(low, high, level if step % HALVING else None)
        above = {amount > level for _, amount in points}
        if len(above) == 1 and family.least < family.most:  # all amounts are on one side
            up = not above.pop()  # whether x has to grow
            nearest, _ = points[-1 if up else 0]
            x = _beyond(points[-2:] if up else points[:2], level)
            x = min(max(x, family.least), family.most)
            if not up and flat and flat[0][0] == nearest:  # steps along a plateau change nothing
                x = family.least
            wrong = [other for other in self.errors if (other > nearest) == up]
            if wrong:  # between the last value that can be run and the first that cannot
                x = math.sqrt(nearest * (min if up else max)(wrong))
            if x not in tried and self._wide(*sorted((x, nearest))):
                return x
        if family.trusted:
            return None
        values = {family.value(x) for x in tried}
        free = (x for x in _grid(family) if family.value(x) not in values)
        return next((x for x in free if not any(low < x < high for low, high in flat)), None)

    def _wide(self, low: float, high: float) -> bool:
        """Return whether the knob may have a value between those at two loosenesses."""
        first, last = self.family.value(low), self.family.value(high)
        least = 1.0 if self.family.whole else 0.0  # no whole number is between neighbours
        return high / low > 1 + NARROW and abs(last - first) > least


def _grid(family: Family) -> Iterator[float]:
    """Yield looseness over the family's range, spaced geometrically and then evenly."""
    ratio = family.most / family.least
    yield from (family.least * ratio ** (step / POWERS) for step in range(POWERS + 1))
    yield from (family.most * step / EVEN for step in range(1, EVEN))


def _between(low: Point, high: Point, level: float | None) -> float:
    """Return x at which the log-log line through two points has ``level``; for None, the middle."""
    share = 0.5
    if level is not None and min(low[1], high[1]) > 0 and math.isfinite(low[1] + high[1]):
        share = math.log(level / low[1]) / math.log(high[1] / low[1])
    share = min(max(share, MARGIN), 1 - MARGIN)
    return low[0] * (high[0] / low[0]) ** share


def _beyond(points: Sequence[Point], level: float) -> float:
    """Return x at which the log-log line through one or two points reaches a level beyond them.

    x is at most a factor ``STRIDE`` from the nearest point, and exactly so far if the amount there
    is 0 or infinite.
    """
    near = points[-1] if points[-1][1] <= level else points[0]
    up = near[1] <= level
    if not 0 < near[1] < math.inf:
        return near[0] * (STRIDE if up else 1 / STRIDE)
    slope = SLOPE
    if len(points) == 2 and 0 < points[0][1] < points[1][1] < math.inf:
        slope = math.log(points[1][1] / points[0][1]) / math.log(points[1][0] / points[0][0])
    step = math.log(level / near[1]) / slope
    furthest = math.log(STRIDE)
    return near[0] * math.exp(min(max(step, -furthest), furthest))


def within_surprise(
    family: Family,
    knobs: Callable[[Family], Knobs],
    width: int,
    level: float,
    most: float,
    start: float = 0.0,
) -> tuple[Family, Knobs]:
    """Return a family with the least tilt whose surprise is at most ``most``, and its knobs.

    The family is returned as it is if its surprise without a tilt is small enough, if it has no
    knob ``tilt``, or if its spec sets the tilt. Otherwise tilts are searched while nats are held at
    ``level``, where the surprise falls as the tilt rises. The tilt grows from ``start`` by a
    factor until the surprise is small enough; the factor shrinks where the tilt alone spends more
    than the level. Then the bracket of the last two tilts, too much surprise below and little
    enough above, is closed by the Illinois variant of regula falsi. The result is the tried tilt
    that comes nearest to ``most`` from below, or the least surprise if no tilt suffices.
    During this search the level is met roughly only; the caller solves the knob to the tolerance.
    """
    # by tilt: the surprise above ``most`` (∞ if the level is not reached), and what is returned
    tried: dict[float, tuple[float, Family, Knobs]] = {}

    def excess(tilt: float) -> float:
        if tilt not in tried:
            near = min(tried, key=lambda other: abs(other - tilt), default=None)
            first = family.first if near is None else tried[near][2].solved.get(width, family.first)
            tilted = family.tilted(tilt, first)
            solver = knobs(tilted)
            exactly, solver.tolerance = solver.tolerance, ROUGH
            found = solver.at(width, level)
            solver.tolerance = exactly
            more = math.inf if found is None else surprise_of(found) - most
            tried[tilt] = more, tilted, solver
        return tried[tilt][0]

    without = excess(0.0)
    if without <= CLOSE_SURPRISE or not family.tiltable or not family.varied:
        return tried[0.0][1:]
    # points (tilt, excess): ``low`` has too much surprise, ``high`` little enough
    low, tilt, step = (0.0, without), start or FIRST_TILT, FARTHER
    while (high := (tilt, excess(tilt)))[1] > 0:
        if high[1] < math.inf:
            low = high
        else:  # the tilt alone spends more than the level, so the next tilt must be smaller
            step = math.sqrt(step)
        if step < LEAST_STEP or tilt > MOST_TILT:
            return min(tried.values(), key=lambda entry: entry[0])[1:]
        # from the largest tilt known to be too small; if there is none, far below the last tilt
        tilt = (low[0] or tilt / FARTHER**2) * step
    same_end = 0  # steps in a row that replaced ``low`` (> 0) or ``high`` (< 0)
    while high[1] < -CLOSE_SURPRISE and high[0] - low[0] > CLOSE_TILT * high[0]:
        tilt = (low[0] * high[1] - high[0] * low[1]) / (high[1] - low[1])
        point = tilt, excess(tilt)
        # Illinois: at the second such step the value at the end that stays is halved
        if point[1] > 0:
            low, high = point, (high[0], high[1] / (2 if same_end > 0 else 1))
            same_end = max(same_end, 0) + 1
        else:
            low, high = (low[0], low[1] / (2 if same_end < 0 else 1)), point
            same_end = min(same_end, 0) - 1
    enough = (entry for entry in tried.values() if entry[0] <= 0)
    return max(enough, key=lambda entry: entry[0])[1:]


def surprise_of(done: Any) -> float:
    """Return the surprise in nats: per emitted token if ``done`` is a replay, else per row."""
    return (
        done.surprise if hasattr(done, "surprise") else done.divergence_per_token("surprise")
    ).value


def checked_level(level: float, name: str = "nats") -> float:
    """Return a level; ValueError unless nats are above 0 and finite, or acceptance in (0, 1]."""
    if name == "acceptance":
        return check.number(name, level, 0, 1, open_low=True)
    return check.finite(name, level, 0, open_low=True)


def trace_knobs(
    trace: Trace,
    family: Family,
    widths: Sequence[int],
    divergence: Divergence,
    undrafted: str = "policy",
    signed: Sequence[str] = (),
    **options: Any,
) -> Knobs:
    """Return the solver of a family's knob on a trace.

    One replay serves all K if :func:`shares_rows` is true.
    ``signed`` names quantities (surprise, agreement) that replays add up beside the divergence.
    """
    shared = shares_rows(family.base, family.verifier)

    def run(policy: Policy, width: int) -> dict[int, Any]:
        together = widths if shared else [width]
        metered = divergence, *signed
        return replay_widths(trace, policy, family.verifier, together, metered, undrafted=undrafted)

    amount = options.pop("amount", lambda done: done.divergence_per_token(divergence.spec).value)
    if divergence == REGRET:
        options["step"] = STEP
    return Knobs(family, widths, run, amount, **options)


def solve_knob(
    rule: str | Policy,
    rows: Any,
    *,
    nats: float | None = None,
    acceptance: float | None = None,
    regret: float | None = None,
    divergence: str | Divergence = "kl",
    verifier: str = defaults.VERIFIER,
    num_draft_tokens: int | None = None,
    undrafted: str = "policy",
) -> Policy:
    """Solve the knob of a policy so that it spends given nats on rows; return the policy.

    Parameters
    ----------
    rule : a spec such as ``"band:price"`` or ``"mine.py:rule"``, or a Policy, whose knob is free.
    rows : a pair of arrays (..., V), target rows and draft rows; a file of both; a trace, or its
        folder.
    nats : level of the mean divergence of the emitted law, per row; on a trace per emitted token.
    acceptance : in place of nats, level of the mean acceptance over rows; on a trace, of the
        accepted share of the drafted tokens that are reached.
    regret : in place of nats on a trace of temperature 0, nats of regret per emitted token.
    divergence : the divergence that is spent; nats are in its unit.
    verifier, num_draft_tokens, undrafted : on a trace, as for
        :func:`cactus_theory.traces.replay`.

    Raises
    ------
    Unsolved
        A ValueError that names the policy: there is no free knob, no value of the knob reaches the
        level, the amount jumps over the level, or the policy raises an error. Before a jump nats
        within 1 % of the level are enough, and regret within 5 %.
    ValueError, TypeError, OSError
        Not exactly one of nats, acceptance and regret; regret where the temperature is not 0;
        an unknown policy; rows that are not distributions.

    Examples
    --------
    >>> q, p = np.array([[0.2, 0.8], [0.5, 0.5]]), np.array([[0.9, 0.1], [0.6, 0.4]])
    >>> ct.solve_knob("lenience", (q, p), nats=0.05).spec
    'lenience:lenience=0.535931'
    """
    levels = {"nats": nats, "acceptance": acceptance, "regret": regret}
    held = check.the_only_one(**levels)
    level, source = checked_level(levels[held], held), source_of(rows)  # type: ignore[arg-type]
    kind = charged_in(source, divergence, held)
    ends = source.ends if isinstance(source, Trace) else ()
    family = family_of(rule, kind, ends or ("eos",), verifier)
    if not family.varied:
        raise Unsolved(f"{family.name}: has no knob that is free")
    width = draft_width(source, num_draft_tokens) if isinstance(source, Trace) else 0
    knobs = knobs_of(source, family, width, kind, held, undrafted)
    if knobs.at(width, level) is None:
        raise Unsolved(f"{family.name}: {knobs.why(width, level, held)}")
    return family.policy(knobs.solved[width])


def source_of(rows: Any) -> Source:
    """Return saved rows or a trace from a pair of arrays, a file of both, a trace or a folder."""
    if isinstance(rows, Trace | SavedRows):
        return rows
    if isinstance(rows, tuple | list) and len(rows) == 2:
        return SavedRows.of(*rows)
    if not isinstance(rows, str | Path):
        raise TypeError(f"rows: must be two arrays, a file or a trace; got {type(rows).__name__}")
    if Path(rows).is_dir():
        return Trace.open(rows)
    return SavedRows.of(*map(load_rows, pair_of(str(rows), None)))


def charged_in(source: Source, divergence: str | Divergence, *held: str) -> Divergence:
    """Return the divergence in which levels are measured: regret on a trace of temperature 0.

    Raises ValueError for a level of nats on such a trace, and for a level of regret elsewhere.
    """
    greedy = isinstance(source, Trace) and source.unit == REGRET
    if (other := "nats" if greedy else "regret") in held:
        rule = "are of regret at temperature 0" if greedy else "must be of a trace of temperature 0"
        got = "give regret" if greedy else "got other rows, which take nats"
        raise ValueError(f"{other}: {rule}; {got}")
    return REGRET if greedy else read_divergence(divergence)


def knobs_of(
    source: Source,
    family: Family,
    width: int,
    kind: Divergence,
    held: str,
    undrafted: str = "policy",
    signed: Sequence[str] = (),
) -> Knobs:
    """Return the solver of a family's knob on rows, or on a trace at K = ``width``."""
    by_acceptance = held == "acceptance"
    options: dict[str, Any] = {"tolerance": EXACT}
    if by_acceptance:
        options = {"tolerance": CLOSE, "step": 0.0}
    # without a declared direction, the acceptance may fall while nats rise; a fixed policy stays
    # trusted, as there is no other value to try
    if by_acceptance and not family.base.declares.direction:
        family = replace(family, trusted=not family.varied)
    if isinstance(source, Trace):
        if by_acceptance:
            options["amount"] = lambda done: done.acceptance.value
        return trace_knobs(source, family, [width], kind, undrafted, signed, **options)
    amount = lambda done: (done.acceptance if by_acceptance else done.divergence).value  # noqa: E731
    run = lambda policy, width: {width: row_means(policy, source, kind)}  # noqa: E731
    return Knobs(family, [width], run, amount, **options)
