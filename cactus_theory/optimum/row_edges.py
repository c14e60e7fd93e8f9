"""Searches for the edges of one row's band, compiled by numba: at a price, and within a budget.

A band is the row g = P h = clip(p, A q, U q) with edges A and U; P is the alive ratio (1 in a
chain). A band may have boxes (THEORY.md, Theorems 24 and 25). The head is the set of tokens that
may rise above q: off the head U is at most P. Single tokens have bounds c ≤ h/q ≤ C. A token with q
below LEAST counts as a token with q = 0, as its p/q might overflow. Σ g is linear in the edges
between two ratios p/q, so that Newton's method ends after a few passes.

A divergence is given by its curve (c, a): f″(t) = c t^(a−2), or ½/(t(1 + t)), the Jensen-Shannon
divergence, if a is NaN.
"""

import math

import numpy as np

from cactus_theory.base.tolerances import LEAST, MOST
from cactus_theory.optimum.batch_edges import CLOSE, MOST_COST, POLISH, SHARE, UNDAMPED, WIDTH
from cactus_theory.optimum.passes import (
    Boxes,
    Row,
    compiled,
    edges_of,
    largest_of,
    outer_sums,
    sums_of,
)

# largest U at which U q is negligible for every q below LEAST, so that q needs no test
PLAIN = 1e200
# relative step at which the search for an edge ends, for float64 rows and for others
SETTLED, COARSE = 1e-13, 2e-7
# most steps of a search
MOST_STEPS = 80


@compiled
def slope_of(c: float, a: float, t: float) -> float:
    """Return f′(t) − f′(1), also at t = 0."""
    if a != a:  # Jensen-Shannon
        return (math.log(2.0) - math.log1p(1 / t)) / 2
    if a == 1:
        return c * math.log(t)
    return c * math.expm1((a - 1) * math.log(t)) / (a - 1)


@compiled
def value_of(c: float, a: float, t: float) -> float:
    """Return f(t) − f′(1)(t − 1) at t > 0."""
    if a != a:  # Jensen-Shannon
        half = (t - 1) / 2
        return -(t * math.log1p(-half / t) + math.log1p(half)) / 2
    log = math.log(t)
    if a == 1:
        return c * (t * log - (t - 1))
    if a == 0:
        return c * ((t - 1) - log)
    return c * (math.expm1(a * log) - a * (t - 1)) / (a * (a - 1))


@compiled
def lower_of(c: float, a: float, step: float, upper: float) -> float:
    """Return t with f′(``upper``) − f′(t) = ``step``, or 0 if f′ does not fall that far."""
    if a != a:  # Jensen-Shannon
        share = (1 / (1 + 1 / upper)) * math.exp(-step / c)
        return share / (1 - share)
    if a == 1:
        return upper * math.exp(-step / c)
    power = upper ** (a - 1) - (a - 1) * step / c
    return power ** (1 / (a - 1)) if power > 0 else 0.0


@compiled
def fall_of(a: float, upper: float, lower: float) -> float:
    """Return f″(upper)/f″(lower): how fast the lower edge moves with the upper edge at a price."""
    if lower == 0:
        return 0.0
    if a != a:  # Jensen-Shannon
        return lower * (1 + lower) / (upper * (1 + upper))
    return (upper / lower) ** (a - 2)


@compiled
def part_sums(
    q: Row, p: Row, lower: float, upper: float, unit: float, head_least: float
) -> tuple[float, float, float]:
    """Return the sums of :func:`clipped_sums` over tokens without boxes of their own."""
    total = above = below = 0.0
    if head_least == 0 and upper < PLAIN:  # the same sums without tests of q, for speed
        for i in range(q.size):
            q_i, p_i = np.float64(q[i]), np.float64(p[i])
            top, bottom = upper * q_i, lower * q_i
            value = top if top < p_i else p_i
            total += value if value > bottom else bottom
            above += q_i if top < p_i else 0.0
            below += q_i if p_i < bottom else 0.0
        return total, above, below
    off_head = min(upper, unit)  # the upper edge off the head: P, as U ≥ P up to rounding
    for i in range(q.size):
        q_i, p_i = np.float64(q[i]), np.float64(p[i])
        q_i = q_i if q_i >= LEAST else 0.0
        on_head = q_i >= head_least
        top, bottom = (upper if on_head else off_head) * q_i, lower * q_i
        value = top if top < p_i else p_i
        total += value if value > bottom else bottom
        above += q_i if (on_head and top < p_i) else 0.0
        below += q_i if p_i < bottom else 0.0
    return total, above, below


@compiled
def clipped_sums(
    q: Row, p: Row, lower: float, upper: float, unit: float, boxes: Boxes
) -> tuple[float, float, float]:
    """Return Σ clip(p, Aq, Uq) and its slopes in U and A: the q of tokens above and below the band.

    ``unit`` is P; ``boxes`` are the least q of the head (0: all tokens), rising ids of tokens that
    must not fall, and their C. Where a box sets a token's edge, the edge stays there as U and A
    move, so the token has no part in the slope.
    """
    head_least, ids, _ = boxes
    if ids.size == 0:
        return part_sums(q, p, lower, upper, unit, head_least)
    total = above = below = 0.0
    start = 0
    # the tokens before each token with a box of its own, then this token; at last the other tokens.
    # No term is taken back from a sum: that would lose terms much smaller than this one
    for j in range(ids.size + 1):
        stop = ids[j] if j < ids.size else q.size
        part = part_sums(q[start:stop], p[start:stop], lower, upper, unit, head_least)
        total, above, below = total + part[0], above + part[1], below + part[2]
        start = stop + 1
        if stop < q.size and q[stop] >= LEAST:
            q_i, p_i = np.float64(q[stop]), np.float64(p[stop])
            top = upper if q_i >= head_least else min(upper, unit)
            low, high = edges_of(lower, top, unit, boxes, j)
            total += max(low * q_i, min(p_i, high * q_i))
            above += q_i if (q_i >= head_least and high == upper and high * q_i < p_i) else 0.0
    return total, above, below


# The search at a price. The price gives A from U by f′(U/P) − f′(A/P) = step, so only U is searched
# for: the excess Σ clip(p, Aq, Uq) − P Σ p rises in U, and its root gives the row.
# 1. Bracket: at U = P the row is at most P q, whose mass is the goal; at U/P = highest, where A is
#    P, the row is at least P q. No U beyond the largest p/q changes a sum.
# 2. A pass over the row gives the excess and its slope; the sign narrows the bracket.
# 3. Newton's step, which between two neighbouring ratios p/q is exact but for f′. A step out of the
#    bracket, or a second step that does not halve the excess, is replaced by the geometric middle
#    of the bracket. So of two passes one halves the excess, or the bracket is halved in logarithms.
# 4. The search ends where a step moves U by less than the rounding of the rows, or the excess is 0.
#    A decision only needs whether the root is above a threshold: a negative excess there proves it.
# 5. If nothing is cut and mass is still lacking, no U is the root: A alone rises, up to P.


@compiled
def bracket_at_price(
    q: Row, p: Row, alive: float, highest: float, threshold: float
) -> tuple[float, float, float, float, float, float]:
    """Return six numbers with which the search for U begins.

    They are P in units of p/q, the sum that g must have, the lower and the upper end of a bracket
    of U, the U to try first, and the largest p/q, beyond which a rise of U changes no sum. If the
    largest U/P, ``highest``, is finite, it limits the search instead: the last number is then ∞.
    """
    mass, drafted = sums_of(q, p)
    largest = largest_of(q, p) if highest == math.inf else math.inf
    if not (0 < mass < math.inf):
        mass = 1.0  # no distribution: an error is raised where a token is drawn from the row
    if drafted == 0:
        drafted = mass
    unit, goal = alive * drafted / mass, alive * drafted
    low, high = unit * (1 - 1e-9), highest * unit * (1 + 1e-9)
    # a pass at the threshold may decide the coin; else start in the bracket's geometric middle
    upper = threshold
    if not low < upper < high:
        upper = math.sqrt(low) * math.sqrt(min(high, max(MOST, unit)))
        if high == math.inf:
            upper = math.sqrt(low) * math.sqrt(max(unit, min(largest, MOST)))
    furthest = max(unit, largest) * (1 + 1e-9)
    high = min(high, furthest)
    return unit, goal, low, high, min(upper, high), furthest


@compiled
def edges_at_price(
    q: Row, p: Row, alive: float, curve: tuple[float, float], step: float, highest: float,
    boxes: Boxes, threshold: float,
) -> tuple[float, float, float]:  # fmt: skip
    """Return the edges U and A, and P, in units of p/q, at a price of 1/``step``.

    Callers may need to know only whether U > ``threshold``. If so, the search may stop early, and
    return ∞ for U and no meaningful A. ``highest`` is the value of U/P at which A = P.
    """
    c, a = curve
    settled = SETTLED if q.itemsize == 8 else COARSE
    unit, goal, low, high, upper, furthest = bracket_at_price(q, p, alive, highest, threshold)
    end_tried, was_slow, excess_before = False, False, math.inf
    for _ in range(MOST_STEPS):
        lower = unit * lower_of(c, a, step, upper / unit)
        total, above, below = clipped_sums(q, p, lower, min(upper, MOST), unit, boxes)
        excess = total - goal
        if excess < 0 and upper >= threshold:
            return math.inf, lower, unit
        if excess == 0 or not (excess == excess):  # or NaN
            break
        low, high = (upper, high) if excess < 0 else (low, upper)
        if excess < 0 and above == 0:  # nothing is cut: A alone rises, up to P
            lower = lifted(q, p, lower, MOST, unit, goal, boxes)
            return math.inf, lower, unit
        slope = above + below * fall_of(a, upper / unit, lower / unit)
        following = upper - excess / slope if slope > 0 else -1.0
        if abs(following - upper) <= settled * upper and following < furthest * (1 - 2 * settled):
            upper = min(max(following, low), high)  # found; later bracket steps would undo it
            break
        slow = abs(excess) > excess_before / 2
        if not low < following < high or (slow and was_slow):
            following = math.sqrt(low) * math.sqrt(high)
        if excess < 0 and following > furthest * (1 - 2 * settled) and not end_tried:
            following, end_tried = furthest, True  # here the test above sees whether A rises alone
        was_slow, excess_before = slow and not was_slow, abs(excess)
        moved = abs(following - upper)
        upper = following
        if moved <= settled * upper:
            break
    lower = unit * lower_of(c, a, step, upper / unit)
    if a > 1:  # f′(A/P) may be below an ulp of f′(U/P), so find A from the sum
        lower = lifted(q, p, 0.0, min(upper, MOST), unit, goal, boxes)
    return upper, lower, unit


@compiled
def lifted(
    q: Row, p: Row, low: float, upper: float, unit: float, goal: float, boxes: Boxes
) -> float:
    """Return A ≤ P with Σ clip(p, Aq, Uq) = ``goal``; off a head U is at most P = ``unit``.

    Newton's method from A = P downwards. The sum is convex in A, so no step passes the root.
    """
    lower = unit
    for _ in range(MOST_STEPS):
        total, _, below = clipped_sums(q, p, lower, upper, unit, boxes)
        if not (total > goal and below > 0):
            break
        following = max(lower - (total - goal) / below, low)
        if lower - following <= SETTLED * lower:
            return following
        lower = following
    return lower


@compiled
def edges_within(
    q: Row,
    p: Row,
    cost: Row,
    endless: bool,
    curve: tuple[float, float],
    delta: float,
    unit: float,
    drafted: float,
    ends: tuple[float, float],
    free: Boxes,
) -> tuple[float, float, bool]:
    """Return U and A with D(h‖q) = ``delta`` and Σ g = Σ p, and whether the search converged.

    Newton's method in both edges, as in :mod:`cactus_theory.optimum.batch_edges`: between two
    ratios p/q all sums are linear in the edges, except for f. ``cost`` is q f(p/q) of each token,
    with 0 for infinite values; ``endless`` is whether there are infinite values. ``drafted`` is
    Σ p, ``unit`` is Σ p/Σ q. ``ends`` are the smallest and the largest p/q, divided by ``unit``.
    ``free`` stands for no boxes.
    """
    c, a = curve
    # ``inside`` is the D of p from tokens with q > 0, ``outside`` the p of tokens with q = 0
    mass, outside, inside = drafted / unit, 0.0, 0.0
    for i in range(q.size):
        inside += cost[i]
        outside += np.float64(p[i]) if np.float64(q[i]) < LEAST else 0.0
    inside /= mass
    if inside <= delta and outside == 0 and not endless:
        return math.inf, 0.0, True
    if not inside <= MOST_COST:
        return math.inf, 0.0, False
    if outside > 0:  # the path may end where only tokens with q = 0 are cut
        lower = lifted(q, p, 0.0, MOST, unit, drafted, free)
        q_low, _, c_low, _, _, _ = outer_sums(q, p, cost, lower, MOST)
        spent = inside - c_low / mass
        if lower > 0:
            spent += q_low / mass * value_of(c, a, lower / unit)
        if spent <= delta:
            return math.inf, lower, True
    width = WIDTH * math.sqrt(2 * delta / (c if a == a else 0.25))  # f″(1) is c, or ¼
    upper = unit * max(1.0, min(math.exp(width), ends[1] ** SHARE))
    lower = unit * min(1.0, max(math.exp(-width / 2), ends[0] ** SHARE))
    for step in range(MOST_STEPS):
        q_low, p_low, c_low, q_high, p_high, c_high = outer_sums(q, p, cost, lower, upper)
        ratio_high, ratio_low = upper / unit, lower / unit
        excess = (q_high * value_of(c, a, ratio_high) - c_high) / mass
        excess += inside - delta + (q_low * value_of(c, a, ratio_low) - c_low) / mass
        # ``risen``, ``cut`` and ``rejection`` are L, U + P₀ and R of batch_edges, as shares of Σ p
        risen = (lower * q_low - p_low) / drafted
        cut = (outside + p_high - upper * q_high) / drafted
        close = abs(excess) + abs(risen - cut) <= CLOSE * (1 + delta)
        up, down, mean = slope_of(c, a, ratio_high), slope_of(c, a, ratio_low), (risen + cut) / 2
        rejection = (excess - down * risen + up * cut) / (up - down) if up > down else 0.0
        if not rejection > 0.05 * mean:  # at the start both slopes are 0
            rejection = 0.3 * mean
        new_low = lower + (rejection - risen) * drafted / q_low if q_low > 0 else lower / 2
        new_high = upper + (cut - rejection) * drafted / q_high if q_high > 0 else upper
        # no edge moves beyond half of the way to 1, in logarithms
        new_low = min(new_low, math.sqrt(ratio_low) * unit) if new_low > 0 else lower / 2
        new_high = max(new_high, math.sqrt(ratio_high) * unit)
        tiny = abs(new_low - lower) <= POLISH * lower and abs(new_high - upper) <= POLISH * upper
        if step >= UNDAMPED and step % 2 == 0 and not tiny:
            new_low, new_high = (new_low + lower) / 2, (new_high + upper) / 2
        if close and not tiny:
            return upper, lower, True
        lower, upper = new_low, new_high
        if close:
            return upper, lower, True
    return upper, lower, False
