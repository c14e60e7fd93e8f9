r"""Decide about a drafted token under the band without solving the band.

A token n with coin u is kept iff u p_n < b q_n, that is iff r = u p_n/q_n is below the band's
upper edge b. This can be decided at r itself, without solving for b:

* at a price λ, f′(b) − f′(a) = 1/λ makes a = a(b) a function of b, and the excess
  :math:`E(b) = Σ_i [\mathrm{clip}(p_i, a q_i, b q_i) − p_i]` rises in b and is 0 at the band's
  own b: keep iff E(r) < 0, one pass over the row;
* at a budget δ, :math:`Σ(aq − p)_+ = Σ(p − rq)_+` gives the a that belongs to r, and the
  divergence D rises with r: keep iff D < δ, some passes.

Proof: THEORY.md, Theorem 15.

Only a refusal needs the band itself, for the residual (aq − p)₊: a few more passes find the
root. Everything is in the precision of the rows and in reused memory. The sums are of
differences that are 0 inside the band, so that the edges are as precise as the rows.

Rows may miss 1 by rounding. With t = Σp/Σq the band of the normalised rows has edges a/t and
b/t, and nothing else changes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory._scratch import scratch
from cactus_theory.divergences import FDivergence

Rows = Float[Tensor, "rows vocab"]

# q = 0 counts as this, so that p/q stays finite
LEAST = {torch.float32: 1e-30, torch.float64: 1e-290}
# a ratio above this can only come from a q that counts as LEAST, or from an infinite edge
MOST = {torch.float32: 1e25, torch.float64: 1e280}
# how far a row's sum may be from 1 (relative), so how far beyond its limits an edge may lie
SLACK = {torch.float32: 2e-4, torch.float64: 2e-9}
# a secant step this small (relative) is the last one: two units of rounding, as the functions
# have kinks where an edge passes a token, and what a step across one leaves is a share of the step
SETTLED = {torch.float32: 2e-7, torch.float64: 2e-14}
# that product may be this share of it
SECOND = 1 / 200
# bisection alone takes 60 halvings of ln b for float64; a secant takes about five steps
MOST_STEPS = 100
# x E′(x) is the mass outside the band, 0.3 to 1 on rows of language models
STEEPNESS = 0.9
# x S′(x)/S of the mass below the lower edge, S(x) = Σ(xq − p)₊, on such rows: 1 to 5
RISE = 2.0
# no guess is further away than a factor of e to this
FARTHEST = 50.0
# where nothing was cut, a is 0: the next search starts no lower than this share of Σp/Σq
NEAREST = 1e-3


@dataclass(frozen=True)
class Judged:
    """The band's decision on N tokens: which are kept, and the edges (a, b) for the others."""

    kept: list[bool]
    lower: list[float]
    upper: list[float]


class Ratios:
    """p/q of rows (N, V) of one precision, and what clipping it to edges moves."""

    def __init__(self, q: Rows, p: Rows) -> None:
        self.dtype, self.target, self.draft = q.dtype, q, p
        memory = scratch("decide", (4, *q.shape), q.dtype, q.device).unbind(0)
        self.q = torch.clamp(q, min=LEAST[q.dtype], out=memory[0])
        self.ratio = torch.div(p, self.q, out=memory[1])
        self.clipped, self.spare = memory[2:]
        self.single = q.shape[0] == 1

    def totals(self) -> tuple[list[float], list[float]]:
        """Return Σq and t = Σp/Σq of each row."""
        target, draft = (row.sum(-1, dtype=torch.float64) for row in (self.target, self.draft))
        return target.tolist(), (draft / target).tolist()

    def most(self, row: int) -> float:
        """Return the largest p/q of a row, tokens with q = 0 left out."""
        most = float(self.ratio[row].amax())
        if most > MOST[self.dtype]:
            most = float(torch.where(self.target[row] > 0, self.ratio[row], 0.0).amax())
        return most

    def clip(self, lower: Sequence[float] | None, upper: Sequence[float] | None) -> Tensor:
        """Return p/q clipped to one or two edges a row, in memory that the next call reuses."""
        ratio, out = self.ratio, self.clipped
        if self.single:
            low, high = (None if edge is None else edge[0] for edge in (lower, upper))
            return torch.clamp(ratio, low, high, out=out)
        given = [edge for edge in (lower, upper) if edge is not None]
        edges = torch.tensor(given, dtype=self.dtype, device=ratio.device)[..., None]
        if lower is not None:
            ratio = torch.maximum(ratio, edges[0], out=out)
        return ratio if upper is None else torch.minimum(ratio, edges[-1], out=out)

    def moved(self, lower: Sequence[float] | None, upper: Sequence[float] | None) -> list[float]:
        """Return Σ q (clip(p/q) − p/q) of each row."""
        return self.clip(lower, upper).sub_(self.ratio).mul_(self.q).sum(-1).tolist()


class RisingRoot:
    """A search for the root of a rising function of x > 0, which the caller evaluates.

    By secants in ln x; a step that did not halve the value is followed by half the bracket.
    ``steepness`` is a guess of x f′(x), for the first step; ∞ halves the bracket instead.

    Attributes
    ----------
    x : where the function is to be evaluated next; the root once ``done``.
    """

    def __init__(
        self, low: float, high: float, start: float, settled: float, steepness: float = math.inf
    ) -> None:
        self.low, self.high, self.settled, self.steepness = low, high, settled, steepness
        self.x = min(max(start, low), high)
        self.done = high <= low
        self.before: tuple[float, float] | None = None
        self.steps = 0

    def tell(self, value: float) -> None:
        """Use the value at ``x`` and choose the next ``x``."""
        x, before = self.x, self.before
        self.steps += 1
        if value == 0:
            self.done = True
            return
        if value > 0:
            self.high = x
        else:
            self.low = x
        following, guess, last = math.sqrt(self.low) * math.sqrt(self.high), 0.0, math.inf
        slow = False
        if before is not None and math.isfinite(before[1]):
            last = abs(x - before[0]) / x
            self.steepness = (value - before[1]) / math.log(x / before[0])
            slow = abs(value) > abs(before[1]) / 2
        if not slow and abs(value) < FARTHEST * self.steepness:
            guess = x * math.exp(-value / self.steepness)
        if self.low < guess < self.high:
            following = guess
        step = abs(following - x) / x
        self.before, self.x = (x, value), following
        # what a secant step leaves is of the order of its product with the step before
        self.done = step <= self.settled or self.steps >= MOST_STEPS
        self.done = self.done or (following == guess and step * last <= self.settled * SECOND)


def _settle(roots: list[RisingRoot], evaluate: Callable[[list[float]], list[float]]) -> list[float]:
    """Return the roots of several functions, which are evaluated together."""
    while not all(root.done for root in roots):
        for root, value in zip(roots, evaluate([root.x for root in roots]), strict=True):
            if not root.done:
                root.tell(value)
    return [root.x for root in roots]


def _judge(
    ratio: Sequence[float],
    roots: list[RisingRoot],
    evaluate: Callable[[list[float]], list[float]],
    lower: Callable[[list[float]], list[float]],
) -> Judged:
    """Return the decision on each token, from the first value, at r; solve the refused bands.

    The lower edge of a kept token is 0: nothing is asked of it.
    """
    limits = [root.high for root in roots]
    first = evaluate([root.x for root in roots])
    looked_at = zip(first, ratio, limits, strict=True)
    kept = [value < 0 and own < limit for value, own, limit in looked_at]
    for root, value, keep in zip(roots, first, kept, strict=True):
        root.tell(value)
        root.done = root.done or keep
    if all(kept):
        return Judged(kept, [0.0] * len(kept), limits)
    upper = _settle(roots, evaluate)
    found = [0.0 if keep else edge for keep, edge in zip(kept, lower(upper), strict=True)]
    return Judged(kept, found, upper)


def _matched(
    rows: Ratios,
    scales: Sequence[float],
    uppers: Sequence[float],
    starts: Sequence[tuple[float, float]],
) -> list[RisingRoot]:
    """Return the a of each row with Σ(aq − p)₊ = Σ(p − bq)₊, tokens with q = 0 counted.

    ``starts`` are a guess of each a and of the steepness there.
    """
    slack, settled = SLACK[rows.dtype], SETTLED[rows.dtype]
    least, cut = LEAST[rows.dtype], rows.moved(None, uppers)
    roots = [
        RisingRoot(least, scale * (1 + slack), max(start, NEAREST * scale), settled, steepness)
        for scale, (start, steepness) in zip(scales, starts, strict=True)
    ]

    def left(lowers: list[float]) -> list[float]:
        return [
            _log_ratio(own, -gone) for own, gone in zip(rows.moved(lowers, None), cut, strict=True)
        ]

    _settle(roots, left)
    return roots


def _log_ratio(one: float, other: float) -> float:
    """Return ln(one/other) of two numbers that may be 0, 0 if both are."""
    if one > 0 and other > 0:
        return math.log(one / other)
    return 0.0 if one == other else math.copysign(math.inf, one - other)


@torch.no_grad()
def decide_at_price(
    q: Rows, p: Rows, ratio: Sequence[float], f: FDivergence, price: float
) -> Judged:
    """Return which tokens the band at ``price`` keeps, and a of the rows that refuse theirs.

    ``ratio`` is u p_n/q_n of each row's token, ∞ where q_n = 0. ``f`` must be smooth, the price
    positive and finite.
    """
    rows, step = Ratios(q, p), 1 / price
    scales = [1.0] * len(q) if f.scale_free else rows.totals()[1]
    slack, settled = SLACK[q.dtype], SETTLED[q.dtype]

    def lower(uppers: list[float]) -> list[float]:
        pairs = zip(scales, uppers, strict=True)
        return [scale * f.lower_edge(upper / scale, step) for scale, upper in pairs]

    def limit(row: int, scale: float) -> float:
        """Return the largest b that can be the band's own: a ≤ 1 there, and b ≤ max p/q."""
        most = scale * f.upper_edge(1.0, step)
        return max(most if most < MOST[q.dtype] else rows.most(row), scale) * (1 + slack)

    limits = [limit(row, scale) for row, scale in enumerate(scales)]

    def last_lower(uppers: list[float]) -> list[float]:
        """Return a(b), or where the path ended first (all that is cut has q = 0) its own a."""
        found = lower(uppers)
        # the search comes as near to its limit as it is settled; every ratio is below that
        near = 1 - slack / 4
        ended = [upper >= near * most for upper, most in zip(uppers, limits, strict=True)]
        if not any(ended):
            return found
        ends = _matched(rows, scales, uppers, [(low, RISE) for low in found])
        return [end.x if own else low for end, own, low in zip(ends, ended, found, strict=True)]

    roots = [
        RisingRoot(scale * (1 - slack), most, own, settled, STEEPNESS)
        for scale, most, own in zip(scales, limits, ratio, strict=True)
    ]
    return _judge(ratio, roots, lambda upper: rows.moved(lower(upper), upper), last_lower)


@torch.no_grad()
def decide_at_budget(
    q: Rows, p: Rows, ratio: Sequence[float], f: FDivergence, delta: float
) -> Judged:
    """Return which tokens the band of budget ``delta`` keeps, and a of the rows that refuse.

    As :func:`decide_at_price`; the budget must be positive and finite. The search is for
    √D = √δ: D is flat at b = 1, so that secants in D would end too early at small δ.
    """
    rows = Ratios(q, p)
    mass, scales = rows.totals()
    slack, settled = SLACK[q.dtype], SETTLED[q.dtype]
    aim = math.sqrt(delta)
    # where the search for a starts: where its last one ended
    known = [(scale / 2, RISE) for scale in scales]

    def lower(uppers: list[float]) -> list[float]:
        found = _matched(rows, scales, uppers, known)
        known[:] = [(root.x, root.steepness) for root in found]
        return [root.x for root in found]

    def over(uppers: list[float]) -> list[float]:
        clipped = rows.clip(lower(uppers), uppers)
        clipped.div_(torch.tensor(scales, dtype=q.dtype, device=q.device)[:, None])
        costs = f.centred(clipped, out=rows.spare).mul_(rows.q).sum(-1).tolist()
        return [
            math.sqrt(max(cost, 0.0) / own) - aim for cost, own in zip(costs, mass, strict=True)
        ]

    roots = [
        RisingRoot(scale * (1 - slack), max(rows.most(row), scale) * (1 + slack), own, settled)
        for row, (scale, own) in enumerate(zip(scales, ratio, strict=True))
    ]
    return _judge(ratio, roots, over, lower)
