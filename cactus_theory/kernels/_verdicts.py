# Triton's annotations do not describe what its functions return
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
"""Decide which drafted tokens are accepted: along a chain token by token, of a block as a whole.

A chain is decided by the entries of its tokens alone; under a band, what they leave open is read.
A block needs the alive ratio down its path, then one sum a node (the formulas are those of
:mod:`cactus_theory.verify.block`); under a band every row from the first that might lower the
alive ratio is solved beforehand, as no row's band depends on the ratio. Parameters are those of
``_rows.py``, and ``coin`` a number in [0, 1) of a drafted token, float64.
"""

import triton
import triton.language as tl

from cactus_theory.kernels import policies
from cactus_theory.kernels._band import READ, part_of_rows, upper_edge
from cactus_theory.kernels._draws import accept_coins
from cactus_theory.kernels._rows import (
    draft_span,
    drafted_chances,
    knob_of,
    temperature_of,
    token_at,
)

SCALED, POWER, MIXED, CACTUS, CACTUS_EXACT, BAND = map(tl.constexpr, policies.KINDS)
# from γ = 1 to the root at δ = 1e-6: Newton halves the distance about ten times, then squares it
EXACT_STEPS = tl.constexpr(20)
# verdicts on a drafted token
REFUSED, KEPT, OPEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def two_points(x, q_n):
    """Return the KL divergence of (x, 1 − x) from (q_n, 1 − q_n), float64."""
    return x * tl.log(x / q_n) + (1 - x) * tl.log((1 - x) / (1 - q_n))


@triton.jit
def exact_ceiling(q_n, above, delta):
    """Return the root γ of D(γ‖q_n) = ``delta`` to the left of ``above``, where D > δ, float64."""
    inner = (q_n > 0) & (q_n < 1) & (above > q_n) & (above < 1)
    q = tl.where(inner, q_n, 0.5)
    x = tl.where(inner, above, 0.75)
    for _ in range(EXACT_STEPS):  # D is convex: every step stays on the right of the root
        slope = tl.log(x * (1 - q) / (q * (1 - x)))
        x = tl.maximum(x - tl.maximum(two_points(x, q) - delta, 0.0) / slope, q * 1.0000001)
    return tl.where(inner, x, q_n)


@triton.jit
def verdicts_of(q_n, p_n, coin, knob, KIND: tl.constexpr, CERTAIN_ROW):
    """Return the verdicts on tokens, and the scale s of what replaces each if it is refused.

    CERTAIN_ROW: whether p is one-hot. Under the band OPEN where the row must be read, REFUSED
    where no band keeps the token.
    """
    threshold = coin * p_n
    scale = tl.full(q_n.shape, 1.0, tl.float64)
    if KIND == SCALED:
        kept = threshold < q_n * knob
    elif KIND == POWER:
        power = tl.exp(knob * tl.log(tl.where(q_n > 0, q_n, 1.0)))
        kept = threshold < tl.where(q_n > 0, power, 0.0)
    elif KIND == MIXED:
        kept = (q_n > 0) & (threshold < knob * p_n + (1 - knob) * q_n)
    elif KIND == CACTUS:
        q = tl.minimum(q_n, 1.0)
        gamma = tl.minimum(q + tl.sqrt(2 * knob * q * (1 - q)), 1.0)
        kept = threshold < gamma
        scale = tl.where(gamma > q, (1 - gamma) / tl.maximum(1 - q, 1e-37), 1.0)
    elif KIND == CACTUS_EXACT:
        inner = (q_n > 0) & (q_n < 1) & (threshold > q_n)
        x = tl.where(inner, threshold, 0.75)
        within = inner & (two_points(x, tl.where(inner, q_n, 0.5)) < knob)
        kept = (threshold < q_n) | within
        gamma = exact_ceiling(q_n, threshold, knob)
        scale = tl.where(gamma > q_n, (1 - gamma) / tl.maximum(1 - q_n, 1e-37), 1.0)
    else:
        lossless = threshold < q_n
        raised = q_n / (knob * (1 - q_n) + q_n)  # h_n if p is one-hot at n
        certain = tl.where(CERTAIN_ROW, coin < raised, False)
        beyond = (q_n > 0) & (threshold * knob < q_n)  # r < 1/knob, the band's largest edge
        kept = lossless | certain
        opened = beyond & (CERTAIN_ROW == 0)
    number = (q_n == q_n) & (p_n == p_n)  # a device's minimum may drop a NaN
    kept = kept & number
    if KIND == BAND:
        return tl.where(kept, KEPT, tl.where(opened, OPEN, REFUSED)), scale
    return tl.where(kept, KEPT, REFUSED), scale


@triton.jit
def first_refusal(verdict, place, length, PLACES: tl.constexpr):
    """Return how many of ``length`` tokens come before the first refused one."""
    return tl.min(tl.where((place < length) & (verdict == REFUSED), place, length), 0)


@triton.jit
def judge(
    target, draft, ids, lengths, temperature, seeds, positions, part_max, part_sum, part_arg,
    peaks, weights, accepted, scales, verdicts, edges, flags,
    target_batch, target_row, draft_batch, draft_row, ids_step, vocab, scalar, high, low, ROWS,
    WIDTH: tl.constexpr, PLACES: tl.constexpr, PARTS: tl.constexpr, MOST_PARTS: tl.constexpr,
    FLAT: tl.constexpr, HAS_LENGTHS: tl.constexpr, CERTAIN: tl.constexpr,
    PER_ROW: tl.constexpr, GREEDY: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Write how many tokens each request accepts, and the scale of its residual.

    Grid: (requests,). Under the band, what is open is marked to be read instead, and the row of
    the first token that no band keeps, which will be refused if it is reached.
    """
    b = tl.program_id(0)
    place = tl.arange(0, PLACES)
    start, length = draft_span(b, ids, lengths, ids_step, WIDTH, PLACES, FLAT, HAS_LENGTHS)
    at = token_at(place, start, ids_step, FLAT)
    token = tl.load(ids + at, mask=place < length, other=-1)
    q_n, p_n, greedy = drafted_chances(
        b, start, length, place, token, target, draft, temperature, part_max, part_sum, part_arg,
        peaks, weights, target_batch, target_row, draft_batch, draft_row, vocab, scalar,
        WIDTH, PARTS, MOST_PARTS, FLAT, CERTAIN, PER_ROW, GREEDY, ROWS,
    )  # fmt: skip
    coin = accept_coins(tl.load(seeds + b), tl.load(positions + b), place)
    knob = knob_of(high, low)
    verdict, scale = verdicts_of(q_n, p_n, coin, knob, KIND, greedy | CERTAIN)
    count = first_refusal(verdict, place, length, PLACES)
    tl.store(accepted + b, count)
    if KIND == BAND:
        tl.store(scales + b, knob * 0 + 1.0)  # the count may change, and a is found later
        on = place < length
        slot = b * WIDTH + place
        opened = (verdict == OPEN) & (place < count)
        read = opened | (on & (place == count) & ((greedy | CERTAIN) == 0))
        tl.store(verdicts + slot, verdict, mask=on)
        ratio = coin * p_n / tl.where(opened, q_n, 1.0)
        start_edge = tl.where(opened, ratio, tl.sqrt(1 / knob))
        tl.store(edges + slot, start_edge, mask=on)
        tl.store(flags + slot, read.to(tl.int32), mask=place < WIDTH)
    else:
        tl.store(scales + b, tl.sum(tl.where(place == count, scale, 0.0), 0))


@triton.jit
def band_judge(
    ids, lengths, accepted, verdicts, sums, flags, ids_step, ROWS,
    WIDTH: tl.constexpr, PLACES: tl.constexpr, PARTS: tl.constexpr, MOST_PARTS: tl.constexpr,
    FLAT: tl.constexpr, HAS_LENGTHS: tl.constexpr, FROM: tl.constexpr,
):  # fmt: skip
    """Decide what was open: kept iff E < 0 at the token's own ratio. Grid: (requests,).

    Of a request's rows only that of the first refused token stays marked.
    """
    b = tl.program_id(0)
    _, length = draft_span(b, ids, lengths, ids_step, WIDTH, PLACES, FLAT, HAS_LENGTHS)
    place = tl.arange(0, PLACES)
    slot = b * WIDTH + place
    on = place < length
    verdict = tl.load(verdicts + slot, mask=on, other=KEPT)
    flag = tl.load(flags + FROM * ROWS + slot, mask=on, other=0)
    part = tl.arange(0, MOST_PARTS)[None, :]
    at = (FROM * 2 * ROWS + slot).to(tl.int64)[:, None] * PARTS + part
    read = ((flag & READ) != 0)[:, None] & (part < PARTS)
    excess = tl.sum(tl.load(sums + at, mask=read, other=0.0).to(tl.float64), 1)
    verdict = tl.where(verdict == OPEN, tl.where(excess < 0, KEPT, REFUSED), verdict)
    count = first_refusal(verdict, place, length, PLACES)
    tl.store(accepted + b, count)
    tl.store(flags + FROM * ROWS + slot, tl.where(place == count, flag, 0), mask=on)


@triton.jit
def block_entries(
    target, draft, ids, lengths, temperature, part_max, part_sum, part_arg, peaks, weights,
    chances, edges, flags,
    target_batch, target_row, draft_batch, draft_row, ids_step, vocab, scalar, high, low, ROWS,
    WIDTH: tl.constexpr, PLACES: tl.constexpr, PARTS: tl.constexpr, MOST_PARTS: tl.constexpr,
    FLAT: tl.constexpr, HAS_LENGTHS: tl.constexpr, CERTAIN: tl.constexpr,
    PER_ROW: tl.constexpr, GREEDY: tl.constexpr, SOLVED: tl.constexpr,
):  # fmt: skip
    """Write q_n and p_n of each drafted token; mark the rows whose band is to be solved.

    Grid: (requests,).
    """
    b = tl.program_id(0)
    place = tl.arange(0, PLACES)
    start, length = draft_span(b, ids, lengths, ids_step, WIDTH, PLACES, FLAT, HAS_LENGTHS)
    at = token_at(place, start, ids_step, FLAT)
    on = place < length
    token = tl.load(ids + at, mask=on, other=-1)
    q_n, p_n, greedy = drafted_chances(
        b, start, length, place, token, target, draft, temperature, part_max, part_sum, part_arg,
        peaks, weights, target_batch, target_row, draft_batch, draft_row, vocab, scalar,
        WIDTH, PARTS, MOST_PARTS, FLAT, CERTAIN, PER_ROW, GREEDY, ROWS,
    )  # fmt: skip
    slot = b * WIDTH + place
    tl.store(chances + slot, q_n, mask=on)
    tl.store(chances + ROWS + slot, p_n, mask=on)
    if SOLVED:
        first = tl.min(tl.where(on & (p_n > q_n), place, WIDTH), 0)
        read = on & (place >= first) & ((greedy | CERTAIN) == 0)
        tl.store(flags + slot, read.to(tl.int32), mask=place < WIDTH)
        tl.store(edges + slot, tl.sqrt(1 / knob_of(high, low)) + q_n * 0, mask=on)


@triton.jit
def block_walk(
    ids, lengths, temperature, chances, sums, edges, flags, alive, row_scales, closed, ends, sure,
    ids_step, scalar, high, low, ROWS,
    WIDTH: tl.constexpr, PLACES: tl.constexpr, PARTS: tl.constexpr, MOST_PARTS: tl.constexpr,
    FLAT: tl.constexpr, HAS_LENGTHS: tl.constexpr, CERTAIN: tl.constexpr,
    PER_ROW: tl.constexpr, KIND: tl.constexpr, SOLVED: tl.constexpr, FROM: tl.constexpr,
):  # fmt: skip
    """Write the alive ratio P at each node, and the scale of its residual (s q − p)₊.

    ``ends`` is P after the last drafted token, ``sure`` the last node that is always reached,
    ``closed`` the residual's mass where the draft is certain. Grid: (requests,).
    """
    b = tl.program_id(0)
    _, length = draft_span(b, ids, lengths, ids_step, WIDTH, PLACES, FLAT, HAS_LENGTHS)
    _, greedy = temperature_of(b, temperature, scalar, PER_ROW)
    certain = greedy | CERTAIN
    ratio = knob_of(high, low)
    ratio_alive = ratio * 0 + 1.0
    last = length * 0
    for place in range(WIDTH):
        slot = b * WIDTH + place
        on = place < length
        q_n = tl.load(chances + slot, mask=on, other=1.0)
        p_n = tl.load(chances + ROWS + slot, mask=on, other=1.0)
        h_n, lower = q_n, ratio * 0 + 1.0
        if SOLVED:
            upper = upper_edge(slot, sums, edges, flags, ROWS, PARTS, MOST_PARTS, FROM)
            marked = on & (tl.load(flags + FROM * ROWS + slot, mask=on, other=0) != 0)
            raised = tl.minimum(tl.maximum(p_n, upper * ratio * q_n), upper * q_n)
            h_n = tl.where(marked, raised, tl.maximum(p_n, q_n))
            lower = tl.where(marked, upper * ratio, 1.0)
        if KIND == BAND:
            h_n = tl.where(certain, q_n / (ratio * (1 - q_n) + q_n), h_n)
        tl.store(alive + slot, ratio_alive, mask=on)
        tl.store(row_scales + slot, ratio_alive * lower, mask=on)
        tl.store(closed + slot, tl.where(certain, ratio_alive * (1 - h_n), -1.0), mask=on)
        divisor = tl.where(p_n > 0, p_n, 1.0)
        kept = tl.where(h_n > 0, tl.where(p_n > 0, ratio_alive * h_n / divisor, 1.0), 0.0)
        number = (q_n == q_n) & (p_n == p_n) & (kept == kept)
        kept = tl.where(number & (ratio_alive > 0), kept, 0.0)
        ratio_alive = tl.where(on, tl.minimum(1.0, kept), ratio_alive)
        last = tl.where(on & (ratio_alive == 1.0), place + 1, last)
    tl.store(ends + b, ratio_alive)
    tl.store(sure + b, last)


@triton.jit
def shortfall(
    target, draft, ids, lengths, temperature, peaks, weights, alive, row_scales, sure, lefts,
    target_batch, target_row, draft_batch, draft_row, ids_step, vocab, scalar, ROWS,
    WIDTH: tl.constexpr, PLACES: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
    FLAT: tl.constexpr, HAS_LENGTHS: tl.constexpr, PER_ROW: tl.constexpr,
):  # fmt: skip
    """Write one part of Σ (s q − p)₊ of each node whose coin is open. Grid: (ROWS, PARTS)."""
    row, part = tl.program_id(0), tl.program_id(1)
    b, place = row // WIDTH, row % WIDTH
    start, length = draft_span(b, ids, lengths, ids_step, WIDTH, PLACES, FLAT, HAS_LENGTHS)
    inverse, greedy = temperature_of(b, temperature, scalar, PER_ROW)
    if (place >= length) | (place <= tl.load(sure + b)) | greedy:
        return
    if tl.load(alive + row) <= 0:
        return
    q, p = part_of_rows(
        b, place, start, part, target, draft, peaks, weights, inverse,
        target_batch, target_row, draft_batch, draft_row, vocab, ROWS, WIDTH, PART, FLAT,
    )  # fmt: skip
    scale = tl.load(row_scales + row).to(tl.float32)
    left = tl.sum(tl.maximum(scale * q - p, 0.0), 0)
    tl.store(lefts + row.to(tl.int64) * PARTS + part, left)


@triton.jit
def block_judge(
    ids, lengths, seeds, positions, alive, row_scales, closed, ends, sure, lefts, accepted, scales,
    ids_step,
    WIDTH: tl.constexpr, PLACES: tl.constexpr, PARTS: tl.constexpr, MOST_PARTS: tl.constexpr,
    FLAT: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """Write the last node whose coin passes, and the scale of its residual. Grid: (requests,)."""
    b = tl.program_id(0)
    _, length = draft_span(b, ids, lengths, ids_step, WIDTH, PLACES, FLAT, HAS_LENGTHS)
    node = tl.arange(0, PLACES)
    slot = b * WIDTH + node
    inner = (node > tl.load(sure + b)) & (node < length)
    reached = tl.load(alive + slot, mask=inner, other=1.0)
    mass = tl.load(closed + slot, mask=inner, other=0.0)
    part = tl.arange(0, MOST_PARTS)[None, :]
    at = slot.to(tl.int64)[:, None] * PARTS + part
    read = (inner & (mass < 0) & (reached > 0))[:, None] & (part < PARTS)
    mass = tl.where(mass < 0, 0.0, mass)
    mass += tl.sum(tl.load(lefts + at, mask=read, other=0.0).to(tl.float64), 1)
    denominator = mass + tl.where(reached == 1, 1.0, 1 - reached)
    value = tl.where(reached == 1, 1.0, mass / denominator)
    seed, position = tl.load(seeds + b), tl.load(positions + b)
    passes = inner & (accept_coins(seed, position, node - 1) < value)
    count = tl.maximum(tl.load(sure + b), tl.max(tl.where(passes, node, 0), 0))
    final = tl.sum(tl.where(node == 0, accept_coins(seed, position, node * 0 + length - 1), 0.0), 0)
    count = tl.where((length > 0) & (final < tl.load(ends + b)), length, count)
    tl.store(accepted + b, count)
    scale = tl.load(row_scales + slot, mask=node < length, other=0.0)
    tl.store(scales + b, tl.sum(tl.where(node == count, scale, 0.0), 0))
