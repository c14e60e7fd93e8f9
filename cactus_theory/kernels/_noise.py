"""Random numbers inside kernels: Philox, one stream a purpose."""

import triton
import triton.language as tl

from cactus_theory.kernels import _streams

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
