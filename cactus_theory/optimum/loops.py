"""Passes over one row, compiled by numba: sums of clipped rows, and searches for the edges.

:mod:`cactus_theory.optimum.rows` says what A, U, P and a row's units are, and loads this file when
the first row is solved. Off the head U is at most P, and h/q of single tokens may be bounded by
boxes c ≤ h/q ≤ C (THEORY.md, Theorems 24 and 25). Sums are float64 whatever the rows' dtype, and a
pass needs no memory. Σ g is linear in the edges between two ratios p/q, so that Newton's method
ends after a few passes.

A curve (c, a) is f″(t) = c t^(a−2); with a = NaN that of the Jensen-Shannon divergence,
½/(t(1 + t)). Loops whose terms are sums, products, quotients and ``log_of`` take several tokens at
once; math.log takes one.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from cactus_theory.base.tolerances import LEAST

Row = np.ndarray
# least q of the head; then ids with boxes of their own, their c and C, and which are certain
Boxes = tuple[float, Row, Row, Row, Row]
# A, U, P in the row's units, and boxes
Band = tuple[float, float, float, Boxes]
# largest p/q of a token that may rise, about 1/LEAST
MOST = 4e307
# ratio at which a token that is no normal number weighs nothing still
PLAIN = 1e200
# relative step at which edges of float64 rows count as found, and of others
SETTLED, COARSE = 1e-13, 2e-7
# most steps of a search, and after how many every second one is damped in two edges
MOST_STEPS, UNDAMPED = 80, 8
# Newton's start within a budget, as in ``edges``
WIDTH, SHARE = 1.5, 0.7
# error at which a search within a budget ends, largest step that is still taken then, and largest
# D(p‖q) in nats: beyond it D inside the band is all rounding
CLOSE, POLISH, MOST_COST = 1e-14, 1e-6, 32.0
# √½ as an int64: a number's bits less these begin with the exponent of the nearest power of 2
ROOT_BITS, MANTISSA = 0x3FE6A09E667F3BCD, 52
# tokens of a row that are added up at once, before a draw looks at each of them
BLOCK = 512


def compiled(function: Callable[..., Any]) -> Any:
    """Return a function compiled when it is first called, from a cache where one can be kept.

    Sums may be taken in any order, so that several terms are added at once; NaN and ∞ are kept, and
    x/0 is one of them.
    """
    options = {"nogil": True, "fastmath": {"reassoc", "contract"}, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # no folder for it can be written
        return njit(**options)(function)


@compiled
def slope_of(c: float, a: float, t: float) -> float:
    """Return f′(t) − f′(1)."""
    if a != a:
        return (math.log(2.0) - math.log1p(1 / t)) / 2 if t > 0 else -math.inf
    if a == 1:
        return c * math.log(t) if t > 0 else -math.inf
    if t == 0 and a < 1:
        return -math.inf
    return c * math.expm1((a - 1) * math.log(t)) / (a - 1) if t > 0 else -c / (a - 1)


@compiled
def value_of(c: float, a: float, t: float) -> float:
    """Return f(t) − f′(1)(t − 1) at t > 0."""
    if a != a:
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
    """Return t with f′(``upper``) − f′(t) = ``step``, 0 where f′ does not fall that far."""
    if a != a:
        share = (1 / (1 + 1 / upper)) * math.exp(-step / c)
        return share / (1 - share)
    if a == 1:
        return upper * math.exp(-step / c)
    power = upper ** (a - 1) - (a - 1) * step / c
    return power ** (1 / (a - 1)) if power > 0 else 0.0


@compiled
def fall_of(a: float, upper: float, lower: float) -> float:
    """Return f″(upper)/f″(lower), by how much the lower edge moves with the upper one."""
    if lower == 0:
        return 0.0
    if a != a:
        return lower * (1 + lower) / (upper * (1 + upper))
    return (upper / lower) ** (a - 2)


@compiled
def log_of(t: float) -> float:
    """Return ln t of a normal number to 4e-16 of its size, by a series that vectors can take.

    With t = m 2^e, √½ ≤ m < √2 and s = (m − 1)/(m + 1) it is e ln 2 + 2(s + s³/3 + s⁵/5 + …).
    """
    bits = np.float64(t).view(np.int64)
    exponent = (bits - np.int64(ROOT_BITS)) >> np.int64(MANTISSA)
    m = np.int64(bits - (exponent << np.int64(MANTISSA))).view(np.float64)
    s = (m - 1) / (m + 1)
    z = s * s
    tail = 2 / 13 + z * (2 / 15 + z * (2 / 17 + z * (2 / 19 + z * (2 / 21))))
    tail = z * (2 / 3 + z * (2 / 5 + z * (2 / 7 + z * (2 / 9 + z * (2 / 11 + z * tail)))))
    return np.float64(exponent) * math.log(2.0) + (2 * s + s * tail)


@compiled
def sums_of(q: Row, p: Row) -> tuple[float, float]:
    """Return Σq and Σp."""
    mass = drafted = 0.0
    for i in range(q.size):
        mass += np.float64(q[i])
        drafted += np.float64(p[i])
    return mass, drafted


@compiled
def largest_of(q: Row, p: Row) -> float:
    """Return the largest p/q."""
    largest = 0.0
    for i in range(q.size):
        ratio = np.float64(p[i]) / np.float64(q[i]) if np.float64(q[i]) >= LEAST else 0.0
        largest = ratio if ratio > largest else largest
    return largest


@compiled
def edges_of(lower: float, upper: float, unit: float, boxes: Boxes, j: int) -> tuple[float, float]:
    """Return the edges A and U of the j-th token with a box."""
    return max(lower, boxes[2][j] * unit), min(upper, boxes[3][j] * unit)


@compiled
def clipped_sums(
    q: Row, p: Row, lower: float, upper: float, unit: float, boxes: Boxes
) -> tuple[float, float, float]:
    """Return Σ clip(p, Aq, Uq), and q's mass above and below the band: its slopes in U and A."""
    least, ids, floors, ceilings, sure = boxes
    total = above = below = 0.0
    other = min(upper, unit)
    plain = least == 0 and upper < PLAIN
    for i in range(q.size if plain else 0):
        q_i, p_i = np.float64(q[i]), np.float64(p[i])
        top, bottom = upper * q_i, lower * q_i
        value = top if top < p_i else p_i
        total += value if value > bottom else bottom
        above += q_i if top < p_i else 0.0
        below += q_i if p_i < bottom else 0.0
    for i in range(0 if plain else q.size):
        q_i, p_i = np.float64(q[i]), np.float64(p[i])
        q_i = q_i if q_i >= LEAST else 0.0
        on = q_i >= least
        top, bottom = (upper if on else other) * q_i, lower * q_i
        value = top if top < p_i else p_i
        total += value if value > bottom else bottom
        above += q_i if (on and top < p_i) else 0.0
        below += q_i if p_i < bottom else 0.0
    for j in range(ids.size):  # what their boxes change
        q_i, p_i = np.float64(q[ids[j]]), np.float64(p[ids[j]])
        if q_i < LEAST:
            continue
        on = q_i >= least
        most = upper if on else other
        low, high = edges_of(lower, most, unit, boxes, j)
        wanted = math.inf if sure[j] else p_i
        total += max(low * q_i, min(wanted, high * q_i)) - max(lower * q_i, min(p_i, most * q_i))
        above += q_i if (on and high == upper and high * q_i < wanted) else 0.0
        above -= q_i if (on and most * q_i < p_i) else 0.0
        below += q_i if (low == lower and wanted < low * q_i) else 0.0
        below -= q_i if p_i < lower * q_i else 0.0
    return total, above, below


@compiled
def level_of(q: Row, p: Row, start: float, whole: float, boxes: Boxes) -> float:
    """Return c with Σ min(p, cq) = ``whole``: Newton from below, exact once no token joins.

    Of boxes only the certain tokens matter, whose p is ∞.
    """
    ids, free = boxes[1], np.zeros(boxes[1].size)
    certain = 0.0, ids, free, free + math.inf, boxes[4]
    level, before = start, math.inf
    while True:
        total, above, _ = clipped_sums(q, p, 0.0, level, 1.0, certain)
        if not 0 < above < before:  # true of NaN, too
            return min(level, MOST)
        level, before = level + max(whole - total, 0.0) / above, above


@compiled
def edges_at_price(
    q: Row,
    p: Row,
    alive: float,
    curve: tuple[float, float],
    step: float,
    highest: float,
    boxes: Boxes,
    threshold: float,
) -> tuple[float, float, float, float, bool]:
    """Return U, A, P in the row's units, c, and whether U > ``threshold``: edges only if not.

    At a price of 1/``step``. ``highest`` is U/P where a = 1. Of certain tokens p is ∞ up to
    g/q = c, at which Σ g is Σ p without boxes. Where nothing is cut and g still lacks mass, A rises
    alone.
    """
    c, a = curve
    certain = boxes[4].any()
    mass, drafted = sums_of(q, p)
    settled = SETTLED if q.itemsize == 8 else COARSE
    largest = math.inf
    if highest == math.inf:
        largest = largest_of(q, p)
    if not (0 < mass < math.inf):
        mass = 1.0  # such a row is refused where a token is drawn from it
    if drafted == 0:
        drafted = mass
    unit, goal = alive * drafted / mass, alive * drafted
    cap = math.inf
    if certain and (a != 1 or boxes[0] > 0 or boxes[3].min() < math.inf):  # under KL U ≤ c
        cap = level_of(q, p, drafted / mass, drafted, boxes)
        threshold = threshold if threshold < cap else math.inf
    low, high = unit * (1 - 1e-9), highest * unit * (1 + 1e-9)
    top = min(largest, cap)
    if certain:
        top = cap
    upper, fixed = threshold, True
    if not low < upper < high:
        upper, fixed = math.sqrt(low) * math.sqrt(min(high, max(MOST, unit))), False
        if high == math.inf:
            upper = math.sqrt(low) * math.sqrt(max(unit, min(top, MOST)))
    furthest, tried = max(unit, top) * (1 + 1e-9), False
    high = min(high, furthest)
    upper = min(upper, high)
    slow, before = False, math.inf
    for place in range(MOST_STEPS):
        lower = unit * lower_of(c, a, step, upper / unit)
        total, above, below = clipped_sums(q, p, lower, min(upper, cap, MOST), unit, boxes)
        excess = total - goal
        if fixed and place == 0 and excess < 0 and upper == threshold:
            return upper, lower, unit, cap, True
        if excess == 0 or not (excess == excess):
            break
        if excess < 0:
            low = upper
        else:
            high = upper
        if excess < 0 and upper >= max(unit, top):  # nothing is cut: A rises to P
            lower = lifted(q, p, lower, unit, goal, boxes, cap)
            return math.inf, lower, unit, cap, math.inf > threshold
        slope = above + below * fall_of(a, upper / unit, lower / unit)
        following = upper - excess / slope if slope > 0 else -1.0
        if abs(following - upper) <= settled * upper and following < furthest * (1 - 2 * settled):
            upper = min(max(following, low), high)  # found, which no bracket may undo
            break
        lame = abs(excess) > before / 2
        if not low < following < high or (lame and slow):
            following = math.sqrt(low) * math.sqrt(high)
        if excess < 0 and following > furthest * (1 - 2 * settled) and not tried:
            following, tried = furthest, True  # where A may have to rise alone
        slow, before = lame and not slow, abs(excess)
        moved = abs(following - upper)
        upper = following
        if moved <= settled * upper:
            break
    lower = unit * lower_of(c, a, step, upper / unit)
    return upper, lower, unit, cap, upper > threshold


@compiled
def lifted(q: Row, p: Row, low: float, unit: float, goal: float, boxes: Boxes, cap: float) -> float:
    """Return A ≤ P at which Σ max(p, Aq) is ``goal``, off a head at most P = ``unit``."""
    top, lower = min(cap, MOST), unit
    for _ in range(MOST_STEPS):
        total, _, below = clipped_sums(q, p, lower, top, unit, boxes)
        if not (total > goal and below > 0):
            break
        following = max(lower - (total - goal) / below, low)
        if lower - following <= SETTLED * lower:
            return following
        lower = following
    return lower


@compiled
def write_ratios(q: Row, p: Row, band: Band, start: int, out: Row) -> None:
    """Write h/q, clip(p/q, A, U) over P, 1 where q = 0.

    Of the part of a row that begins with token ``start``, whose band is A, U, P and boxes.
    """
    lower, upper, unit, boxes = band
    least, ids, _, _, sure = boxes
    other = min(upper, unit)
    for i in range(q.size):
        q_i, p_i = np.float64(q[i]), np.float64(p[i])
        top, ratio = upper if q_i >= least else other, p_i / q_i
        ratio = ratio if ratio < top else top
        ratio = ratio if ratio > lower else lower
        out[i] = ratio / unit if q_i >= LEAST else 1.0
    for j in range(ids.size):
        i = ids[j] - start
        if 0 <= i < q.size and q[i] >= LEAST:
            low, high = edges_of(lower, upper if q[i] >= least else other, unit, boxes, j)
            wanted = math.inf if sure[j] else np.float64(p[i]) / np.float64(q[i])
            out[i] = max(low, min(wanted, high)) / unit


@compiled
def write_quotients(
    q: Row, p: Row, h: Row, mass: float, drafted: float, out: Row
) -> tuple[float, float]:
    """Write h/q of a law, 1 where it is no number; return Σ h and Σ min(p, h) there.

    q is taken over ``mass``, p over ``drafted``.
    """
    outside = overlap = 0.0
    for i in range(q.size):
        ratio = h[i] / (np.float64(q[i]) / mass)
        found = ratio < math.inf
        out[i] = ratio if found else 1.0
        outside += 0.0 if found else h[i]
        overlap += 0.0 if found else min(np.float64(p[i]) / drafted, h[i])
    return outside, overlap


@compiled
def write_kl_costs(ratios: Row, out: Row) -> None:
    """Write t ln t − (t − 1) of ratios h/q, no term of which is rounded near t = 1."""
    for i in range(ratios.size):
        t = ratios[i]
        out[i] = (t * log_of(t) if t >= LEAST else 0.0) - (t - 1)


@compiled
def write_js_costs(ratios: Row, out: Row) -> None:
    """Write the costs under the Jensen-Shannon divergence of ratios h/q."""
    for i in range(ratios.size):
        t = ratios[i]
        out[i] = (t * log_of((1 + 1 / t) / 2) + log_of((1 + t) / 2)) / -2


@compiled
def entropy_of(q: Row) -> float:
    """Return −Σ q ln q, 0·ln 0 being 0."""
    total = 0.0
    for i in range(q.size):
        q_i = np.float64(q[i])
        total -= q_i * log_of(max(q_i, LEAST))
    return total


@compiled
def charges_of(
    q: Row, p: Row, ratios: Row, costs: Row, mass: float, drafted: float, head: float
) -> tuple[float, float, float]:
    """Return D(h‖q), Σ min(p, h), and Σ (h − q)₊ where q < ``head`` of a part, by h/q and costs.

    q is taken over ``mass``, p over ``drafted``.
    """
    spent = accepted = raised = 0.0
    for i in range(q.size):
        q_i, p_i = np.float64(q[i]) / mass, np.float64(p[i]) / drafted
        h_i, beyond = ratios[i] * q_i, (ratios[i] - 1) * q_i
        spent += q_i * costs[i]
        accepted += p_i if p_i < h_i else h_i
        raised += beyond if (q_i < head) & (beyond > 0) else 0.0
    return spent, accepted, raised


@compiled
def outer_sums(
    q: Row, p: Row, cost: Row, lower: float, upper: float
) -> tuple[float, float, float, float, float, float]:
    """Return the sums of q, p and ``cost`` below the band, then those above it."""
    q_low = p_low = c_low = q_high = p_high = c_high = 0.0
    for i in range(q.size):
        q_i, p_i, c_i = np.float64(q[i]), np.float64(p[i]), cost[i]
        q_i = q_i if q_i >= LEAST else 0.0
        under, over = p_i < lower * q_i, q_i > 0 and p_i > upper * q_i
        q_low += q_i if under else 0.0
        p_low += p_i if under else 0.0
        c_low += c_i if under else 0.0
        q_high += q_i if over else 0.0
        p_high += p_i if over else 0.0
        c_high += c_i if over else 0.0
    return q_low, p_low, c_low, q_high, p_high, c_high


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
    """Return U and A with D = ``delta`` and Σ g = Σ p, and whether they were found.

    Newton's method in both edges: between two ratios p/q all sums are linear in them but for f.
    ``cost`` is q f(p/q) of each token, 0 where that is infinite, in which case D is ``endless``;
    ``ends`` are the smallest and the largest p/q over the row's unit, ``free`` are no boxes.
    """
    c, a = curve
    mass, outside, inside = drafted / unit, 0.0, 0.0
    for i in range(q.size):
        inside += cost[i]
        outside += np.float64(p[i]) if np.float64(q[i]) < LEAST else 0.0
    inside /= mass
    if inside <= delta and outside == 0 and not endless:
        return math.inf, 0.0, True
    if not inside <= MOST_COST:
        return math.inf, 0.0, False
    if outside > 0:  # the path may end where only these tokens are cut
        lower = lifted(q, p, 0.0, unit, drafted, free, math.inf)
        q_low, _, c_low, _, _, _ = outer_sums(q, p, cost, lower, MOST)
        spent = inside - c_low / mass
        if lower > 0:
            spent += q_low / mass * value_of(c, a, lower / unit)
        if spent <= delta:
            return math.inf, lower, True
    width = WIDTH * math.sqrt(2 * delta / (c if a == a else 0.25))
    upper = unit * max(1.0, min(math.exp(width), ends[1] ** SHARE))
    lower = unit * min(1.0, max(math.exp(-width / 2), ends[0] ** SHARE))
    for place in range(MOST_STEPS):
        q_low, p_low, c_low, q_high, p_high, c_high = outer_sums(q, p, cost, lower, upper)
        high, low = upper / unit, lower / unit
        excess = (q_high * value_of(c, a, high) - c_high) / mass
        excess += inside - delta + (q_low * value_of(c, a, low) - c_low) / mass
        risen, cut = (
            (lower * q_low - p_low) / drafted,
            (outside + p_high - upper * q_high) / drafted,
        )
        close = abs(excess) + abs(risen - cut) <= CLOSE * (1 + delta)
        up, down, mean = slope_of(c, a, high), slope_of(c, a, low), (risen + cut) / 2
        rejection = (excess - down * risen + up * cut) / (up - down) if up > down else 0.0
        if not rejection > 0.05 * mean:  # at the start both slopes are 0
            rejection = 0.3 * mean
        new_low = lower + (rejection - risen) * drafted / q_low if q_low > 0 else lower / 2
        new_high = upper + (cut - rejection) * drafted / q_high if q_high > 0 else upper
        # at most half of the way to 1, in logarithms
        new_low = min(new_low, math.sqrt(low) * unit) if new_low > 0 else lower / 2
        new_high = max(new_high, math.sqrt(high) * unit)
        tiny = abs(new_low - lower) <= POLISH * lower and abs(new_high - upper) <= POLISH * upper
        if place >= UNDAMPED and place % 2 == 0 and not tiny:
            new_low, new_high = (new_low + lower) / 2, (new_high + upper) / 2
        if close and not tiny:
            return upper, lower, True
        lower, upper = new_low, new_high
        if close:
            return upper, lower, True
    return upper, lower, False


@compiled
def left_mass(q: Row, p: Row, scale: float) -> float:
    """Return Σ (s q − p)₊, that of s q where p is empty; NaN if an entry is."""
    total = 0.0
    for i in range(q.size):
        left = scale * np.float64(q[i]) - (np.float64(p[i]) if p.size else 0.0)
        total += 0.0 if left <= 0 else left
    return total


@compiled
def draw_left(q: Row, p: Row, scale: float, draw: float) -> int:
    """Return the first token of positive mass where that of (s q − p)₊ exceeds draw × total.

    As :func:`cactus_theory.verify.draw.pick`: −1 where the total is 0, ∞ or NaN.
    """
    parts, total = np.empty((q.size + BLOCK - 1) // BLOCK), 0.0
    for part in range(parts.size):
        start = part * BLOCK
        parts[part] = left_mass(q[start : start + BLOCK], p[start : start + BLOCK], scale)
        total += parts[part]
    if not 0 < total < math.inf:
        return -1
    goal, mass = draw * total, 0.0
    for part in range(parts.size):
        if mass + parts[part] <= goal:
            mass += parts[part]
            continue
        start = part * BLOCK
        for i in range(start, min(start + BLOCK, q.size)):
            left = scale * np.float64(q[i]) - (np.float64(p[i]) if p.size else 0.0)
            mass += left if left > 0 else 0.0
            if left > 0 and mass > goal:
                return i
    last = q.size - 1  # the goal was rounded up to the total
    while not scale * np.float64(q[last]) - (np.float64(p[last]) if p.size else 0.0) > 0:
        last -= 1
    return last


@compiled
def write_raised(q: Row, twice: float, out: Row) -> None:
    """Write min(1, q + √(2δ q(1 − q))), with 2δ = ``twice``."""
    for i in range(q.size):
        q_i = min(np.float64(q[i]), 1.0)
        out[i] = min(q_i + math.sqrt((1 - q_i) * q_i * twice), 1.0)


@compiled
def add_refilled(q: Row, p: Row, scale: Row, refused: Row, law: Row) -> None:
    """Add Σ_n (R_n/Z_n)(s_n q − p)₊ to ``law``, with Z_n = Σ (s_n q − p)₊.

    ``refused`` are R_n of the tokens that can be refused, ``scale`` their s_n, falling. Each token
    belongs to those with s_n > p/q: sums over them are prefix sums.
    """
    count, most, least = scale.size, scale[0], scale[-1]
    mass, drafted = np.zeros(count + 1), np.zeros(count + 1)
    beyond = lost = 0.0
    for i in range(q.size):  # most tokens belong to all of them, or to none
        beyond += q[i] if least * q[i] > p[i] else 0.0
        lost += p[i] if least * q[i] > p[i] else 0.0
    mass[count], drafted[count] = beyond, lost
    others, number = np.empty(q.size + 1, np.int32), 0
    for i in range(q.size):
        others[number] = i
        number += (least * q[i] <= p[i]) & (p[i] < most * q[i])
    above = np.empty(number, np.int32)  # how many s are above p/q
    for place in range(number):
        i, low, high = others[place], 0, count
        while low < high:
            middle = (low + high) // 2
            if scale[middle] * q[i] > p[i]:
                low = middle + 1
            else:
                high = middle
        above[place] = low
        mass[low] += q[i]
        drafted[low] += p[i]
    weight, scaled = np.zeros(count + 1), np.zeros(count + 1)
    beyond = lost = 0.0
    for n in range(count - 1, -1, -1):
        beyond += mass[n + 1]
        lost += drafted[n + 1]
        # Z_n ≥ R_n, as the row raised at n and p both sum to 1; a sum may round below it
        weight[n + 1] = refused[n] / max(scale[n] * beyond - lost, refused[n])
    for n in range(count):
        scaled[n + 1] = scaled[n] + weight[n + 1] * scale[n]
        weight[n + 1] += weight[n]
    for place in range(number):
        i, low = others[place], above[place]
        law[i] += max(scaled[low] * q[i] - weight[low] * p[i], 0.0)
    for i in range(q.size):
        left = max(scaled[count] * q[i] - weight[count] * p[i], 0.0)
        law[i] += left if least * q[i] > p[i] else 0.0
