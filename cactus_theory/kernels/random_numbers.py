r"""The counter-based random numbers of kernels (Philox), and the same numbers in torch.

Philox 4x32-10 (Salmon et al. 2011) maps a key and four 32-bit counters to four 32-bit numbers,
without a state. The key is the seed of a request. The counters are

* the group of numbers drawn at once: 0 for a coin; for a row's noise c with
  token = 512 ⌊c/128⌋ + 128 k + c mod 128 and k the number of the output;
* the position in the request's text at which the round starts (its low 32 bits);
* the place in the draft: 0 for the first drafted token, K for the bonus token;
* the stream: acceptance coins, noise of recovered tokens, of bonus tokens, of drafted tokens,
  coins of the torch path.

So a request gets the same numbers in every batch and layout, and no number is used twice: the
starts of a request's rounds differ. The start is a counter of its own, not start + place, since
a round that is refused early has already looked at numbers of places that the next round
reaches again; block verification, which reads the whole draft, would not be exact.

Noise has 32 bits, so its least value is about GRID = 2^-33 and a token of probability q comes
first with probability q x/sinh x, x = GRID/q: a millionth less often at q = 5e-8, a fifth at
1e-10, and next to never below 1e-11. Over a row that is at most 2.75e-11 V of the mass, which
goes to the other tokens: 4.2e-6 at V = 151,936, 1.5e-5 at half a million.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

ACCEPT, RECOVERED, BONUS, DRAFT, DRAW = STREAMS = range(5)
LANES = 128
GRID = 2.0**-33
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


def noise(
    seeds: Int[Tensor, "batch"],
    positions: Int[Tensor, "batch"],
    places: Int[Tensor, "batch"],
    stream: Int[Tensor, "batch"] | int,
    vocab: int,
) -> Float[Tensor, "batch vocab"]:
    """Return exponential noise of mean 1, float64: −ln(1 − u) with u = (bits + 1/2) 2^-32."""
    token = torch.arange(vocab, device=seeds.device)
    group = token // (4 * LANES) * LANES + token % LANES
    zero = torch.zeros(len(seeds), vocab, dtype=torch.int64, device=seeds.device)
    streams = zero + (stream if isinstance(stream, int) else stream[:, None])
    counters = (zero + group, zero + positions[:, None], zero + places[:, None], streams)
    outputs = torch.stack(philox(seeds[:, None], counters), -1)
    bits = outputs.gather(-1, (zero + token // LANES % 4)[..., None])[..., 0]
    return -torch.log1p(-(bits.double() + 0.5) * 2.0**-32)
