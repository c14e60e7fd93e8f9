"""Texts of a synthetic pair as a trace, so that every tool for traces evaluates them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from cactus_theory.traces import Cycle, Trace, save_trace

from .rows import Dials, PerRow, synthetic_rows

# levels of the distance that are drawn stay this far from total rejection
MOST_VARIATION = 0.95


@dataclass(frozen=True)
class Texts:
    """How many rounds there are, and how the distance changes along a text.

    Attributes
    ----------
    texts, cycles : rounds of ``num_draft_tokens`` drafted tokens, per text.
    spread : standard deviation of the logarithm of the distance; its mean is the dial's.
    persistence : correlation of that logarithm from one position to the next, in [0, 1).
    seed : of the one generator that draws everything.

    Raises
    ------
    ValueError
        Numbers outside their range.
    """

    texts: int = 32
    cycles: int = 16
    num_draft_tokens: int = 8
    spread: float = 0.0
    persistence: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("texts", "cycles", "num_draft_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1; got {getattr(self, name)!r}")
        if not 0 <= self.spread < math.inf:
            raise ValueError(f"spread: must be at least 0 and finite; got {self.spread!r}")
        if not 0 <= self.persistence < 1:
            raise ValueError(f"persistence: must lie in [0, 1); got {self.persistence!r}")


def synthetic_trace(folder: str | Path, dials: Dials, texts: Texts) -> Trace:
    """Write a trace of synthetic texts to a new folder and return it.

    Rows do not depend on the tokens that were drafted before them.

    Raises
    ------
    ValueError
        A folder that is not empty, a distance that cannot be reached.
    ModuleNotFoundError
        safetensors is not installed (extra llm).
    """
    generator = torch.Generator().manual_seed(texts.seed)
    return save_trace(
        folder,
        (list(_cycles(text, dials, texts, generator)) for text in range(texts.texts)),
        vocab_size=dials.vocab,
        num_draft_tokens=texts.num_draft_tokens,
        dtype="float32",
        target=f"synthetic zipf {dials.zipf:g}",
        draft=f"synthetic {dials.measure} {dials.distance:g}",
    )


def levels(dials: Dials, texts: Texts, count: int, generator: torch.Generator) -> PerRow:
    """Return the distance at each of ``count`` positions: d·e^{sz − s²/2}, z autoregressive."""
    noise = torch.randn(count, generator=generator, dtype=torch.float64)
    fresh = math.sqrt(1 - texts.persistence**2)
    walk = [float(noise[0])]
    for step in noise[1:].tolist():
        walk.append(texts.persistence * walk[-1] + fresh * step)
    z = torch.tensor(walk, dtype=torch.float64)
    found = dials.distance * (texts.spread * z - texts.spread**2 / 2).exp()
    if not texts.spread:
        return found
    least, most = dials.reach
    return found.clamp(least, min(most, max(MOST_VARIATION, dials.distance)) if most <= 1 else most)


def _cycles(text: int, dials: Dials, texts: Texts, generator: torch.Generator) -> Iterator[Cycle]:
    rows = texts.num_draft_tokens + 1
    distances = levels(dials, texts, texts.cycles * rows, generator)
    q, p = synthetic_rows(dials, distances, generator)
    ids = torch.multinomial(p, 1, generator=generator)[:, 0]
    for number in range(texts.cycles):
        at = slice(number * rows, (number + 1) * rows)
        yield Cycle(text, number, ids[at][:-1], q[at], p[at][:-1])
