"""The uniform numbers that choose among tokens: one stream per row."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.base import arguments as check

Uniforms = Callable[[int], "np.ndarray | Tensor"]
Generators = torch.Generator | Sequence[torch.Generator] | None
# a seed for the first row (row b adds b), or the seeds or generators of all rows
Sources = int | Sequence[int] | Sequence[torch.Generator]


class Coins:
    """Uniform float64 numbers of [0, 1), each row's from a stream of its own.

    A row takes one number for every token it may draft, the verifier's coins for them, and one
    for the token that follows, however many the other rows take. So it behaves as if alone.
    """

    def __init__(self, batch: int, sources: Sources, device: torch.device) -> None:
        self.device = device
        self.streams = _streams(batch, sources)

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

    def further(
        self, draw: Float[Tensor, "batch"], wanted: Sequence[int], draws: Callable[[int], int]
    ) -> Float[Tensor, "batch *draws"]:
        """Return the draws with as many more columns as a verifier takes, tossed after them."""
        counts = [draws(own) - 1 for own in wanted]
        if not any(counts):
            return draw
        table = np.zeros((len(counts), max(counts)))
        for row, (stream, count) in enumerate(zip(self.streams, counts, strict=True)):
            table[row, :count] = np.asarray(stream(count))
        return torch.cat([draw[:, None], torch.from_numpy(table).to(self.device)], 1)

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


def checked_sources(seed: int | Sequence[int] | None, generator: Generators) -> Sources:
    """Return where random numbers come from: a first seed, or seeds or generators of all rows."""
    if seed is not None and generator is not None:
        raise ValueError(f"seed, generator: at most one may be given; got {seed!r} and a generator")
    if generator is not None:
        return [generator] if isinstance(generator, torch.Generator) else list(generator)
    if isinstance(seed, Sequence) and not isinstance(seed, str):
        return [check.whole_number("seed", row_seed, 0) for row_seed in seed]
    return 0 if seed is None else check.whole_number("seed", seed, 0)


def _streams(batch: int, sources: Sources) -> list[Uniforms]:
    """Return one stream a row: generators if there are any, else NumPy's from seeds.

    The global state of either library is neither read nor changed.
    """
    own = [sources + row for row in range(batch)] if isinstance(sources, int) else sources
    if len(own) != batch:
        name = "generator" if any(isinstance(one, torch.Generator) for one in own) else "seed"
        raise ValueError(f"{name}: must be one per row of input_ids ({batch}); got {len(own)}")
    return [
        np.random.default_rng(one).random if isinstance(one, int) else _from_generator(one)
        for one in own
    ]


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
