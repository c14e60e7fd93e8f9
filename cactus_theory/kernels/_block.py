"""Verify a drafted path as a whole: the alive ratio down the path, then one sum a node.

See :mod:`cactus_theory.verify.block` for the formulas. Under the band every row from the first
that might lower the alive ratio is solved beforehand, as no row's band depends on the ratio.
"""

import triton
import triton.language as tl

from cactus_theory.kernels._band import part_of_row, solved
from cactus_theory.kernels._judge import accept_coins, wide
from cactus_theory.kernels._rows import drafted, entries, temperature_of, token_at


@triton.jit
def block_entries(
    target, draft, ids, lengths, temperature, part_max, part_sum, part_arg, peaks, weights,
    chances, edges, flags,
    target_batch, target_row, draft_batch, draft_row, ids_step, vocab, scalar, high, low, ROWS,
    WIDTH: tl.constexpr, PLACES: tl.constexpr, PARTS: tl.constexpr, MOST_PARTS: tl.constexpr,
    FLAT: tl.constexpr, HAS_LENGTHS: tl.constexpr, CERTAIN: tl.constexpr,
    PER_ROW: tl.constexpr, GREEDY: tl.constexpr, ON_BAND: tl.constexpr,
):  # fmt: skip
    """Write q_n and p_n of each drafted token; mark the rows whose band is needed."""
    b = tl.program_id(0)
    place = tl.arange(0, PLACES)
    start, length = drafted(b, ids, lengths, ids_step, WIDTH, PLACES, FLAT, HAS_LENGTHS)
    at = token_at(place, start, ids_step, FLAT)
    on = place < length
    token = tl.load(ids + at, mask=on, other=-1)
    q_n, p_n, greedy = entries(
        b, start, length, place, token, target, draft, temperature, part_max, part_sum, part_arg,
        peaks, weights, target_batch, target_row, draft_batch, draft_row, vocab, scalar,
        WIDTH, PARTS, MOST_PARTS, FLAT, CERTAIN, PER_ROW, GREEDY, ROWS,
    )  # fmt: skip
    slot = b * WIDTH + place
    tl.store(chances + slot, q_n, mask=on)
    tl.store(chances + ROWS + slot, p_n, mask=on)
    if ON_BAND:
        first = tl.min(tl.where(on & (p_n > q_n), place, WIDTH), 0)
        read = on & (place >= first) & ((greedy | CERTAIN) == 0)
        tl.store(flags + slot, read.to(tl.int32), mask=place < WIDTH)
        tl.store(edges + slot, tl.sqrt(1 / wide(high, low)) + q_n * 0, mask=on)


@triton.jit
def block_walk(
    ids, lengths, temperature, chances, sums, edges, flags, alive, row_scales, closed, ends, sure,
    ids_step, scalar, high, low, ROWS,
    WIDTH: tl.constexpr, PLACES: tl.constexpr, PARTS: tl.constexpr, MOST_PARTS: tl.constexpr,
    FLAT: tl.constexpr, HAS_LENGTHS: tl.constexpr, CERTAIN: tl.constexpr,
    PER_ROW: tl.constexpr, ON_BAND: tl.constexpr, FROM: tl.constexpr,
):  # fmt: skip
    """Write the alive ratio P at each node, and the scale of its residual (s q − p)₊.

    ``ends`` is P after the last drafted token, ``sure`` the last node that is always reached,
    ``closed`` the residual's mass where the draft is certain. Grid: (requests,).
    """
    b = tl.program_id(0)
    _, length = drafted(b, ids, lengths, ids_step, WIDTH, PLACES, FLAT, HAS_LENGTHS)
    _, greedy = temperature_of(b, temperature, scalar, PER_ROW)
    certain = greedy | CERTAIN
    ratio = wide(high, low)
    ratio_alive = ratio * 0 + 1.0
    last = length * 0
    for place in range(WIDTH):
        slot = b * WIDTH + place
        on = place < length
        q_n = tl.load(chances + slot, mask=on, other=1.0)
        p_n = tl.load(chances + ROWS + slot, mask=on, other=1.0)
        h_n, lower = q_n, ratio * 0 + 1.0
        if ON_BAND:
            upper = solved(slot, sums, edges, flags, ROWS, PARTS, MOST_PARTS, FROM)
            marked = on & (tl.load(flags + FROM * ROWS + slot, mask=on, other=0) != 0)
            raised = tl.minimum(tl.maximum(p_n, upper * ratio * q_n), upper * q_n)
            raised = tl.where(marked, raised, tl.where(p_n > q_n, p_n, q_n))
            lower = tl.where(marked, upper * ratio, 1.0)
            h_n = tl.where(certain, q_n / (ratio * (1 - q_n) + q_n), raised)
        tl.store(alive + slot, ratio_alive, mask=on)
        tl.store(row_scales + slot, ratio_alive * lower, mask=on)
        tl.store(closed + slot, tl.where(certain, ratio_alive * (1 - h_n), -1.0), mask=on)
        some = tl.where(p_n > 0, p_n, 1.0)
        kept = tl.where(h_n > 0, tl.where(p_n > 0, ratio_alive * h_n / some, 1.0), 0.0)
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
    start, length = drafted(b, ids, lengths, ids_step, WIDTH, PLACES, FLAT, HAS_LENGTHS)
    inverse, greedy = temperature_of(b, temperature, scalar, PER_ROW)
    if (place >= length) | (place <= tl.load(sure + b)) | greedy:
        return
    if tl.load(alive + row) <= 0:
        return
    q, p = part_of_row(
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
    _, length = drafted(b, ids, lengths, ids_step, WIDTH, PLACES, FLAT, HAS_LENGTHS)
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
    open_ended = mass + tl.where(reached == 1, 1.0, 1 - reached)
    value = tl.where(reached == 1, 1.0, mass / open_ended)
    seed, position = tl.load(seeds + b), tl.load(positions + b)
    passes = inner & (accept_coins(seed, position, node - 1) < value)
    count = tl.maximum(tl.load(sure + b), tl.max(tl.where(passes, node, 0), 0))
    final = tl.sum(tl.where(node == 0, accept_coins(seed, position, node * 0 + length - 1), 0.0), 0)
    count = tl.where((length > 0) & (final < tl.load(ends + b)), length, count)
    tl.store(accepted + b, count)
    scale = tl.load(row_scales + slot, mask=node < length, other=0.0)
    tl.store(scales + b, tl.sum(tl.where(node == count, scale, 0.0), 0))
