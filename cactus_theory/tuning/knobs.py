"""Solve the knob of a policy for nats, or for an acceptance.

Rows are frozen and coins are integrated out, so that what a policy spends is a function of its
knob, nearly a power of the looseness x. The search goes from the first x in strides towards the
amount asked for. Once two neighbours enclose the amount, the next x is read off the straight line
between these two in logarithms. If neither end of the range is beyond the amount, as of a policy
that is not monotone, a grid is tried. A bracket that closes over no solution holds a jump.
"""

import math
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
from cactus_theory.traces.replays import draft_width, replay_widths, shares_rows
from cactus_theory.traces.rows import SavedRows, Source, row_means
from cactus_theory.traces.trace import Trace
from cactus_theory.tuning.families import Family, family_of

# nats of regret are a sum over few tokens and jump from step to step: the largest relative distance
# below the level at which the last step before it is taken
STEP = 0.05
# largest relative miss of the nats where K share replays, a tenth of the standard error over 20
# texts; of the nats, and of an acceptance, of one policy
TOLERANCE, EXACT, CLOSE = 2e-3, 5e-4, 2e-4
# longest step in x, as a factor, while no x on the other side is known; and the power of x that
# nats are taken for where only one point is known
STRIDE = 8.0
SLOPE = 1.5
# least distance of a point from the ends of its bracket, as a share of the bracket in ln x
MARGIN = 0.02
# steps between two halvings of the bracket, lest a bent curve hold one end of it
HALVING = 4
# relative width of a bracket that holds a jump over the amount
NARROW = 1e-6
MOST_STEPS = 100
# points of a grid: geometric ones over the range, and even ones
POWERS, EVEN = 16, 12
# relative difference of two neighbours above the level that are taken for a plateau, a heuristic: a
# rule that jumps at its lossless end spends the same at all of the least x
FLAT = 0.01
Point = tuple[float, float]
Run = Callable[[Policy, int], dict[int, Any]]


# the least tilt that is tried, the factor to the next one, the largest; largest miss of a surprise,
# in nats, of a tilt, relative, and of the nats while a tilt is looked for
FIRST_TILT, FARTHER, MOST_TILT, LEAST_STEP = 0.02, 3.0, 20.0, 1.02
CLOSE_SURPRISE, CLOSE_TILT, ROUGH = 1e-3, 1e-2, 5e-3


class Unsolved(ValueError):
    """A knob that does not exist, or at no value of which the policy spends what was asked."""


class Knobs:
    """Runs of a family at the values of its knob that were tried, at several K.

    Parameters
    ----------
    family : whose knob is solved.
    widths : every K that will be asked for.
    run : of a policy and K: what it does at this K, and at others if that is known, too.
    amount : of what a policy does: what is solved for.
    tolerance : largest relative miss.
    step : largest relative distance below a level that is jumped over.
    on_pass : called before every run.
    """

    def __init__(
        self,
        family: Family,
        widths: Sequence[int],
        run: Run,
        amount: Callable[[Any], float],
        tolerance: float = TOLERANCE,
        step: float = 0.0,
        on_pass: Callable[[], Any] = lambda: None,
    ) -> None:
        self.family, self.run, self.amount = family, run, amount
        self.tolerance, self.step, self.on_pass, self.passes = tolerance, step, on_pass, 0
        self.solved: dict[int, float] = {}
        self.replays: dict[int, dict[float, Any]] = {width: {} for width in widths}
        self.spent: dict[int, dict[float, float]] = {width: {} for width in widths}
        self.errors: dict[float, Exception] = {}

    def at(self, width: int, level: float) -> Any:
        """Return the run of the family whose amount is ``level``; None if there is none."""
        points = self.spent[width]
        for step in range(1, MOST_STEPS):
            for x, amount in sorted(points.items()):
                if abs(amount - level) <= self.tolerance * level:
                    self.solved[width] = x
                    return self.replays[width][x]
            if (x := self._next(width, level, step)) is None:
                break
            self._try(x, width)
        below = [(own, x) for x, own in points.items() if level * (1 - self.step) <= own <= level]
        if not below:
            return None
        self.solved[width] = max(below)[1]
        return self.replays[width][self.solved[width]]

    def within(self, width: int, level: float) -> Any:
        """Return that run, else the one that spends most below the level; None if all are above."""
        if (found := self.at(width, level)) is None:
            if not self.spent[width] and self.errors:
                raise next(iter(self.errors.values()))
            below = [(own, x) for x, own in self.spent[width].items() if own <= level]
            found = self.replays[width][max(below)[1]] if below else None
        return found

    def why(self, width: int, level: float, unit: str) -> str:
        """Return, in words, why the level was not found."""
        family, own = self.family, sorted(self.spent[width].items())
        raised = [f"raises {blamed(error) or f'{type(error).__name__}: {error}'}"
                  for error in self.errors.values()][:1]  # fmt: skip
        if not own:
            return raised[0]
        knob = lambda x: f" at {family.varied}={family.value(x):g}" if family.varied else ""  # noqa: E731
        for (x, low), (y, high) in pairwise(own):
            if (low - level) * (high - level) < 0:
                return (
                    f"jumps past {level:g} {unit}, from {low:.4g}{knob(x)} to {high:.4g}{knob(y)}"
                )
        most = own[0][1] < level
        x, end = (max if most else min)(own, key=lambda point: point[1])
        told = [f"reaches {'at most' if most else 'at least'} {end:.4g} {unit}{knob(x)}", *raised]
        return ", elsewhere ".join(told)

    def _try(self, looseness: float, width: int) -> None:
        self.on_pass()
        self.passes += 1
        try:
            done = self.run(self.family.policy(looseness), width)
            spent = {other: self.amount(own) for other, own in done.items()}
            if math.isnan(spent[width]):
                raise ValueError("must spend a number of nats; got NaN")
        except Exception as error:  # whatever a rule of the user's raises
            self.errors[looseness] = error
            return
        for other, own in done.items():
            self.replays[other][looseness], self.spent[other][looseness] = own, spent[other]

    def _next(self, width: int, level: float, step: int) -> float | None:
        """Return the looseness to try next, None if nothing is left."""
        family, points = self.family, sorted(self.spent[width].items())
        tried = {*self.spent[width], *self.errors}
        if not points and not tried:
            return self.solved.get(max(self.solved, default=0), family.first)
        flat = [(low[0], high[0]) for low, high in pairwise(points)
                if level < low[1] and abs(high[1] - low[1]) <= FLAT * low[1]]  # fmt: skip
        for low, high in pairwise(points):
            if (low[1] - level) * (high[1] - level) < 0 and self._wide(low[0], high[0]):
                return _between(low, high, level if step % HALVING else None)
        sides = {own > level for _, own in points}
        if len(sides) == 1 and family.least < family.most:
            up = not sides.pop()
            x = _beyond(points[-2:] if up else points[:2], level)
            near, x = points[-1 if up else 0][0], min(max(x, family.least), family.most)
            if not up and flat and flat[0][0] == near:
                x = family.least
            wrong = [other for other in self.errors if (other > near) == up]
            if wrong:  # between the last value that can be run and the first that cannot
                x = math.sqrt(near * (min if up else max)(wrong))
            if x not in tried and self._wide(*sorted((x, near))):
                return x
        if family.trusted:
            return None
        values = {family.value(x) for x in tried}
        free = (x for x in _grid(family) if family.value(x) not in values)
        return next((x for x in free if not any(low < x < high for low, high in flat)), None)

    def _wide(self, low: float, high: float) -> bool:
        """Return whether a value of the knob may lie between two."""
        ends = self.family.value(low), self.family.value(high)
        return high / low > 1 + NARROW and abs(ends[1] - ends[0]) > float(self.family.whole)


def _grid(family: Family) -> Iterator[float]:
    ratio = family.most / family.least
    yield from (family.least * ratio ** (step / POWERS) for step in range(POWERS + 1))
    yield from (family.most * step / EVEN for step in range(1, EVEN))


def _between(low: Point, high: Point, level: float | None) -> float:
    """Return x where the line through two points reaches the level; None asks for the middle."""
    share = 0.5
    if level is not None and min(low[1], high[1]) > 0 and math.isfinite(low[1] + high[1]):
        share = math.log(level / low[1]) / math.log(high[1] / low[1])
    share = min(max(share, MARGIN), 1 - MARGIN)
    return low[0] * (high[0] / low[0]) ** share


def _beyond(points: Sequence[Point], level: float) -> float:
    """Return x where the line through one point, or two of a side, reaches the level.

    At most STRIDE away, and so far where there is no line.
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
    """Return a family about the least tilt at which nothing exceeds a surprise, and its knobs.

    Of a family without the knob ``tilt``, with one that is given, and where nothing is over
    without one, return it as it is. If no tilt helps, return what had the least surprise. At
    ``level`` the surprise falls as the tilt rises: a bracket grows from the tilt ``start`` by
    FARTHER, and closes by the rule of Illinois. Nats are held roughly, and to the end by whoever
    goes on with the knobs.
    """
    tried: dict[float, tuple[float, Family, Knobs]] = {}

    def over(tilt: float) -> float:
        if tilt not in tried:
            near = min(tried, key=lambda other: abs(other - tilt), default=None)
            first = family.first if near is None else tried[near][2].solved.get(width, family.first)
            own = family.tilted(tilt, first)
            made = knobs(own)
            exactly, made.tolerance = made.tolerance, ROUGH
            found = made.at(width, level)
            made.tolerance = exactly
            tried[tilt] = math.inf if found is None else surprise_of(found) - most, own, made
        return tried[tilt][0]

    at_none = over(0.0)
    if at_none <= CLOSE_SURPRISE or not family.tiltable or not family.varied:
        return tried[0.0][1:]
    low, tilt, step = (0.0, at_none), start or FIRST_TILT, FARTHER
    while (high := (tilt, over(tilt)))[1] > 0:
        if high[1] < math.inf:
            low = high
        else:  # the tilt alone spends more, so the next one is nearer
            step = math.sqrt(step)
        if step < LEAST_STEP or tilt > MOST_TILT:
            return min(tried.values(), key=lambda own: own[0])[1:]
        tilt = (low[0] or tilt / FARTHER**2) * step
    kept = 0
    while high[1] < -CLOSE_SURPRISE and high[0] - low[0] > CLOSE_TILT * high[0]:
        tilt = (low[0] * high[1] - high[0] * low[1]) / (high[1] - low[1])
        found = tilt, over(tilt)
        if found[1] > 0:
            low, high = found, (high[0], high[1] / (2 if kept > 0 else 1))
            kept = max(kept, 0) + 1
        else:
            low, high = (low[0], low[1] / (2 if kept < 0 else 1)), found
            kept = min(kept, 0) - 1
    return min((own for own in tried.values() if own[0] <= 0), key=lambda own: -own[0])[1:]


def surprise_of(done: Any) -> float:
    """Return the surprise of a replay, a token, or of means over rows."""
    return (
        done.surprise if hasattr(done, "surprise") else done.divergence_per_token("surprise")
    ).value


def checked_level(level: float, name: str = "nats") -> float:
    """Return nats or an acceptance; ValueError unless above 0 and finite, or at most 1."""
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
    """Return the knobs of a family on a trace; K share a replay where they can.

    ``signed`` is what replays add up beside the divergence.
    """
    shared = shares_rows(family.base, family.verifier)

    def run(policy: Policy, width: int) -> dict[int, Any]:
        own = policy, family.verifier, widths if shared else [width], (divergence, *signed)
        return replay_widths(trace, *own, undrafted=undrafted)

    amount = options.pop("amount", lambda own: own.divergence_per_token(divergence.spec).value)
    options["step"] = STEP if divergence == REGRET else 0.0
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
    """Return a policy at the value of its knob at which it spends given nats on rows.

    Parameters
    ----------
    rule : a policy by name, ``"band:price"``; ``"mine.py:rule"``; or a Policy, whose knob is free.
    rows : a pair of rows (..., V), target and draft; their file; a trace or its folder.
    nats : mean divergence of the emitted law over rows; on a trace per emitted token.
    acceptance : instead of nats: mean acceptance over rows; on a trace of the drafted tokens that
        are decided.
    regret : on a trace of temperature 0 instead of nats: nats of regret per emitted token.
    divergence : what is spent; nats are in its unit.
    verifier, num_draft_tokens, undrafted : on a trace, as for
        :func:`cactus_theory.traces.replay`.

    Raises
    ------
    Unsolved
        A ValueError, with the policy's name: no free knob, no value that spends so much or so
        little, a jump past it, or the error of the policy itself.
    ValueError, TypeError, OSError
        Not exactly one of nats, acceptance and regret; regret where the temperature is not 0;
        an unknown policy; rows that are none.

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
    """Return rows of a pair of arrays, of a file of both, or of a trace or its folder."""
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
    """Return the divergence that nats measure: on a trace of temperature 0 regret.

    Raises ValueError for nats there, and for regret elsewhere.
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
    """Return the knobs of a family on rows, or on a trace at K = ``width``; as trace_knobs."""
    options: dict[str, Any] = {"tolerance": CLOSE if held == "acceptance" else EXACT}
    if held == "acceptance" and not family.base.declares.direction:  # which may fall as nats rise
        family = replace(family, trusted=not family.varied)
    if isinstance(source, Trace):
        if held == "acceptance":
            options["amount"] = lambda own: own.acceptance.value
        return trace_knobs(source, family, [width], kind, undrafted, signed, **options)
    amount = lambda own: (own.acceptance if held == "acceptance" else own.divergence).value  # noqa: E731
    run = lambda policy, width: {width: row_means(policy, source, kind)}  # noqa: E731
    return Knobs(family, [width], run, amount, **options)
