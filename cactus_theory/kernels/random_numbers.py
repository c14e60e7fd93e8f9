r"""The counter-based random numbers of the kernels (Philox), computed in PyTorch.

Philox 4x32-10 (Salmon et al. 2011) maps a key and four 32-bit counters to four 32-bit numbers,
without a state. The key is the seed of a request. The counters are

* 0;
* the position in the request's text at which the round starts (the low 32 bits);
* the place in the draft: 0 for the first drafted token, and 0 for the coin of the recovered or
  bonus token;
* the stream: acceptance, or the draw of the recovered or bonus token.

So a request gets the same coins in every batch and layout. No coin is used twice, as the rounds of
a request start at different positions. The start and the place are separate counters. With their
sum as one counter, the round after an early rejection would get coins again that the rejected draft
has used; block verification, which uses the coins of the whole draft, would not be exact.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

ACCEPT, DRAW = STREAMS = 0, 2
_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(key: Tensor, counters: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return the four 32-bit numbers of Philox 4x32-10, as int64; int64 arguments broadcast."""
    first, second = key & _LOW, (key >> 32) & _LOW
    a, b, c, d = (part & _LOW for part in counters)
    for _ in range(10):
        left, right = _MULTIPLIERS[0] * a, _MULTIPLIERS[1] * c  # modulo 2^64
        a, b = ((right >> 32) & _LOW) ^ b ^ first, right & _LOW
        c, d = ((left >> 32) & _LOW) ^ d ^ second, left & _LOW
        first, second = (first + _WEYL[0]) & _LOW, (second + _WEYL[1]) & _LOW
    return a, b, c, d


def coins(
    seeds: Int[Tensor, "batch"],
    positions: Int[Tensor, "batch"],
    places: Int[Tensor, "batch m"],
    stream: int,
) -> Float[Tensor, "batch m"]:
    """Return a coin, float64 in [0, 1) with 53 random bits, for each place."""
    counters = (
        torch.zeros_like(places),
        positions[:, None].expand_as(places),
        places,
        torch.full_like(places, stream),
    )
    high, low, _, _ = philox(seeds[:, None], counters)
    return (high * 2**21 + (low >> 11)).double() * 2.0**-53
