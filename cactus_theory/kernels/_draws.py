# Triton's annotations do not describe what its functions return
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false
r"""Random numbers, and draws of a token in one pass over its row, by an exponential race.

Token i has exponential noise E_i of mean 1, and argmin E_i/w_i has the law w/Σw, without Σw
being known. After the accepted tokens the weights are (s q − p)₊ after a refusal, and q, by its raw
logits, for a bonus token or where nothing is left; a drafted token's are its row of logits. Weight
0 takes no part, so such a token is never drawn. On a CPU tokens are drawn in
``cactus_theory/verify/draw.py``.

Parameters are groups of ``buffers.py``; ``counter``, ``position`` and ``stream`` those of
``random_numbers.py``.
"""

import triton
import triton.language as tl

from cactus_theory.kernels import random_numbers
from cactus_theory.kernels._band import upper_edge
from cactus_theory.kernels._rows import (
    draft_span,
    fall,
    number_of,
    row_at,
    temperature_of,
    tokens_at,
)

ACCEPT, RECOVERED, BONUS, DRAFT, _ = map(tl.constexpr, random_numbers.STREAMS)
# counters of a group, and the tokens that share them: 4 outputs of each counter
LANES = tl.constexpr(random_numbers.LANES)
GROUP = tl.constexpr(4 * random_numbers.LANES)
# token id of a lane in which no token has weight, and the least float32
NOBODY, LEAST = tl.constexpr(2147483647), tl.constexpr(-3.4028234663852886e38)
# u below which the series of −ln(1 − u) is exact to float32; above it the logarithm is
SMALL = tl.constexpr(1 / 16)


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
    other = bits ^ 0xFFFFFFFF  # ~bits: not every release's interpreter has ~ for uint32
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
    """Return logits in float32, −∞ beyond the row, ∞ for NaN, which wins: see :func:`finish`."""
    logit = tl.load(row + token, mask=token < vocab, other=-float("inf")).to(tl.float32)
    return tl.where(logit == logit, logit, float("inf"))


@triton.jit
def likeliest_of_part(row, part, vocab, form: tl.constexpr):
    """Return the largest logit of a part, float64, and the first token that has it."""
    lanes: tl.constexpr = form.lanes
    best = tl.full((lanes,), -float("inf"), tl.float32)
    winner = tl.full((lanes,), NOBODY, tl.int32)
    for step in range(0, form.part, lanes):
        token = part * form.part + step + tl.arange(0, lanes)
        best, winner = contest(best, winner, logit_of(row, token, vocab), token)
    most, token = foremost(best, winner)
    return most.to(tl.float64), token


@triton.jit
def winner_of_part(
    row, part, vocab, inverse, greedy, seed, position, place, stream, form: tl.constexpr
):  # fmt: skip
    """Return ln e^{l/T}/E of a part's winner by the whole row, float64, and its token.

    A greedy request's key is its logit. Each lane has its weights in units of that of its largest
    logit so far, as the row's is unknown.
    """
    if greedy:
        most, token = likeliest_of_part(row, part, vocab, form)
    else:
        lanes: tl.constexpr = form.lanes
        peak = tl.full((lanes,), -float("inf"), tl.float32)
        best = tl.full((lanes,), 0.0, tl.float32)
        winner = tl.full((lanes,), NOBODY, tl.int32)
        for step in range(0, form.part // 4, lanes):
            counter = part * (form.part // 4) + step + tl.arange(0, lanes)
            drawn = bits_of(seed, counter.to(tl.uint32), position, place, stream)
            above = peak
            for k in tl.static_range(4):
                above = tl.maximum(above, logit_of(row, tokens_of(counter, k), vocab))
            unit = tl.maximum(above, LEAST)
            best *= fall(peak, unit, inverse)
            peak = above
            for k in tl.static_range(4):
                at = tokens_of(counter, k)
                weight = fall(logit_of(row, at, vocab), unit, inverse)
                best, winner = contest(best, winner, weight / exponential(drawn[k]), at)
        key = log_of(best) + peak.to(tl.float64) * inverse
        most, token = foremost(tl.where(peak == float("inf"), float("inf"), key), winner)
    return most, token


@triton.jit
def race(
    requests, target, draft, softmax, decision, band, winners, knob, form: tl.constexpr
):  # fmt: skip
    """Write the winner of one part of each request's row, by its residual and by the whole row.

    Grid: (B, C). The row is that after its accepted tokens. Of a refused token's row M and S are
    known, and keys are w/E; those of the whole row ln w/E. ``band``: where the edges of refused
    rows are, None if their scales have them.
    """
    lanes: tl.constexpr = form.lanes
    b, part = tl.program_id(0), tl.program_id(1)
    first, length = draft_span(b, requests, form)
    place = tl.load(decision.accepted + b)
    heat, greedy = temperature_of(b, requests, form)
    inverse = 1.0 / heat
    row = row_at(b, first, place, target, form)
    seed, position = tl.load(requests.seeds + b), tl.load(requests.positions + b)
    at = b * form.parts + part
    if greedy | (place >= length):
        most, token = winner_of_part(
            row, part, requests.vocab, inverse, greedy, seed, position, place, BONUS, form
        )  # fmt: skip
        tl.store(winners.left_keys + at, -float("inf"))
        tl.store(winners.whole_keys + at, most)
        tl.store(winners.whole_tokens + at, token)
        return
    slot = b * form.rows + place
    peak_q, weight_q = tl.load(softmax.peaks + slot), tl.load(softmax.weights + slot)
    scale = tl.load(decision.scales + b)
    if form.deterministic:
        sure_token = tl.load(tokens_at(b, first, place, requests, form))
    else:
        other = row_at(b, first, place, draft, form)
        peak_p = tl.load(softmax.peaks + slot + form.width)
        weight_p = tl.load(softmax.weights + slot + form.width)
    if band is not None:
        scale = scale * upper_edge(b * form.width + place, band, form) * number_of(knob)
    raised = scale.to(tl.float32)
    left = tl.full((lanes,), 0.0, tl.float32)
    whole = tl.full((lanes,), 0.0, tl.float32)
    left_at = tl.full((lanes,), NOBODY, tl.int32)
    whole_at = tl.full((lanes,), NOBODY, tl.int32)
    for step in range(0, form.part // 4, lanes):
        counter = part * (form.part // 4) + step + tl.arange(0, lanes)
        drawn = bits_of(seed, counter.to(tl.uint32), position, place, RECOVERED)
        for k in tl.static_range(4):
            token = tokens_of(counter, k)
            rate = 1 / exponential(drawn[k])
            q = fall(logit_of(row, token, requests.vocab), peak_q, inverse) * weight_q
            whole, whole_at = contest(whole, whole_at, q * rate, token)
            if form.deterministic:
                weight = tl.where(token == sure_token, 0.0, q * raised)
            else:
                drafted = tl.load(other + token, mask=token < requests.vocab, other=-float("inf"))
                weight = q * raised - fall(drafted.to(tl.float32), peak_p, inverse) * weight_p
            left, left_at = contest(left, left_at, weight * rate, token)
    most, token = foremost(left, left_at)
    tl.store(winners.left_keys + at, tl.where(most > 0, most, -float("inf")))
    tl.store(winners.left_tokens + at, token)
    most, token = foremost(whole, whole_at)
    tl.store(winners.whole_keys + at, log_of(most))
    tl.store(winners.whole_tokens + at, token)


@triton.jit
def winner_of_row(b, keys, tokens, form: tl.constexpr):
    """Return the largest key of all parts and its token; −∞ and NOBODY where none has one."""
    part = tl.arange(0, form.most_parts)
    at, on = b * form.parts + part, part < form.parts
    key = tl.load(keys + at, mask=on, other=-float("inf"))
    return foremost(key, tl.load(tokens + at, mask=on, other=NOBODY))


@triton.jit
def finish(requests, decision, winners, emitted, form: tl.constexpr):
    """Write the accepted tokens, the winner of all parts, and −1 after them. Grid: (B,).

    Where the row is not a distribution, −1 stands in its place: a NaN or an infinite logit has
    won with an infinite key, or no token has a logit at all.
    """
    b = tl.program_id(0)
    first, _ = draft_span(b, requests, form)
    count = tl.load(decision.accepted + b)
    best, token = winner_of_row(b, winners.left_keys, winners.left_tokens, form)
    most, other = winner_of_row(b, winners.whole_keys, winners.whole_tokens, form)
    last = tl.where(best > -float("inf"), token, other)
    last = tl.where(tl.abs(most) < float("inf"), last, -1)
    place = tl.arange(0, form.outputs)
    drafted = tl.load(tokens_at(b, first, place, requests, form), mask=place < count, other=-1)
    out = tl.where(place == count, last.to(tl.int64), drafted)
    at = b.to(tl.int64) * emitted.step + place
    tl.store(emitted.output + at, out, mask=place <= form.width)
    tl.store(emitted.counts + b, count.to(tl.int64))


@triton.jit
def race_alone(requests, rows, winners, place, form: tl.constexpr):
    """Write the winner of one part of each row of logits, (B, V). Grid: (B, C).

    ``place`` is one number, of the drafted token that is drawn.
    """
    b, part = tl.program_id(0), tl.program_id(1)
    row = rows.logits + b.to(tl.int64) * rows.step
    heat, greedy = temperature_of(b, requests, form)
    inverse = 1.0 / heat
    seed, position = tl.load(requests.seeds + b), tl.load(requests.positions + b)
    most, token = winner_of_part(
        row, part, requests.vocab, inverse, greedy, seed, position, place, DRAFT, form
    )  # fmt: skip
    tl.store(winners.whole_keys + b * form.parts + part, most)
    tl.store(winners.whole_tokens + b * form.parts + part, token)


@triton.jit
def pick_alone(winners, out, form: tl.constexpr):
    """Write the winner of all parts to ``out`` (B,), −1 where the row is no distribution.

    Grid: (B,).
    """
    b = tl.program_id(0)
    most, token = winner_of_row(b, winners.whole_keys, winners.whole_tokens, form)
    tl.store(out + b, tl.where(tl.abs(most) < float("inf"), token, -1).to(tl.int64))
