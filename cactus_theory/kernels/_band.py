# Triton's annotations do not describe what its functions return
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
r"""Solve bands at a KL price, many rows at once, without reading anything on the host.

At a price λ the edges are a = c b with c = e^{−1/λ}, and b is the root of the rising function

.. math:: E(b) = Σ_i (c b q_i − p_i)_+ − Σ_i (p_i − b q_i)_+

in [1, 1/c]. It is linear between the ratios p_i/q_i and those over c, so that a Newton step is
exact once no ratio lies between it and the root: 2 to 4 steps on most rows. A step that leaves
the bracket looks at its end first, where the root is when a row is almost one-hot, and then at
the bracket's geometric middle. Every step is one launch, and rows that are done are not read.
Parameters are those of ``_rows.py``.
"""

import triton
import triton.language as tl

from cactus_theory.kernels._rows import (
    draft_at,
    draft_span,
    fall,
    knob_of,
    target_at,
    temperature_of,
)

# a row to be read, whose bracket's lower and upper ends have been evaluated
READ, LOW_SEEN, HIGH_SEEN = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)
# a step this small (relative) is the last; E is a sum of float32 terms and no better than NOISE
SETTLED, NOISE = tl.constexpr(1e-6), tl.constexpr(3e-8)


@triton.jit
def newton_step(excess, slope, x, lower, upper, flag):
    """Return one row's next point and bracket, float64, and its flag, from E and E′ at x."""
    below = excess < 0
    lower, upper = tl.where(below, x, lower), tl.where(below, upper, x)
    flag = flag | tl.where(below, LOW_SEEN, HIGH_SEEN)
    end = tl.where(below, upper, lower)
    newton = tl.where(slope > 0, x - excess / tl.where(slope > 0, slope, 1.0), end)
    middle = tl.sqrt(lower * upper)
    under = tl.where((flag & LOW_SEEN) == 0, lower, middle)
    over = tl.where((flag & HIGH_SEEN) == 0, upper, middle)
    following = tl.where(newton <= lower, under, tl.where(newton >= upper, over, newton))
    at_root = (tl.abs(excess) <= NOISE) | (excess != excess)  # NaN in the row: nothing to solve
    following = tl.where(
        at_root & ((newton <= lower) | (newton >= upper) | (newton != newton)), x, following
    )
    # the number comes last: Triton 3.7's interpreter makes a constant of a constant times a tensor
    settled = at_root | (tl.abs(following - x) <= x * SETTLED)
    return following, lower, upper, tl.where(settled, flag & ~READ, flag)


@triton.jit
def excess_of(sums, row, ROWS, PARTS: tl.constexpr, MOST_PARTS: tl.constexpr):
    """Return E and E′ of one row, from one buffer of ``sums``."""
    part = tl.arange(0, MOST_PARTS)
    at = row.to(tl.int64) * PARTS + part
    size = ROWS * PARTS
    excess = tl.load(sums + at, mask=part < PARTS, other=0.0).to(tl.float64)
    slope = tl.load(sums + size + at, mask=part < PARTS, other=0.0).to(tl.float64)
    return tl.sum(excess, 0), tl.sum(slope, 0)


@triton.jit
def part_of_rows(
    b, place, start, part, target, draft, peaks, weights, inverse,
    target_batch, target_row, draft_batch, draft_row, vocab, ROWS,
    WIDTH: tl.constexpr, PART: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """Return a part of q and of p at one place, float32 (PART,)."""
    token = part * PART + tl.arange(0, PART)
    inside = token < vocab
    slot = b * WIDTH + place
    peak_q, weight_q = tl.load(peaks + slot), tl.load(weights + slot)
    peak_p, weight_p = tl.load(peaks + ROWS + slot), tl.load(weights + ROWS + slot)
    at = target_at(b, place, start, target_batch, target_row, FLAT)
    logit = tl.load(target + at + token, mask=inside, other=-float("inf")).to(tl.float32)
    at = draft_at(place, start, draft_batch, draft_row, FLAT)
    other = tl.load(draft + at + token, mask=inside, other=-float("inf")).to(tl.float32)
    q = fall(logit, peak_q, inverse) * weight_q
    p = fall(other, peak_p, inverse) * weight_p
    return q, p


@triton.jit
def band_step(
    target, draft, ids, lengths, temperature, peaks, weights, sums, edges, flags,
    target_batch, target_row, draft_batch, draft_row, ids_step, vocab, scalar, high, low, ROWS,
    WIDTH: tl.constexpr, PLACES: tl.constexpr, PARTS: tl.constexpr, MOST_PARTS: tl.constexpr,
    PART: tl.constexpr, FLAT: tl.constexpr, HAS_LENGTHS: tl.constexpr, PER_ROW: tl.constexpr,
    FROM: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Take one Newton step on every row that is marked, and sum E and E′ at its end.

    Grid: (ROWS, PARTS). Reads buffer FROM of ``sums``, ``edges``, ``flags``, writes the other.
    FIRST: only sums, at the starting points.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    into: tl.constexpr = 1 - FROM
    flag = tl.load(flags + FROM * ROWS + row)
    x = tl.load(edges + FROM * 3 * ROWS + row)
    lower, upper = 1.0 + x * 0, 1.0 / knob_of(high, low) + x * 0
    if not FIRST:
        lower = tl.load(edges + (FROM * 3 + 1) * ROWS + row)
        upper = tl.load(edges + (FROM * 3 + 2) * ROWS + row)
        if (flag & READ) != 0:
            excess, slope = excess_of(sums + FROM * 2 * ROWS * PARTS, row, ROWS, PARTS, MOST_PARTS)
            x, lower, upper, flag = newton_step(excess, slope, x, lower, upper, flag)
    if part == 0:
        tl.store(flags + into * ROWS + row, flag)
        tl.store(edges + into * 3 * ROWS + row, x)
        tl.store(edges + (into * 3 + 1) * ROWS + row, lower)
        tl.store(edges + (into * 3 + 2) * ROWS + row, upper)
    if (flag & READ) == 0:
        return
    b, place = row // WIDTH, row % WIDTH
    start, _ = draft_span(b, ids, lengths, ids_step, WIDTH, PLACES, FLAT, HAS_LENGTHS)
    inverse, _ = temperature_of(b, temperature, scalar, PER_ROW)
    q, p = part_of_rows(
        b, place, start, part, target, draft, peaks, weights, inverse,
        target_batch, target_row, draft_batch, draft_row, vocab, ROWS, WIDTH, PART, FLAT,
    )  # fmt: skip
    ratio = knob_of(high, low)
    b_edge, a_edge = x.to(tl.float32), (x * ratio).to(tl.float32)
    lifted = tl.maximum(a_edge * q - p, 0.0)
    cut = tl.maximum(p - b_edge * q, 0.0)
    slope = tl.where(lifted > 0, q * ratio.to(tl.float32), 0.0) + tl.where(cut > 0, q, 0.0)
    at = (into * 2 * ROWS + row).to(tl.int64) * PARTS + part
    tl.store(sums + at, tl.sum(lifted - cut, 0))
    tl.store(sums + ROWS * PARTS + at, tl.sum(slope, 0))


@triton.jit
def upper_edge(
    row, sums, edges, flags, ROWS, PARTS: tl.constexpr, MOST_PARTS: tl.constexpr,
    FROM: tl.constexpr,
):  # fmt: skip
    """Return the upper edge b of one row, float64, after the last step, which wrote buffer FROM."""
    flag = tl.load(flags + FROM * ROWS + row)
    x = tl.load(edges + FROM * 3 * ROWS + row)
    lower = tl.load(edges + (FROM * 3 + 1) * ROWS + row)
    upper = tl.load(edges + (FROM * 3 + 2) * ROWS + row)
    excess, slope = excess_of(sums + FROM * 2 * ROWS * PARTS, row, ROWS, PARTS, MOST_PARTS)
    following, _, _, _ = newton_step(excess, slope, x, lower, upper, flag)
    return tl.where((flag & READ) != 0, following, x)
