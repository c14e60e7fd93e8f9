"""From logits to probabilities, and the uniform numbers that choose among them."""

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory import _arguments as check

Uniforms = Callable[[int], Tensor]


def probabilities(
    logits: Float[Tensor, "*batch vocab"], temperature: float
) -> Float[Tensor, "*batch vocab"]:
    """Return softmax(logits / temperature) as float64 rows; temperature 0 gives one-hot rows.

    Float64 throughout, because the acceptance rules compare ratios of small probabilities.
    At temperature 0 a row is exactly 1 at the largest logit, the first one on ties.
    """
    if temperature == 0:
        best = logits.argmax(-1, keepdim=True)
        return torch.zeros_like(logits, dtype=torch.float64).scatter_(-1, best, 1.0)
    scaled = logits.double()
    return (scaled if temperature == 1 else scaled / temperature).softmax(-1)


def uniforms(seed: int, generator: torch.Generator | None, device: torch.device) -> Uniforms:
    """Return a function that gives the next ``count`` float64 numbers of [0, 1).

    They come from ``generator`` if there is one, else from a NumPy stream that ``seed``
    starts; the global state of either library is neither read nor changed.
    """
    if generator is not None:
        source = generator

        def from_generator(count: int) -> Tensor:
            drawn = torch.rand(count, generator=source, dtype=torch.float64, device=source.device)
            return drawn.to(device)

        return from_generator
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed: must be an integer of at least 0; got {seed!r}")
    stream = np.random.default_rng(seed)
    return lambda count: torch.from_numpy(stream.random(count)).to(device)


def checked_temperature(temperature: float) -> float:
    """Return ``temperature`` if it is finite and not negative."""
    value = check.number("temperature", temperature, 0)
    if value == float("inf"):
        raise ValueError(f"temperature: must be finite; got {temperature!r}")
    return value
