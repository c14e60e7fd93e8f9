"""Loops of per-proposal policies, compiled by numba: raised entries, and sums of their residuals.

Source of the sums: THEORY.md, Theorem 4.
"""

import math

import numpy as np

from cactus_theory.optimum.passes import Row, compiled


@compiled
def write_raised(q: Row, twice: float, out: Row) -> None:
    """Write the ceiling of Cactus, min(1, q + √(2δ q(1 − q))), with 2δ = ``twice``."""
    for i in range(q.size):
        q_i = min(np.float64(q[i]), 1.0)
        out[i] = min(q_i + math.sqrt((1 - q_i) * q_i * twice), 1.0)


@compiled
def add_refilled_row(q: Row, p: Row, scale: Row, refused: Row, law: Row) -> None:
    """Add the sum of :func:`add_refilled` to one row of ``law``, for tokens n that can be rejected.

    ``scale`` are the s_n of these tokens in falling order, ``refused`` their R_n. Token x gets mass
    from terms with s_n > p_x/q_x, the first terms in this order. Most tokens get mass from all
    terms or from none; for the remaining tokens bisection finds the number of terms.
    """
    count, most, least = scale.size, scale[0], scale[-1]
    # q and p of the tokens with a part in the first n terms and in no later term, by n
    mass, drafted = np.zeros(count + 1), np.zeros(count + 1)
    beyond = lost = 0.0
    for i in range(q.size):  # tokens with a part in all terms
        beyond += q[i] if least * q[i] > p[i] else 0.0
        lost += p[i] if least * q[i] > p[i] else 0.0
    mass[count], drafted[count] = beyond, lost
    # tokens with a part in some terms: a token that does not count is overwritten by the next
    others, number = np.empty(q.size + 1, np.int32), 0
    for i in range(q.size):
        others[number] = i
        number += (least * q[i] <= p[i]) & (p[i] < most * q[i])
    above = np.empty(number, np.int32)  # number of s_n above p/q
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
    # sums over the first n terms: of R/Z in ``weight``, of s R/Z in ``scaled``
    weight, scaled = np.zeros(count + 1), np.zeros(count + 1)
    beyond = lost = 0.0  # q and p of the tokens with a part in term n
    for n in range(count - 1, -1, -1):
        beyond += mass[n + 1]
        lost += drafted[n + 1]
        # Z_n ≥ R_n, since the row raised at n and p both sum to 1; rounding may bring Z_n below
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

    A per-proposal policy verifies a drafted token n towards q with q_n raised to γ_n = ``gamma``
    and all other entries scaled by s_n = (1 − γ_n)/(1 − q_n), 1 if γ_n = q_n. Rejections of n lose
    the mass R_n = (p_n − γ_n)₊, which the term of n gives to recovered tokens.
    """
    for row in range(len(q)):
        refusable = np.flatnonzero(p[row] > gamma[row])
        if not refusable.size:
            continue
        q_n, raised = q[row][refusable], gamma[row][refusable]
        scale = np.where(raised > q_n, (1 - raised) / (1 - q_n), 1.0)
        # by falling s_n, so that the terms in which a token has a part are the first terms
        order, refused = np.argsort(-scale), p[row][refusable] - raised
        add_refilled_row(q[row], p[row], scale[order], refused[order], law[row])
