"""Decide about the drafted tokens of a chain from their entries alone, by Philox numbers.

Each purpose has a stream of random numbers of its own.
"""

import triton
import triton.language as tl

from cactus_theory.kernels import _streams, rules
from cactus_theory.kernels._rows import drafted, entries, token_at

SCALED = tl.constexpr(rules.SCALED)
POWER = tl.constexpr(rules.POWER)
MIXED = tl.constexpr(rules.MIXED)
CACTUS = tl.constexpr(rules.CACTUS)
CACTUS_EXACT = tl.constexpr(rules.CACTUS_EXACT)
BAND = tl.constexpr(rules.BAND)
# from γ = 1 to the root at δ = 1e-6: Newton halves the distance about ten times, then squares it
EXACT_STEPS = tl.constexpr(20)
# what a decision left open is marked with
REFUSED, KEPT, OPEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def two_points(x, q_n):
    """Return the KL divergence of (x, 1 − x) from (q, 1 − q)."""
    return x * tl.log(x / q_n) + (1 - x) * tl.log((1 - x) / (1 - q_n))


@triton.jit
def exact_ceiling(q_n, above, delta):
    """Return the root γ of D(γ‖q) = δ to the left of ``above``, where D > δ."""
    inner = (q_n > 0) & (q_n < 1) & (above > q_n) & (above < 1)
    q = tl.where(inner, q_n, 0.5)
    x = tl.where(inner, above, 0.75)
    for _ in range(EXACT_STEPS):  # D is convex: every step stays on the right of the root
        slope = tl.log(x * (1 - q) / (q * (1 - x)))
        x = tl.maximum(x - tl.maximum(two_points(x, q) - delta, 0.0) / slope, q * 1.0000001)
    return tl.where(inner, x, q_n)


@triton.jit
def keeps(q_n, p_n, coin, knob, KIND: tl.constexpr, CERTAIN_ROW):
    """Return which tokens are kept, and the scale s of what replaces each refused one.

    Under the band OPEN where the row must be read, REFUSED where no band keeps the token.
    """
    asked = coin * p_n
    scale = tl.full(q_n.shape, 1.0, tl.float64)
    if KIND == SCALED:
        kept = asked < q_n * knob
    elif KIND == POWER:
        power = tl.exp(knob * tl.log(tl.where(q_n > 0, q_n, 1.0)))
        kept = asked < tl.where(q_n > 0, power, 0.0)
    elif KIND == MIXED:
        kept = (q_n > 0) & (asked < knob * p_n + (1 - knob) * q_n)
    elif KIND == CACTUS:
        q = tl.minimum(q_n, 1.0)
        gamma = tl.minimum(q + tl.sqrt(2 * knob * q * (1 - q)), 1.0)
        kept = asked < gamma
        scale = tl.where(gamma > q, (1 - gamma) / tl.maximum(1 - q, 1e-37), 1.0)
    elif KIND == CACTUS_EXACT:
        inner = (q_n > 0) & (q_n < 1) & (asked > q_n)
        x = tl.where(inner, asked, 0.75)
        within = inner & (two_points(x, tl.where(inner, q_n, 0.5)) < knob)
        kept = (asked < q_n) | within
        gamma = exact_ceiling(q_n, asked, knob)
        scale = tl.where(gamma > q_n, (1 - gamma) / tl.maximum(1 - q_n, 1e-37), 1.0)
    else:
        lossless = asked < q_n
        raised = q_n / (knob * (1 - q_n) + q_n)  # h_n if p is one-hot at n
        certain = tl.where(CERTAIN_ROW, coin < raised, False)
        beyond = (q_n > 0) & (asked * knob < q_n)  # r < 1/knob, the band's largest edge
        kept = lossless | certain
        opened = beyond & (CERTAIN_ROW == 0)
    number = (q_n == q_n) & (p_n == p_n)  # a device's minimum may drop a NaN
    kept = kept & number
    if KIND == BAND:
        return tl.where(kept, KEPT, tl.where(opened, OPEN, REFUSED)), scale
    return tl.where(kept, KEPT, REFUSED), scale


@triton.jit
def first_refusal(verdict, place, length, PLACES: tl.constexpr):
    """Return how many tokens come before the first refused one."""
    return tl.min(tl.where((place < length) & (verdict == REFUSED), place, length), 0)


@triton.jit
def wide(high, low):
    """Return a knob as float64."""
    return tl.full((), high, tl.float64) + tl.full((), low, tl.float64)


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
    start, length = drafted(b, ids, lengths, ids_step, WIDTH, PLACES, FLAT, HAS_LENGTHS)
    at = token_at(place, start, ids_step, FLAT)
    token = tl.load(ids + at, mask=place < length, other=-1)
    q_n, p_n, greedy = entries(
        b, start, length, place, token, target, draft, temperature, part_max, part_sum, part_arg,
        peaks, weights, target_batch, target_row, draft_batch, draft_row, vocab, scalar,
        WIDTH, PARTS, MOST_PARTS, FLAT, CERTAIN, PER_ROW, GREEDY, ROWS,
    )  # fmt: skip
    coin = accept_coins(tl.load(seeds + b), tl.load(positions + b), place)
    knob = wide(high, low)
    verdict, scale = keeps(q_n, p_n, coin, knob, KIND, greedy | CERTAIN)
    count = first_refusal(verdict, place, length, PLACES)
    tl.store(accepted + b, count)
    if KIND == BAND:
        tl.store(scales + b, knob * 0 + 1.0)  # the count may change, and a is found later
        on = place < length
        slot = b * WIDTH + place
        opened = (verdict == OPEN) & (place < count)
        read = opened | (on & (place == count) & ((greedy | CERTAIN) == 0))
        tl.store(verdicts + slot, verdict, mask=on)
        asked = coin * p_n / tl.where(opened, q_n, 1.0)
        begin = tl.where(opened, asked, tl.sqrt(1 / knob))
        tl.store(edges + slot, begin, mask=on)
        tl.store(flags + slot, read.to(tl.int32), mask=place < WIDTH)
    else:
        tl.store(scales + b, tl.sum(tl.where(place == count, scale, 0.0), 0))


ACCEPT = tl.constexpr(_streams.ACCEPT)
RECOVERED = tl.constexpr(_streams.RECOVERED)
BONUS = tl.constexpr(_streams.BONUS)
# tokens that share a group of counters: 4 outputs of 128 counters each
LANES = tl.constexpr(_streams.LANES)
GROUP = tl.constexpr(4 * _streams.LANES)
# below this u the series of −ln(1 − u) is exact to float32, above it the logarithm is
SMALL = tl.constexpr(1 / 16)


@triton.jit
def bits_of(seed, counter, position, place, stream):
    """Return four uint32 for every uint32 of ``counter``."""
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
    """Return −ln(1 − u) of u = (bits + 1/2) 2^-32: float32, positive and finite."""
    u = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    other = bits ^ 0xFFFFFFFF  # ~bits, which not every release's interpreter has for uint32
    left = (other.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 1 − u, without cancellation
    series = 1 / 5 + u * (1 / 6 + u * (1 / 7))
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * series))))
    return tl.where(u < SMALL, series, -tl.log(left))


@triton.jit
def tokens_of(counter, PART: tl.constexpr):
    """Return the token ids whose noise is output PART (0 to 3) of each counter."""
    return (counter // LANES) * GROUP + PART * LANES + counter % LANES
