"""Passes over one row, compiled by numba: sums, laws and their costs, draws, residuals.

:mod:`cactus_theory.optimum.rows` says what A, U, P and a row's units are, and loads this file and
:mod:`cactus_theory.optimum.row_edges` when the first row is solved. Sums are float64 whatever the
rows' dtype, and a pass needs no memory. Loops whose terms are sums, products, quotients and
``log_of`` take several tokens at once; math.log takes one.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from cactus_theory.base.tolerances import LEAST

Row = np.ndarray
# least q of the head, ids of tokens that do not fall, and their C
Boxes = tuple[float, Row, Row]
# A, U, P in the row's units, and boxes
Band = tuple[float, float, float, Boxes]
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
def edges_of(lower: float, upper: float, unit: float, boxes: Boxes, j: int) -> tuple[float, float]:
    """Return the edges A and U of the j-th token with a box."""
    return max(lower, unit), min(upper, boxes[2][j] * unit)


@compiled
def write_ratios(q: Row, p: Row, band: Band, start: int, out: Row) -> None:
    """Write h/q, clip(p/q, A, U) over P, 1 where q = 0.

    Of the part of a row that begins with token ``start``, whose band is A, U, P and boxes.
    """
    lower, upper, unit, boxes = band
    least, ids, _ = boxes
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
            out[i] = max(low, min(np.float64(p[i]) / np.float64(q[i]), high)) / unit


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
    """Return D(h‖q), Σ min(p/P, h), and Σ (h − q)₊ where q < ``head`` of a part, by h/q and costs.

    q is taken over ``mass``, p over ``drafted``, which is P Σp.
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
def add_refilled_row(q: Row, p: Row, scale: Row, refused: Row, law: Row) -> None:
    """Add the residuals of one row, by R_n of its refusable tokens and their s_n, falling."""
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


@compiled
def add_refilled(q: Row, p: Row, gamma: Row, law: Row) -> None:
    """Add Σ_n (R_n/Z_n)(s_n q − p)₊ to ``law``, rows (R, V), with Z_n = Σ (s_n q − p)₊.

    R_n = (p_n − γ_n)₊ is lost where token n is refused, and s_n = (1 − γ_n)/(1 − q_n), 1 for
    γ_n = q_n. Each token belongs to the n with s_n > p/q: sums over them are prefix sums.
    """
    for row in range(len(q)):
        refusable = np.flatnonzero(p[row] > gamma[row])
        if not refusable.size:
            continue
        scale = np.empty(refusable.size)
        for place in range(refusable.size):
            n = refusable[place]
            raised = gamma[row, n] > q[row, n]
            scale[place] = (1 - gamma[row, n]) / (1 - q[row, n]) if raised else 1.0
        order = np.argsort(-scale)
        refusable = refusable[order]
        refused = p[row][refusable] - gamma[row][refusable]
        add_refilled_row(q[row], p[row], scale[order], refused, law[row])
