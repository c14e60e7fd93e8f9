# Triton's annotations do not describe what its functions return
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false
r"""Random numbers, and draws of a token in one pass over its row, by an exponential race.

Token i has exponential noise E_i of mean 1, and argmin E_i/w_i has the law w/Σw, without Σw
being known. After the accepted tokens the weights are (s q − p)₊ after a refusal, and q, by its raw
logits, for a bonus token or where nothing is left; a drafted token's are its row of logits. Weight
0 takes no part, so such a token is never drawn. On a CPU tokens are drawn in
``cactus_theory/verify/draw.py``.

Parameters are those of ``_rows.py``; ``counter``, ``position`` and ``stream`` those of
``random_numbers.py``.
"""

import triton
import triton.language as tl

from cactus_theory.kernels import random_numbers
from cactus_theory.kernels._band import upper_edge
from cactus_theory.kernels._rows import (
    draft_at,
    draft_span,
    fall,
    knob_of,
    target_at,
    temperature_of,
    token_at,
)

ACCEPT, RECOVERED, BONUS, DRAFT, _ = map(tl.constexpr, random_numbers.STREAMS)
# tokens that share a group of counters: 4 outputs of 128 counters each
LANES = tl.constexpr(random_numbers.LANES)
GROUP = tl.constexpr(4 * random_numbers.LANES)
# of a part; as many warps share it (``_launch.py``)
TOKENS_A_THREAD = 32
# the token of a lane where none has weight, and the least float32
NOBODY, LEAST = tl.constexpr(2147483647), tl.constexpr(-3.4028234663852886e38)
# below this u the series of −ln(1 − u) is exact to float32, above it the logarithm is
SMALL = tl.constexpr(1 / 16)


@triton.constexpr_function
def lanes_of(part):
    """Return how many counters are worked on at once: one a thread, at least a group of them."""
    return max(random_numbers.LANES, part // TOKENS_A_THREAD)


@triton.jit
def bits_of(seed, counter, position, place, stream):
    """Return four uint32 for every uint32 of ``counter``, to which the others broadcast."""
    zero = counter * 0
    at = zero + position.to(tl.uint32)
    where = zero + place
    return tl.philox(seed, counter, at, where.to(tl.uint32), (zero + stream).to(tl.uint32))


@triton.jit
def accept_coins(seed, position, places):
    """Return one float64 in [0, 1) for each of ``places`` (int32), with 53 random bits."""
    counter = (places * 0).to(tl.uint32)
    first, second, _, _ = bits_of(seed, counter, position, places, ACCEPT)
    high = first.to(tl.float64) * 2097152.0  # 2^21
    return (high + (second >> 11).to(tl.float64)) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def exponential(bits):
    """Return −ln(1 − u) of u = (bits + 1/2) 2^-32 of uint32: float32, positive and finite."""
    u = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    other = bits ^ 0xFFFFFFFF  # ~bits, which not every release's interpreter has for uint32
    left = (other.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 1 − u, without cancellation
    series = 1 / 5 + u * (1 / 6 + u * (1 / 7))
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * series))))
    return tl.where(u < SMALL, series, -tl.log(left))


@triton.jit
def tokens_of(counter, OUTPUT: tl.constexpr):
    """Return the token ids whose noise is output OUTPUT (0 to 3) of each counter."""
    return (counter // LANES) * GROUP + OUTPUT * LANES + counter % LANES


@triton.jit
def contest(best, winner, key, token):
    """Return the larger key of each lane and its token, of the ``best`` so far and another."""
    better = key > best
    return tl.where(better, key, best), tl.where(better, token, winner)


@triton.jit
def foremost(best, winner):
    """Return the largest key of all lanes and the smallest token that has it."""
    most = tl.max(best, 0)
    return most, tl.min(tl.where(best == most, winner, NOBODY), 0)


@triton.jit
def log_of(key):
    """Return ln of keys, float64, −∞ of 0."""
    some = key > 0
    return tl.where(some, tl.log(tl.where(some, key, 1.0).to(tl.float64)), -float("inf"))


@triton.jit
def logit_of(row, token, vocab):
    """Return logits in float32, −∞ beyond the row; a NaN is ∞, which wins: see :func:`finish`."""
    logit = tl.load(row + token, mask=token < vocab, other=-float("inf")).to(tl.float32)
    return tl.where(logit == logit, logit, float("inf"))


@triton.jit
def likeliest_of_part(row, part, vocab, PART: tl.constexpr):
    """Return the largest logit of a part, float64, and the first token that has it."""
    lanes: tl.constexpr = lanes_of(PART)
    best = tl.full((lanes,), -float("inf"), tl.float32)
    winner = tl.full((lanes,), NOBODY, tl.int32)
    for step in range(0, PART, lanes):
        token = part * PART + step + tl.arange(0, lanes)
        best, winner = contest(best, winner, logit_of(row, token, vocab), token)
    most, token = foremost(best, winner)
    return most.to(tl.float64), token


@triton.jit
def winner_of_part(
    row, part, vocab, inverse, seed, position, place, stream, PART: tl.constexpr
):  # fmt: skip
    """Return ln e^{l/T}/E of a part's winner by the whole row, float64, and its token.

    Each lane has its weights in units of that of its largest logit so far, as the row's is
    unknown.
    """
    lanes: tl.constexpr = lanes_of(PART)
    peak = tl.full((lanes,), -float("inf"), tl.float32)
    best = tl.full((lanes,), 0.0, tl.float32)
    winner = tl.full((lanes,), NOBODY, tl.int32)
    for step in range(0, PART // 4, lanes):
        counter = part * (PART // 4) + step + tl.arange(0, lanes)
        drawn = bits_of(seed, counter.to(tl.uint32), position, place, stream)
        above = peak
        for k in tl.static_range(4):
            above = tl.maximum(above, logit_of(row, tokens_of(counter, k), vocab))
        unit = tl.maximum(above, LEAST)
        best *= fall(peak, unit, inverse)
        peak = above
        for k in tl.static_range(4):
            token = tokens_of(counter, k)
            weight = fall(logit_of(row, token, vocab), unit, inverse)
            best, winner = contest(best, winner, weight / exponential(drawn[k]), token)
    key = log_of(best) + peak.to(tl.float64) * inverse
    return foremost(tl.where(peak == float("inf"), float("inf"), key), winner)


@triton.jit
def race(
    target, draft, ids, lengths, temperature, seeds, positions, peaks, weights, accepted, scales,
    sums, edges, flags, left_keys, left_tokens, whole_keys, whole_tokens,
    target_batch, target_row, draft_batch, draft_row, ids_step, vocab, scalar, high, low, ROWS,
    WIDTH: tl.constexpr, PLACES: tl.constexpr, PARTS: tl.constexpr, MOST_PARTS: tl.constexpr,
    PART: tl.constexpr, FLAT: tl.constexpr, HAS_LENGTHS: tl.constexpr, CERTAIN: tl.constexpr,
    PER_ROW: tl.constexpr, SOLVED: tl.constexpr, BLOCK: tl.constexpr, FROM: tl.constexpr,
):  # fmt: skip
    """Write the winner of one part of each request's row, by its residual and by the whole row.

    Grid: (requests, PARTS). The row is that after its accepted tokens. Of a refused token's row
    M and S are known, and keys are w/E; those of the whole row ln w/E.
    """
    lanes: tl.constexpr = lanes_of(PART)
    b, part = tl.program_id(0), tl.program_id(1)
    start, length = draft_span(b, ids, lengths, ids_step, WIDTH, PLACES, FLAT, HAS_LENGTHS)
    place = tl.load(accepted + b)
    inverse, greedy = temperature_of(b, temperature, scalar, PER_ROW)
    row = target + target_at(b, place, start, target_batch, target_row, FLAT)
    seed, position = tl.load(seeds + b), tl.load(positions + b)
    at = b * PARTS + part
    if greedy | (place >= length):
        if greedy:
            most, token = likeliest_of_part(row, part, vocab, PART)
        else:
            most, token = winner_of_part(
                row, part, vocab, inverse, seed, position, place, BONUS, PART
            )
        tl.store(left_keys + at, -float("inf"))
        tl.store(whole_keys + at, most)
        tl.store(whole_tokens + at, token)
        return
    slot = b * WIDTH + place
    peak_q, weight_q = tl.load(peaks + slot), tl.load(weights + slot)
    scale = tl.load(scales + b)
    if CERTAIN:
        sure_token = tl.load(ids + token_at(place, start, ids_step, FLAT))
    else:
        other = draft + draft_at(place, start, draft_batch, draft_row, FLAT)
        peak_p, weight_p = tl.load(peaks + ROWS + slot), tl.load(weights + ROWS + slot)
        if SOLVED and not BLOCK:  # those of a block have the band's edge
            edge = upper_edge(slot, sums, edges, flags, ROWS, PARTS, MOST_PARTS, FROM)
            scale = scale * edge * knob_of(high, low)
    raised = scale.to(tl.float32)
    left = tl.full((lanes,), 0.0, tl.float32)
    whole = tl.full((lanes,), 0.0, tl.float32)
    left_at = tl.full((lanes,), NOBODY, tl.int32)
    whole_at = tl.full((lanes,), NOBODY, tl.int32)
    for step in range(0, PART // 4, lanes):
        counter = part * (PART // 4) + step + tl.arange(0, lanes)
        drawn = bits_of(seed, counter.to(tl.uint32), position, place, RECOVERED)
        for k in tl.static_range(4):
            token = tokens_of(counter, k)
            rate = 1 / exponential(drawn[k])
            q = fall(logit_of(row, token, vocab), peak_q, inverse) * weight_q
            whole, whole_at = contest(whole, whole_at, q * rate, token)
            if CERTAIN:
                weight = tl.where(token == sure_token, 0.0, q * raised)
            else:
                drafted = tl.load(other + token, mask=token < vocab, other=-float("inf"))
                weight = q * raised - fall(drafted.to(tl.float32), peak_p, inverse) * weight_p
            left, left_at = contest(left, left_at, weight * rate, token)
    most, token = foremost(left, left_at)
    tl.store(left_keys + at, tl.where(most > 0, most, -float("inf")))
    tl.store(left_tokens + at, token)
    most, token = foremost(whole, whole_at)
    tl.store(whole_keys + at, log_of(most))
    tl.store(whole_tokens + at, token)


@triton.jit
def finish(
    ids, lengths, accepted, left_keys, left_tokens, whole_keys, whole_tokens, output, counts,
    ids_step, output_step,
    WIDTH: tl.constexpr, PLACES: tl.constexpr, PARTS: tl.constexpr, MOST_PARTS: tl.constexpr,
    FLAT: tl.constexpr, HAS_LENGTHS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Write the accepted tokens, the winner of all parts, and −1 after them. Grid: (requests,).

    Where the row is not a distribution, −1 stands in its place: a NaN or an infinite logit has
    won with an infinite key, or no token has a logit at all.
    """
    b = tl.program_id(0)
    start, _ = draft_span(b, ids, lengths, ids_step, WIDTH, PLACES, FLAT, HAS_LENGTHS)
    count = tl.load(accepted + b)
    part = tl.arange(0, MOST_PARTS)
    at = b * PARTS + part
    on = part < PARTS
    left = tl.load(left_keys + at, mask=on, other=-float("inf"))
    whole = tl.load(whole_keys + at, mask=on, other=-float("inf"))
    best, token = foremost(left, tl.load(left_tokens + at, mask=on, other=NOBODY))
    most, other = foremost(whole, tl.load(whole_tokens + at, mask=on, other=NOBODY))
    last = tl.where(best > -float("inf"), token, other)
    last = tl.where(tl.abs(most) < float("inf"), last, -1)
    place = tl.arange(0, OUTPUTS)
    where = token_at(place, start, ids_step, FLAT)
    drafted_id = tl.load(ids + where, mask=place < count, other=-1).to(tl.int64)
    out = tl.where(place == count, last.to(tl.int64), drafted_id)
    tl.store(output + b.to(tl.int64) * output_step + place, out, mask=place <= WIDTH)
    tl.store(counts + b, count.to(tl.int64))


@triton.jit
def race_alone(
    logits, temperature, seeds, positions, keys, tokens, row_step, vocab, scalar, place,
    PARTS: tl.constexpr, PART: tl.constexpr, PER_ROW: tl.constexpr,
):  # fmt: skip
    """Write the winner of one part of each row of ``logits`` (B, V), and its key. Grid: (B, PARTS).

    ``keys`` float64 and ``tokens`` int32 are (B, C); ``place`` is one number, of the drafted token.
    """
    b, part = tl.program_id(0), tl.program_id(1)
    inverse, greedy = temperature_of(b, temperature, scalar, PER_ROW)
    row = logits + b.to(tl.int64) * row_step
    if greedy:
        most, first = likeliest_of_part(row, part, vocab, PART)
    else:
        most, first = winner_of_part(
            row,
            part,
            vocab,
            inverse,
            tl.load(seeds + b),
            tl.load(positions + b),
            place,
            DRAFT,
            PART,
        )
    tl.store(keys + b * PARTS + part, most)
    tl.store(tokens + b * PARTS + part, first)


@triton.jit
def pick_alone(keys, tokens, out, PARTS: tl.constexpr, MOST_PARTS: tl.constexpr):
    """Write the winner of all parts to ``out`` (B,), −1 where the row is no distribution.

    Grid: (B,).
    """
    b = tl.program_id(0)
    part = tl.arange(0, MOST_PARTS)
    at = b * PARTS + part
    key = tl.load(keys + at, mask=part < PARTS, other=-float("inf"))
    most, token = foremost(key, tl.load(tokens + at, mask=part < PARTS, other=NOBODY))
    tl.store(out + b, tl.where(tl.abs(most) < float("inf"), token, -1).to(tl.int64))
