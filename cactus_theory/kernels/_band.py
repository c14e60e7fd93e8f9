# Triton's annotations do not describe what its functions return
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
r"""Solve bands at a KL price, many rows at once; the host reads no value from the device.

At a price λ the edges are a = c b with c = e^{−1/λ}, and b is the root of the rising function

.. math:: E(b) = Σ_i (c b q_i − p_i)_+ − Σ_i (p_i − b q_i)_+

in [1, 1/c]. Algorithm: Newton steps inside a bracket that always holds the root. E is linear
between its kinks p_i/q_i and p_i/(c q_i), so that a step is exact once no kink lies between the
point and the root: 2 to 4 steps on most rows. If a step leaves the bracket, the next point is the
bracket's end on that side, where the root of an almost one-hot row is, or the geometric middle if
that end was evaluated before. A row stops at a relative step below SETTLED, or where |E| is within
its rounding error NOISE. Every step is one launch, and rows that have stopped are not read.
Parameters are the groups of ``buffers.py``; ``_rows.py`` describes the values.
"""

import triton
import triton.language as tl

from cactus_theory.kernels._rows import (
    fall,
    number_of,
    part_at,
    take_turn,
    temperature_of,
)

# Newton steps at prices ≥ 0.5, and at lower prices; rows of tests took at most 6 and 11
STEPS, MANY_STEPS = 8, 12
FAR_RATIO = 0.1353352832366127  # a/b at a price of 0.5: e^-2
# bits of a row's flag: still to be read; lower end of the bracket evaluated; upper end evaluated
READ, LOW_SEEN, HIGH_SEEN = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)
# relative size of a step at which a row stops, and the rounding error of E, a sum of float32 terms
SETTLED, NOISE = tl.constexpr(1e-6), tl.constexpr(3e-8)


@triton.jit
def newton_step(excess, slope, x, lower, upper, flag):
    """Return the next point, the bracket and the flag of one row, from E and E′ at x; float64."""
    below = excess < 0
    lower, upper = tl.where(below, x, lower), tl.where(below, upper, x)
    flag = flag | tl.where(below, LOW_SEEN, HIGH_SEEN)
    end = tl.where(below, upper, lower)
    newton = tl.where(slope > 0, x - excess / tl.where(slope > 0, slope, 1.0), end)
    middle = tl.sqrt(lower * upper)
    # the next point if Newton's step leaves the bracket downwards, and if upwards
    under = tl.where((flag & LOW_SEEN) == 0, lower, middle)
    over = tl.where((flag & HIGH_SEEN) == 0, upper, middle)
    following = tl.where(newton <= lower, under, tl.where(newton >= upper, over, newton))
    at_root = (tl.abs(excess) <= NOISE) | (excess != excess)  # NaN: there is no root
    following = tl.where(
        at_root & ((newton <= lower) | (newton >= upper) | (newton != newton)), x, following
    )
    # x stands first, as Triton 3.7's interpreter makes a constant of a constant times a tensor
    settled = at_root | (tl.abs(following - x) <= x * SETTLED)
    return following, lower, upper, tl.where(settled, flag & ~READ, flag)


@triton.jit
def excess_of(band, row, form: tl.constexpr):
    """Return E and E′ of one row, float64, by adding up the sums of the row's parts."""
    part = tl.arange(0, form.most_parts)
    at = row.to(tl.int64) * form.parts + part
    excess = tl.load(band.excess + at, mask=part < form.parts, other=0.0).to(tl.float64)
    slope = tl.load(band.slopes + at, mask=part < form.parts, other=0.0).to(tl.float64)
    return tl.sum(excess, 0), tl.sum(slope, 0)


@triton.jit
def part_of_rows(b, place, part, inverse, requests, target, draft, softmax, form: tl.constexpr):
    """Return one part of the rows q and p at ``place`` of request b, float32."""
    row = b * form.rows + place
    peak_q, weight_q = tl.load(softmax.peaks + row), tl.load(softmax.weights + row)
    row += form.width
    peak_p, weight_p = tl.load(softmax.peaks + row), tl.load(softmax.weights + row)
    target_logit = part_at(b, place, part, target, requests, form)
    draft_logit = part_at(b, place, part, draft, requests, form)
    q = fall(target_logit, peak_q, inverse * target.power) * weight_q
    return q, fall(draft_logit, peak_p, inverse) * weight_p


@triton.jit
def band_step(
    requests, target, draft, softmax, decision, band, stepped, knob, form: tl.constexpr,
    FIRST: tl.constexpr, REFUSED: tl.constexpr,
):  # fmt: skip
    """Take one Newton step on every unsolved row (flag READ); write one part of the new E and E′.

    Grid: (B K, C). With REFUSED the grid is (B, C), for the row of each request's rejected token
    alone. Reads ``band`` and writes ``stepped``. With FIRST E and E′ are written without a step.
    """
    take_turn(form)
    row, part = tl.program_id(0), tl.program_id(1)
    if REFUSED:
        refused = tl.load(decision.accepted + row)
        if refused >= form.width:
            return
        row = row * form.width + refused
    ratio = number_of(knob)  # c = a/b
    flag, x = tl.load(band.flags + row), tl.load(band.points + row)
    lower, upper = 1.0 + x * 0, 1.0 / ratio + x * 0
    if not FIRST:
        lower, upper = tl.load(band.lower + row), tl.load(band.upper + row)
        if (flag & READ) != 0:
            excess, slope = excess_of(band, row, form)
            x, lower, upper, flag = newton_step(excess, slope, x, lower, upper, flag)
    if part == 0:
        tl.store(stepped.flags + row, flag)
        tl.store(stepped.points + row, x)
        tl.store(stepped.lower + row, lower)
        tl.store(stepped.upper + row, upper)
    if (flag & READ) == 0:
        return
    b, place = row // form.width, row % form.width
    heat, _ = temperature_of(b, requests, form)
    inverse = 1.0 / heat
    q, p = part_of_rows(b, place, part, inverse, requests, target, draft, softmax, form)
    b_edge, a_edge = x.to(tl.float32), (x * ratio).to(tl.float32)
    lifted = tl.maximum(a_edge * q - p, 0.0)
    cut = tl.maximum(p - b_edge * q, 0.0)
    slope = tl.where(lifted > 0, q * ratio.to(tl.float32), 0.0) + tl.where(cut > 0, q, 0.0)
    at = row.to(tl.int64) * form.parts + part
    tl.store(stepped.excess + at, tl.sum(lifted - cut, 0))
    tl.store(stepped.slopes + at, tl.sum(slope, 0))


@triton.jit
def upper_edge(row, band, form: tl.constexpr):
    """Return the upper edge b of one row, float64, from the state ``band`` after the last step."""
    flag, x = tl.load(band.flags + row), tl.load(band.points + row)
    lower, upper = tl.load(band.lower + row), tl.load(band.upper + row)
    excess, slope = excess_of(band, row, form)
    following, _, _, _ = newton_step(excess, slope, x, lower, upper, flag)
    return tl.where((flag & READ) != 0, following, x)
