"""Find the knob at which a family's meter reads a given divergence per token on a trace.

A trace is frozen and coins are integrated out, so that the meter is a continuous function of the
knob that rises with its looseness x. It is nearly a power of x, so the next x is read off a
straight line in logarithms between the nearest two known ones on either side.
"""

import math
from collections.abc import Sequence

from cactus_theory.traces.estimate import Replay
from cactus_theory.traces.replays import Source, replay_widths, shares_rows
from cactus_theory.traces.trace import Trace
from cactus_theory.tuning.families import Family
from cactus_theory.tuning.trees import with_caught

# what the meter may miss the level by, relative: a tenth of the standard error over 20 texts
TOLERANCE = 2e-3
# the longest step while there is no x on the other side yet, as a factor, and the power of x that
# the meter is taken for where only one point is known
STRIDE = 8.0
SLOPE = 1.5
# a point stays so far from the ends of its bracket, in the logarithm of x
MARGIN = 0.02
# every so many steps the bracket is halved, lest a bent curve holds one end of it
HALVING = 4
# a bracket this narrow (relative) holds a jump over the level: the knob below it is taken
NARROW = 1e-3
MOST_STEPS = 60
Point = tuple[float, float]


class Knobs:
    """The replays of one family, which different K share where they can.

    Parameters
    ----------
    source : a trace or saved rows.
    family : what is tuned.
    widths : every K that will be asked for.
    divergence : spec of what the meter adds up.

    Examples
    --------
    >>> from cactus_theory.traces import SavedRows
    >>> q, p = np.array([[0.2, 0.8], [0.5, 0.5]]), np.array([[0.9, 0.1], [0.6, 0.4]])
    >>> family = families(ct.divergence("kl"), ["band:price"])[2]
    >>> found = Knobs(SavedRows.of(q, p), family, [1], "kl").at(1, 0.05)
    >>> round(found.divergence_per_token("kl").value, 3)
    0.05
    """

    def __init__(
        self, source: Source, family: Family, widths: Sequence[int], divergence: str
    ) -> None:
        self.source, self.family, self.divergence = source, family, divergence
        self.widths = list(widths)
        self.shared = shares_rows(family.policy(family.first), family.verifier)
        self.passes = 0
        self.solved: dict[int, float] = {}
        self.known: dict[int, dict[float, Replay]] = {width: {} for width in widths}

    def at(self, width: int, level: float) -> Replay | None:
        """Return the replay that spends ``level`` a token, as exactly as TOLERANCE says.

        Where even the loosest knob spends less it is that one's; None where the least one
        spends more.
        """
        family, known = self.family, self.known[width]
        if family.least == family.most:
            own = known.get(family.first) or self._replay(family.first, width)
            return own if self._spent(own) <= level * (1 + TOLERANCE) else None
        for step in range(1, MOST_STEPS):
            spent = {x: self._spent(own) for x, own in known.items()}
            for x, amount in spent.items():
                if abs(amount / level - 1) <= TOLERANCE:
                    self.solved[width] = x
                    return known[x]
            if spent.get(family.most, level) < level:
                return known[family.most]
            if spent.get(family.least, level) > level:
                return None
            points = sorted(spent.items())
            low = [point for point in points if point[1] <= level][-2:]
            high = [point for point in points if point[1] > level][:2]
            if low and high and high[0][0] / low[-1][0] < 1 + NARROW:
                break
            if low and high:
                x = _between(low[-1], high[0], level if step % HALVING else None)
            elif points:
                x = min(max(_beyond(low or high, level), family.least), family.most)
            else:  # where another K has its knob
                x = self.solved.get(max(self.solved, default=0), family.first)
            self._replay(x, width)
        below = [own for own in known.values() if self._spent(own) <= level]
        return max(below, key=self._spent, default=None)

    def spec(self, own: Replay) -> str:
        """Return the family's spec at the knob of a replay; it names no table of values."""
        known = self.known[own.num_draft_tokens]
        return self.family.spec(next(x for x, found in known.items() if found is own))

    def _replay(self, looseness: float, width: int) -> Replay:
        widths = self.widths if self.shared else [width]
        rule, verifier = self.family.policy(looseness), self.family.verifier
        self.passes += 1
        found = replay_widths(self.source, rule, verifier, widths, (self.divergence,))
        if self.family.siblings:
            assert isinstance(self.source, Trace)
            found = with_caught(found, self.source, rule, verifier, self.family.siblings)
        for own, replay in found.items():
            self.known[own][looseness] = replay
        return found[width]

    def _spent(self, own: Replay) -> float:
        return own.divergence_per_token(self.divergence).value


def _between(low: Point, high: Point, level: float | None) -> float:
    """Return where the line through two points reaches the level; None asks for the middle."""
    share = 0.5
    if level is not None and low[1] > 0 and math.isfinite(high[1]):
        share = math.log(level / low[1]) / math.log(high[1] / low[1])
    share = min(max(share, MARGIN), 1 - MARGIN)
    return low[0] * (high[0] / low[0]) ** share


def _beyond(points: Sequence[Point], level: float) -> float:
    """Return where the line through one point, or two of a side, reaches the level.

    At most STRIDE away, and so far where there is no line.
    """
    near = points[-1] if points[-1][1] <= level else points[0]
    up = near[1] <= level
    if not 0 < near[1] < math.inf:
        return near[0] * (STRIDE if up else 1 / STRIDE)
    slope = SLOPE
    if len(points) == 2 and 0 < points[0][1] < points[1][1] < math.inf:
        slope = math.log(points[1][1] / points[0][1]) / math.log(points[1][0] / points[0][0])
    wanted = math.log(level / near[1]) / slope
    furthest = math.log(STRIDE)
    return near[0] * math.exp(min(max(wanted, -furthest), furthest))
