"""The policies that are tuned, and the knob at which each one's meter reads a given divergence.

A trace is frozen and coins are integrated out, so that the meter is a continuous function of the
knob that rises with its looseness x. It is nearly a power of x, so the next x is read off a
straight line in logarithms between the nearest two known ones on either side.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cactus_theory.base import arguments as check
from cactus_theory.base.specs import names_a_file
from cactus_theory.decoding.schedule import followers
from cactus_theory.divergences import Divergence
from cactus_theory.policies import Policy, read_policy
from cactus_theory.policies.band import EOS
from cactus_theory.traces.ends import LOSSLESS
from cactus_theory.traces.estimate import Replay
from cactus_theory.traces.replays import replay_widths, shares_rows
from cactus_theory.traces.trace import Trace
from cactus_theory.verify.contract import find_verifier, verifiers


@dataclass(frozen=True)
class Family:
    """A policy at any value of its knob, under one verifier; or at one value only.

    Attributes
    ----------
    name, verifier : ``band:price``, ``chain``.
    base : the policy at some value of its knob.
    varied : the knob's name; without, there is nothing to tune.
    knob : the knob's value at a looseness x > 0: the larger x is, the more may be emitted.
    least, first, most : x nearest to lossless, to begin with, and loosest.
    """

    name: str
    verifier: str
    base: Policy
    varied: str = ""
    knob: Callable[[float], float] = float
    least: float = 1.0
    first: float = 1.0
    most: float = 1.0

    @property
    def key(self) -> str:
        """Return name and verifier as one word."""
        return f"{self.name}@{self.verifier}"

    @property
    def lossless(self) -> bool:
        """Return whether it emits the target's law."""
        return self.name == LOSSLESS

    def at(self, value: float) -> Policy:
        """Return the policy at a value of its knob."""
        return read_policy(self.base, **{self.varied: value})

    def policy(self, looseness: float) -> Policy:
        """Return the policy at a looseness; its knob has six digits."""
        return self.at(float(f"{self.knob(looseness):.6g}")) if self.varied else self.base


# knob → its value by looseness, and the least, first and most looseness that are tried
KNOBS = {
    "delta": (float, 1e-9, 1e-3, 1e2),
    "price": (lambda looseness: 1 / looseness, 1e-4, 1.0, 1e2),
    "lenience": (lambda looseness: math.exp(-looseness), 1e-6, 0.5, 30.0),
    "alpha": (float, 1e-6, 0.1, 1.0),
    "temperature": (lambda looseness: 1 / (1 + looseness), 1e-4, 0.2, 1e2),
    "top_p": (lambda looseness: math.exp(-looseness), 1e-4, 0.05, 1e1),
}
# family tried by default → its verifiers
USUAL = {
    LOSSLESS: ("chain", "block"),
    "cactus:delta": ("chain",),
    "band:price": ("chain", "block"),
    "lenience:lenience": ("chain",),
    "mixture:alpha": ("chain",),
}
# family tried by name → its verifiers; the last two are lossless sampling of another target
OTHERS = {
    "band:delta": ("chain",),
    "cactus_exact:delta": ("chain",),
    "tempered:temperature": ("chain", "block"),
    "truncated:top_p": ("chain", "block"),
}


def families(
    kind: Divergence, names: Sequence[str] | None = None, ends: Sequence[Any] = (EOS,)
) -> list[Family]:
    """Return the families to tune for a divergence.

    Parameters
    ----------
    names : of families (``band:price`` or ``band``; ``cactus:delta@block`` under one verifier;
        ``band,hold=eos`` with other knobs at these values), or whole specs
        (``typical:epsilon=0.3``), which are taken as they are; lossless ones are always among
        them. None for the usual ones.
    ends : ids that ``eos`` stands for in specs; it stays where none are given.

    Raises
    ------
    ValueError, TypeError
        A name that is neither, a policy that no verifier can follow, a price in a divergence
        without one.
    """
    band = "band:price" if kind.priced else "band:delta"  # without a price it has a budget
    usual = [band if own == "band:price" else own for own in USUAL]
    specs = usual if names is None else [LOSSLESS, *names]
    found = [family for name in specs for family in _named(name, kind, ends)]
    return [*{family.key: family for family in found}.values()]


def _named(name: str, kind: Divergence, ends: Sequence[Any]) -> list[Family]:
    """Return the families that a name stands for, under each verifier, or the one that it says.

    A first word is enough, ``band,hold=eos`` for ``band:price,hold=eos``, and goes by both
    verifiers, except Cactus: in blocks it reads a row again for every token that may be rejected.
    """
    whole, _, judge = name.partition("@")
    family, comma, others = whole.partition(",")
    known, judges = USUAL | OTHERS, None
    words = (own for own in known if kind.priced or own != "band:price")
    if long := next((own for own in words if own.split(":")[0] == family != LOSSLESS), None):
        judges = USUAL["cactus:delta" if "cactus" in family else LOSSLESS]
        family, whole = long, f"{long}{comma}{others}"
    if family in known and family != LOSSLESS:
        varied = family.split(":")[1]
        if varied == "price" and not kind.priced:
            raise ValueError(
                f"policies: {family} is for divergences with a price, band:delta for the others; "
                f"got {kind.spec}"
            )
        knob = KNOBS[varied]
        base = read_policy(f"{family}={knob[0](1.0)}{comma}{others}").at_ends(ends)
        if family.startswith("band:") and kind.spec != "kl":  # whose rows are optimal for it
            base = read_policy(base, divergence=kind.spec)
        tried = [find_verifier(judge).name] if judge else judges or known[family]
        return [Family(whole, verifier, base, varied, *knob) for verifier in tried]
    if "=" not in name and ":" in name and not names_a_file(name):
        rule = f"must be a policy with its knobs, or one of {', '.join(known)}"
        raise ValueError(f"policies: {rule}; got {name!r}")
    base = read_policy(name).at_ends(ends)
    # one that takes more than chains is one of the others on them
    chains = [own for own in verifiers() if find_verifier(own).drafts == ("chain",)]
    able, refused = followers(base, USUAL.get(name, chains))
    if not able:
        raise ValueError(f"policies: a verifier must be able to follow {base.spec}; got {refused}")
    return [Family(base.spec, verifier, base) for verifier in able]


def checked_level(level: float) -> float:
    """Return a divergence per token; ValueError unless it is a finite number above 0."""
    return check.finite("divergence-per-token", level, 0, open_low=True)


# largest relative miss of the level by the meter: a tenth of the standard error over 20 texts
TOLERANCE = 2e-3
# longest step in x, as a factor, while no x on the other side is known; and the power of x that the
# meter is taken for where only one point is known
STRIDE = 8.0
SLOPE = 1.5
# least distance of a point from the ends of its bracket, as a share of the bracket in ln x
MARGIN = 0.02
# steps between two halvings of the bracket, lest a bent curve hold one end of it
HALVING = 4
# relative width of a bracket that holds a jump over the level: the knob below is taken
NARROW = 1e-3
MOST_STEPS = 60
Point = tuple[float, float]


class Knobs:
    """The replays of one family, which different K share where they can.

    Parameters
    ----------
    trace : what is replayed.
    family : what is tuned.
    widths : every K that will be asked for.
    divergence : spec of what the meter adds up.
    on_pass : called before every replay.
    """

    def __init__(
        self,
        trace: Trace,
        family: Family,
        widths: Sequence[int],
        divergence: str,
        on_pass: Callable[[], Any] = lambda: None,
    ) -> None:
        self.trace, self.family, self.divergence = trace, family, divergence
        self.widths = list(widths)
        self.shared = shares_rows(family.policy(family.first), family.verifier)
        self.passes, self.on_pass = 0, on_pass
        self.solved: dict[int, float] = {}
        self.replays: dict[int, dict[float, Replay]] = {width: {} for width in widths}

    def at(self, width: int, level: float) -> Replay | None:
        """Return the replay that spends ``level`` a token, as exactly as TOLERANCE says.

        Where even the loosest knob spends less it is that one's; None where the least one
        spends more.
        """
        family, replays = self.family, self.replays[width]
        if family.least == family.most:
            replay = replays.get(family.first) or self._replay(family.first, width)
            return replay if self._spent(replay) <= level * (1 + TOLERANCE) else None
        for step in range(1, MOST_STEPS):
            spent = {x: self._spent(replay) for x, replay in replays.items()}
            for x, amount in spent.items():
                if abs(amount / level - 1) <= TOLERANCE:
                    self.solved[width] = x
                    return replays[x]
            if spent.get(family.most, level) < level:
                return replays[family.most]
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
        below = [replay for replay in replays.values() if self._spent(replay) <= level]
        return max(below, key=self._spent, default=None)

    def _replay(self, looseness: float, width: int) -> Replay:
        widths = self.widths if self.shared else [width]
        policy, verifier = self.family.policy(looseness), self.family.verifier
        self.on_pass()
        self.passes += 1
        replays = replay_widths(self.trace, policy, verifier, widths, (self.divergence,))
        for other, replay in replays.items():
            self.replays[other][looseness] = replay
        return replays[width]

    def _spent(self, replay: Replay) -> float:
        return replay.divergence_per_token(self.divergence).value


def _between(low: Point, high: Point, level: float | None) -> float:
    """Return x where the line through two points reaches the level; None asks for the middle."""
    share = 0.5
    if level is not None and low[1] > 0 and math.isfinite(high[1]):
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
