# Triton's annotations do not describe what its functions return
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false
r"""Coins, and the draw of each request's recovered or bonus token by one coin, in two launches.

The first launch sums a row's weights by parts. The second finds the part where the coin falls,
reads that part again, and finds the token: the first token of positive weight at which the running
sum exceeds the coin times the total, as in ``cactus_theory/verify/draw.py``. Weights and sums of
parts are float32, running sums float64. Weights are (s q − p)₊ for a recovered token. For a bonus
token, or if all these weights are 0, the weights are q, computed from the raw logits.

Parameters are groups of ``buffers.py``; for ``position``, ``places`` and ``stream`` see
``random_numbers.py``, for all other values ``_rows.py``.
"""

import triton
import triton.language as tl

from cactus_theory.kernels import random_numbers
from cactus_theory.kernels._band import part_of_rows, upper_edge
from cactus_theory.kernels._rows import (
    draft_length,
    fall,
    number_of,
    part_at,
    store_sums,
    take_turn,
    temperature_of,
    tokens_at,
)

ACCEPT, DRAW = map(tl.constexpr, random_numbers.STREAMS)
# token id that stands for no token: greater than every id, so that a minimum ignores it
NOBODY = tl.constexpr(2147483647)


@triton.jit
def coins_of(seed, position, places, stream: tl.constexpr):
    """Return a coin, float64 in [0, 1) with 53 random bits, for each of ``places`` (int32)."""
    zero = (places * 0).to(tl.uint32)
    first, second, _, _ = tl.philox(
        seed, zero, zero + position.to(tl.uint32), places.to(tl.uint32), zero + stream
    )
    high = first.to(tl.float64) * 2097152.0  # 2^21
    # (32 bits · 2^21 + 21 bits) / 2^53
    return (high + (second >> 11).to(tl.float64)) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def refused_part(
    b, place, part, inverse, requests, target, draft, softmax, scale, form: tl.constexpr
):
    """Return one part of the weights (s q − p)₊ after a rejection, and of q, float32."""
    if form.deterministic:
        slot = b * form.rows + place
        logit = part_at(b, place, part, target, requests, form)
        peak, weight = tl.load(softmax.peaks + slot), tl.load(softmax.weights + slot)
        q = fall(logit, peak, inverse * target.power) * weight
        token = part * form.part + tl.arange(0, form.part)
        refused = tl.load(tokens_at(b, place, requests))
        left = tl.where(token == refused, 0.0, q * scale)
    else:
        q, p = part_of_rows(b, place, part, inverse, requests, target, draft, softmax, form)
        left = q * scale - p
    return tl.where(left > 0, left, 0.0), q  # 0 for NaN, too


@triton.jit
def scale_of(b, place, decision, band, knob, form: tl.constexpr):
    """Return the scale s of the residual distribution at a rejected token, float32."""
    scale = tl.load(decision.scales + b)
    if band is not None:
        scale = scale * upper_edge(b * form.width + place, band, form) * number_of(knob)
    return scale.to(tl.float32)


@triton.jit
def leftover(requests, target, draft, softmax, decision, band, sums, knob, form: tl.constexpr):
    """Write the sums of one part of the row that each request's last token is drawn from.

    Grid: (B, C). After a rejection these are the sums of the residual, and the sums of q, copied
    from ``softmax``. ``band`` has the bands of the rejected tokens' rows, from which the residuals'
    scales follow; None if ``decision.scales`` has the scales already.
    """
    take_turn(form)
    b, part = tl.program_id(0), tl.program_id(1)
    length = draft_length(b, requests, form)
    place = tl.load(decision.accepted + b)
    heat, greedy = temperature_of(b, requests, form)
    inverse = 1.0 / heat
    at = b * form.parts + part
    if greedy | (place >= length):
        logit = part_at(b, place, part, target, requests, form)
        store_sums(logit, part, at, inverse * target.power, sums, requests.vocab, form)
        tl.store(sums.left + at, 0.0)
    else:
        of_slot = (b * form.rows + place).to(tl.int64) * form.parts + part
        tl.store(sums.most + at, tl.load(softmax.most + of_slot))
        tl.store(sums.whole + at, tl.load(softmax.whole + of_slot))
        scale = scale_of(b, place, decision, band, knob, form)
        left, _ = refused_part(
            b, place, part, inverse, requests, target, draft, softmax, scale, form
        )
        tl.store(sums.left + at, tl.sum(left, 0))


@triton.jit
def masses_of(b, inverse, sums, form: tl.constexpr):
    """Return the masses Σ e^((l − M)/T) of a row's parts, float64; M is the row's largest logit.

    If a mass is NaN, or none is positive, the row is no distribution.
    """
    part = tl.arange(0, form.most_parts)
    at, on = b * form.parts + part, part < form.parts
    most = tl.load(sums.most + at, mask=on, other=-float("inf")).to(tl.float64)
    whole = tl.load(sums.whole + at, mask=on, other=0.0).to(tl.float64)
    peak = tl.max(most, 0)
    finite = tl.where(peak == -float("inf"), 0.0, peak)  # −∞ − (−∞) would be NaN
    return whole * tl.exp((most - finite) * inverse)


@triton.jit
def first_beyond(mass, share):
    """Return the index of the first positive mass at which the running sum exceeds share × total.

    Also returns how far into this mass share × total lies, as a fraction of the mass.
    """
    index = tl.arange(0, mass.shape[0])
    running = tl.cumsum(mass, 0)
    positive = mass > 0
    last = tl.max(tl.where(positive, index, 0), 0)
    total = tl.max(tl.where(index == last, running, 0.0), 0)
    # by rounding, no running sum may exceed the share: then take the last positive mass
    found = tl.min(tl.where(positive & (running > share * total), index, last), 0)
    at_found = index == found
    mass_there = tl.sum(tl.where(at_found, mass, 0.0), 0)
    beyond = share * total - (tl.sum(tl.where(at_found, running, 0.0), 0) - mass_there)
    divisor = tl.where(mass_there > 0, mass_there, 1.0)
    return found, tl.where(mass_there > 0, tl.maximum(beyond / divisor, 0.0), 0.0)


@triton.jit
def likeliest_of(b, sums, form: tl.constexpr):
    """Return the token with a row's largest logit, the first one on ties."""
    part = tl.arange(0, form.most_parts)
    at, on = b * form.parts + part, part < form.parts
    most = tl.load(sums.most + at, mask=on, other=-float("inf"))
    token = tl.load(sums.likeliest + at, mask=on, other=NOBODY)
    return tl.min(tl.where(most == tl.max(most, 0), token, NOBODY), 0)


@triton.jit
def token_at(weight, found, share, total, b, greedy, sums, form: tl.constexpr):
    """Return the token that the coin draws within part ``found``, whose tokens have ``weight``.

    ``share`` is how far into the part the coin falls, as a fraction of its mass. A greedy request
    gets the likeliest token. The result is −1 if ``total``, the row's mass, is 0, ∞ or NaN.
    """
    inside, _ = first_beyond(weight.to(tl.float64), share)
    token = found * form.part + inside
    if form.greedy:
        token = tl.where(greedy, likeliest_of(b, sums, form), token)
    return tl.where((total > 0) & (total < float("inf")), token, -1).to(tl.int64)


@triton.jit
def finish(
    requests, target, draft, softmax, decision, band, sums, emitted, knob, form: tl.constexpr
):
    """Draw the recovered or bonus token; write the emitted tokens, and then −1. Grid: (B,)."""
    take_turn(form)
    b = tl.program_id(0)
    count = tl.load(decision.accepted + b)
    heat, greedy = temperature_of(b, requests, form)
    inverse = 1.0 / heat
    part = tl.arange(0, form.most_parts)
    colder = inverse * target.power
    mass = masses_of(b, colder.to(tl.float64), sums, form)
    total = tl.sum(mass, 0)
    at = b * form.parts + part
    left = tl.load(sums.left + at, mask=part < form.parts, other=0.0).to(tl.float64)
    has_residual = tl.sum(left, 0) > 0
    coin = coins_of(tl.load(requests.seeds + b), tl.load(requests.positions + b), count * 0, DRAW)
    # the part where the coin falls, and how far into the part
    found, share = first_beyond(tl.where(has_residual, left, mass), coin)
    if has_residual:
        scale = scale_of(b, count, decision, band, knob, form)
        weight, whole = refused_part(
            b, count, found, inverse, requests, target, draft, softmax, scale, form
        )
        # the sums came from another kernel, which may round differently: here all may be 0
        weight = tl.where(tl.max(weight, 0) > 0, weight, whole)
    else:
        logit = part_at(b, count, found, target, requests, form)
        weight = fall(logit, tl.load(sums.most + b * form.parts + found), colder)
    last = token_at(weight, found, share, total, b, greedy, sums, form)
    place = tl.arange(0, form.outputs)
    drafted = tl.load(tokens_at(b, place, requests), mask=place < count, other=-1)
    out = tl.where(place == count, last, drafted)
    at = b.to(tl.int64) * emitted.step + place
    tl.store(emitted.output + at, out, mask=place <= form.width)
    tl.store(emitted.counts + b, count.to(tl.int64))
