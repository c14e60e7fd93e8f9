r"""The counter-based random numbers of kernels (Philox), and the same numbers in torch.

Philox 4x32-10 (Salmon et al. 2011) maps a key and four 32-bit counters to four 32-bit numbers,
without a state. The key is the seed of a request. The counters are

* 0;
* the position in the request's text at which the round starts (its low 32 bits);
* the place in the draft: 0 for the first drafted token, and for the one coin of the token after
  those accepted;
* the stream: acceptance, or the token after the accepted ones.

So a request gets the same coins in every batch and layout, and none is used twice: the starts of a
request's rounds differ. The start is a counter of its own, not start + place, since a round that is
refused early has already looked at coins of places that the next round reaches again; block
verification, which reads the whole draft, would not be exact.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

ACCEPT, DRAW = STREAMS = 0, 2
_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(key: Tensor, counters: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return four int64 tensors of 32-bit numbers; key and counters are int64 and broadcast."""
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
    """Return float64 in [0, 1), one a place, with 53 random bits."""
    counters = (
        torch.zeros_like(places),
        positions[:, None].expand_as(places),
        places,
        torch.full_like(places, stream),
    )
    high, low, _, _ = philox(seeds[:, None], counters)
    return (high * 2**21 + (low >> 11)).double() * 2.0**-53
