# Triton's annotations do not describe what its functions return
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
r"""Draw a token in one pass over its row, by an exponential race.

Token i has exponential noise E_i of mean 1, and argmin E_i/w_i has the law w/Σw, without Σw
being known. After the accepted tokens the weights are (s q − p)₊ after a refusal, and q, by its raw
logits, for a bonus token or where nothing is left; a drafted token's are its row of logits. Weight
0 takes no part, so such a token is never drawn. On a CPU tokens are drawn in
``cactus_theory/verify/draw.py``.
"""

import triton
import triton.language as tl

from cactus_theory.kernels import _streams
from cactus_theory.kernels._band import solved
from cactus_theory.kernels._judge import BONUS, RECOVERED, bits_of, exponential, tokens_of, wide
from cactus_theory.kernels._rows import draft_at, drafted, target_at, temperature_of, token_at


@triton.jit
def contest(best, winner, key, token):
    """Keep the larger key of each lane, and its token."""
    better = key > best
    return tl.where(better, key, best), tl.where(better, token, winner)


@triton.jit
def foremost(best, winner):
    """Return the largest key and the smallest token that has it."""
    most = tl.max(best, 0)
    return most, tl.min(tl.where(best == most, winner, 2147483647), 0)


@triton.jit
def race(
    target, draft, ids, lengths, temperature, seeds, positions, peaks, weights, accepted, scales,
    sums, edges, flags, left_keys, left_tokens, whole_keys, whole_tokens,
    target_batch, target_row, draft_batch, draft_row, ids_step, vocab, scalar, high, low, ROWS,
    WIDTH: tl.constexpr, PLACES: tl.constexpr, PARTS: tl.constexpr, MOST_PARTS: tl.constexpr,
    PART: tl.constexpr, FLAT: tl.constexpr, HAS_LENGTHS: tl.constexpr, CERTAIN: tl.constexpr,
    PER_ROW: tl.constexpr, ON_BAND: tl.constexpr, FROM: tl.constexpr,
):  # fmt: skip
    """Write the winner of one part of each request's row, by its residual and by the whole row.

    Grid: (requests, PARTS).
    """
    b, part = tl.program_id(0), tl.program_id(1)
    start, length = drafted(b, ids, lengths, ids_step, WIDTH, PLACES, FLAT, HAS_LENGTHS)
    place = tl.load(accepted + b)
    refused = place < length
    inverse, greedy = temperature_of(b, temperature, scalar, PER_ROW)
    slot = b * WIDTH + tl.where(refused, place, 0)
    row = target + target_at(b, place, start, target_batch, target_row, FLAT)
    peak_q = tl.load(peaks + slot, mask=refused, other=0.0)
    weight_q = tl.load(weights + slot, mask=refused, other=0.0)
    scale = tl.load(scales + b)
    if CERTAIN:
        gone = tl.load(ids + token_at(place, start, ids_step, FLAT), mask=refused, other=-1)
    else:
        other = draft + draft_at(place, start, draft_batch, draft_row, FLAT)
        beyond = tl.where(refused, vocab, 0)  # a bonus token reads no row of the draft
        peak_p = tl.load(peaks + ROWS + slot, mask=refused, other=0.0)
        weight_p = tl.load(weights + ROWS + slot, mask=refused, other=0.0)
        if ON_BAND:
            if refused & (not greedy):
                edge = solved(slot, sums, edges, flags, ROWS, PARTS, MOST_PARTS, FROM)
                scale = scale * edge * wide(high, low)
    weight_q *= scale.to(tl.float32)
    seed, position = tl.load(seeds + b), tl.load(positions + b)
    counter = part * (PART // 4) + tl.arange(0, PART // 4)
    drawn = bits_of(
        seed, counter.to(tl.uint32), position, place, tl.where(refused, RECOVERED, BONUS)
    )
    left = tl.full((PART // 4,), -float("inf"), tl.float32)
    whole = tl.full((PART // 4,), -float("inf"), tl.float64)
    left_at = tl.full((PART // 4,), 2147483647, tl.int32)
    whole_at = tl.full((PART // 4,), 2147483647, tl.int32)
    for k in tl.static_range(4):
        token = tokens_of(counter, k)
        inside = token < vocab
        delay = tl.where(greedy, 0.0, tl.log(exponential(drawn[k])))
        logit = tl.load(row + token, mask=inside, other=-float("inf")).to(tl.float32)
        logit = tl.where(logit == logit, logit, float("inf"))  # wins: see finish
        key = logit.to(tl.float64) * inverse - delay
        whole, whole_at = contest(whole, whole_at, key, token)
        weight = tl.exp((logit - peak_q) * inverse) * weight_q
        if CERTAIN:
            weight = tl.where(token == gone, 0.0, weight)
        else:
            drafted_logit = tl.load(other + token, mask=token < beyond, other=-float("inf"))
            weight -= tl.exp((drafted_logit.to(tl.float32) - peak_p) * inverse) * weight_p
        key = tl.where(weight > 0, tl.log(tl.where(weight > 0, weight, 1.0)) - delay, -float("inf"))
        left, left_at = contest(left, left_at, key, token)
    most, token = foremost(left, left_at)
    at = b * PARTS + part
    tl.store(left_keys + at, tl.where(refused & (not greedy), most, -float("inf")))
    tl.store(left_tokens + at, token)
    most, token = foremost(whole, whole_at)
    tl.store(whole_keys + at, most)
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
    start, _ = drafted(b, ids, lengths, ids_step, WIDTH, PLACES, FLAT, HAS_LENGTHS)
    count = tl.load(accepted + b)
    part = tl.arange(0, MOST_PARTS)
    at = b * PARTS + part
    on = part < PARTS
    left = tl.load(left_keys + at, mask=on, other=-float("inf"))
    whole = tl.load(whole_keys + at, mask=on, other=-float("inf"))
    best, token = foremost(left, tl.load(left_tokens + at, mask=on, other=2147483647))
    most, other = foremost(whole, tl.load(whole_tokens + at, mask=on, other=2147483647))
    last = tl.where(best > -float("inf"), token, other)
    last = tl.where(tl.abs(most) < float("inf"), last, -1)
    place = tl.arange(0, OUTPUTS)
    where = token_at(place, start, ids_step, FLAT)
    drafted_id = tl.load(ids + where, mask=place < count, other=-1).to(tl.int64)
    out = tl.where(place == count, last.to(tl.int64), drafted_id)
    tl.store(output + b.to(tl.int64) * output_step + place, out, mask=place <= WIDTH)
    tl.store(counts + b, count.to(tl.int64))


DRAFT = tl.constexpr(_streams.DRAFT)


@triton.jit
def race_alone(
    logits, temperature, seeds, positions, keys, tokens, row_step, vocab, scalar, place,
    PARTS: tl.constexpr, PART: tl.constexpr, PER_ROW: tl.constexpr,
):  # fmt: skip
    """Write the winner of one part of each row. Grid: (rows, PARTS)."""
    b, part = tl.program_id(0), tl.program_id(1)
    inverse, greedy = temperature_of(b, temperature, scalar, PER_ROW)
    row = logits + b.to(tl.int64) * row_step
    counter = part * (PART // 4) + tl.arange(0, PART // 4)
    drawn = bits_of(tl.load(seeds + b), counter.to(tl.uint32), tl.load(positions + b), place, DRAFT)
    best = tl.full((PART // 4,), -float("inf"), tl.float64)
    winner = tl.full((PART // 4,), 2147483647, tl.int32)
    for k in tl.static_range(4):
        token = tokens_of(counter, k)
        logit = tl.load(row + token, mask=token < vocab, other=-float("inf")).to(tl.float32)
        logit = tl.where(logit == logit, logit, float("inf"))  # wins: no token is drawn then
        delay = tl.where(greedy, 0.0, tl.log(exponential(drawn[k])))
        best, winner = contest(best, winner, logit.to(tl.float64) * inverse - delay, token)
    most, first = foremost(best, winner)
    tl.store(keys + b * PARTS + part, most)
    tl.store(tokens + b * PARTS + part, first)


@triton.jit
def pick_alone(keys, tokens, out, PARTS: tl.constexpr, MOST_PARTS: tl.constexpr):
    """Write the winner of all parts, −1 where the row is no distribution. Grid: (rows,)."""
    b = tl.program_id(0)
    part = tl.arange(0, MOST_PARTS)
    at = b * PARTS + part
    key = tl.load(keys + at, mask=part < PARTS, other=-float("inf"))
    most, token = foremost(key, tl.load(tokens + at, mask=part < PARTS, other=2147483647))
    tl.store(out + b, tl.where(tl.abs(most) < float("inf"), token, -1).to(tl.int64))
