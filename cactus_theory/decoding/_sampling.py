"""The uniform numbers that choose among tokens: one stream per row."""

from collections.abc import Callable, Sequence
from typing import TypeGuard

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory import _arguments as check

Uniforms = Callable[[int], "np.ndarray | Tensor"]
Generators = torch.Generator | Sequence[torch.Generator] | None


class Coins:
    """Uniform float64 numbers of [0, 1), each row's from a stream of its own.

    A row takes one number for every token it may draft, the verifier's coins for them, and one
    for the token that follows, however many the other rows take. So it behaves as if alone.
    """

    def __init__(
        self,
        batch: int,
        seed: int | Sequence[int] | None,
        generator: Generators,
        device: torch.device,
    ) -> None:
        self.device = device
        self.streams = _streams(batch, seed, generator)

    def seeds(self) -> Int[Tensor, "batch"]:
        """Return a whole number below 2^53 for each row, the next one of its stream."""
        own = [int(float(stream(1)[0]) * 2**53) for stream in self.streams]
        return torch.tensor(own, device=self.device)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        self.streams = [self.streams[row] for row in rows]

    def toss(
        self, wanted: Sequence[int], coins: Callable[[int], int] = int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (draft (B, K), accept (B, C), draw (B,)) for rows drafting up to ``wanted``.

        ``coins`` returns how many acceptance coins a number of drafted tokens takes.
        """
        width, both = max(wanted), max(own + coins(own) for own in wanted)
        if len(wanted) == 1:
            drawn = self.streams[0](both + 1)
            row = torch.as_tensor(drawn).to(self.device)[None]
            return row[:, :width], row[:, width:both], row[:, -1]
        table = np.zeros((len(wanted), both + 1))
        self.fill(table, width, wanted, coins)
        rows = torch.from_numpy(table).to(self.device)
        return rows[:, :width], rows[:, width:both], rows[:, -1]

    def fill(
        self,
        table: np.ndarray,
        width: int,
        wanted: Sequence[int],
        coins: Callable[[int], int] = int,
    ) -> None:
        """Write coins into a table (B, width + C + 1); a row that wants −1 takes none."""
        for row, (stream, own) in enumerate(zip(self.streams, wanted, strict=True)):
            if own < 0:
                continue
            numbers = np.asarray(stream(own + coins(own) + 1))
            table[row, :own], table[row, -1] = numbers[:own], numbers[-1]
            table[row, width : width + coins(own)] = numbers[own:-1]


def _streams(batch: int, seed: int | Sequence[int] | None, generator: Generators) -> list[Uniforms]:
    """Return one source a row: generators if there are any, else NumPy streams from seeds.

    The global state of either library is neither read nor changed.
    """
    if seed is not None and generator is not None:
        raise ValueError(f"seed, generator: at most one may be given; got {seed!r} and a generator")
    seed = 0 if seed is None else seed
    if generator is not None:
        sources = [generator] if isinstance(generator, torch.Generator) else list(generator)
        if len(sources) != batch:
            raise ValueError(
                f"generator: must be one per row of input_ids ({batch}); got {len(sources)}"
            )
        return [_from_generator(source) for source in sources]
    if isinstance(seed, Sequence) and not isinstance(seed, str):
        seeds = list(seed)
    elif _whole(seed):
        seeds = [seed + row for row in range(batch)]
    else:
        raise ValueError(f"seed: must be an integer of at least 0; got {seed!r}")
    if len(seeds) != batch:
        raise ValueError(f"seed: must be one per row of input_ids ({batch}); got {len(seeds)}")
    for own in seeds:
        if not _whole(own) or own < 0:
            raise ValueError(f"seed: must be an integer of at least 0; got {own!r}")
    return [np.random.default_rng(own).random for own in seeds]


def _whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _from_generator(source: torch.Generator) -> Uniforms:
    def draw(count: int) -> Float[Tensor, "count"]:
        drawn = torch.rand(count, generator=source, dtype=torch.float64, device=source.device)
        return drawn.cpu()

    return draw


def checked_temperature(temperature: float) -> float:
    """Return ``temperature`` if it is finite and not negative."""
    value = check.number("temperature", temperature, 0)
    if value == float("inf"):
        raise ValueError(f"temperature: must be finite; got {temperature!r}")
    return value
