"""Synthetic pairs with dials: how far the draft is from the target, where, and for how long.

The distance of each pair of rows is met exactly; texts of such rows are a trace.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.optimum.roots import halved
from cactus_theory.traces import Cycle, Trace, save_trace

MEASURES = ("total_variation", "kl")
# share of the vocabulary that a target excludes where the draft over-proposes
EXCLUDED = 0.1
# the tilt is looked for up to here; the draft then puts all its mass on one token, nearly
LARGEST_TILT, DOUBLINGS = 2.0**12, 13
# of its bracket: what is left of it moves no distance by more than rounding
HALVINGS = 64
# rows drawn at once, in entries: 2^22 float64 are 32 MiB
ENTRIES = 2**22
Rows = Float[Tensor, "rows vocab"]
PerRow = Float[Tensor, "rows"]


@dataclass(frozen=True)
class Dials:
    """What a synthetic pair is like; a dial outside its range is a ValueError."""

    vocab: int = 1000
    # the target's row is rank^−zipf, the ranks in an order drawn anew for each row; 0 is uniform
    zipf: float = 1.0
    # of the draft's row from the target's, met exactly by the strength of a random tilt
    # p ∝ q e^{tξ}, ξ standard normal and largest at the target's rarest token
    distance: float = 0.3
    # of the distance: total variation, which is what lossless sampling rejects, or KL(p‖q) in nats
    # on the tokens that the target does not exclude
    measure: str = "total_variation"
    # the draft's mass on a tenth of the tokens, which the target then excludes, in [0, 1); part of
    # the total variation
    over_propose: float = 0.0

    def __post_init__(self) -> None:
        if self.vocab < 2:
            raise ValueError(f"vocab: must be at least 2; got {self.vocab!r}")
        check.number("zipf", self.zipf, 0.0)
        check.one_of("measure", self.measure, MEASURES)
        if not 0 <= self.over_propose < 1:
            raise ValueError(f"over_propose: must lie in [0, 1); got {self.over_propose!r}")
        check.number("distance", self.distance, *self.distance_range)

    @property
    def distance_range(self) -> tuple[float, float]:
        """Return the least and the largest distance that can be asked for."""
        if self.measure == "total_variation":
            return self.over_propose, 1.0
        return 0.0, float("inf")


def synthetic_rows(
    dials: Dials, distances: PerRow, generator: torch.Generator
) -> tuple[Rows, Rows]:
    """Return rows q and p (N, V) float64, each pair at its own distance (N,), by the dials.

    Raises ValueError for a distance that no tilt reaches in this vocabulary.
    """
    size = max(1, ENTRIES // dials.vocab)
    parts = [_chunk(dials, part, generator) for part in distances.double().split(size)]
    target, draft = zip(*parts, strict=True)
    return torch.cat(target), torch.cat(draft)


def _chunk(dials: Dials, distances: PerRow, generator: torch.Generator) -> tuple[Rows, Rows]:
    shape = len(distances), dials.vocab
    order = torch.rand(shape, generator=generator, dtype=torch.float64).argsort(-1)
    log_q = -dials.zipf * (order + 1.0).double().log()
    tilt = torch.randn(shape, generator=generator, dtype=torch.float64)
    excluded = torch.zeros(shape, dtype=torch.bool)
    if dials.over_propose:
        ranks = torch.rand(shape, generator=generator, dtype=torch.float64).argsort(-1)
        excluded = ranks < min(max(1, round(EXCLUDED * dials.vocab)), dials.vocab - 1)
        log_q = log_q.masked_fill(excluded, -torch.inf)
    log_q = log_q.log_softmax(-1)
    q = log_q.exp()
    rarest = torch.where(excluded, torch.inf, q).argmin(-1, keepdim=True)
    tilt = _largest_at(tilt.masked_fill(excluded, -torch.inf), rarest).masked_fill(excluded, 0.0)
    strength = _strength(dials, q, log_q, tilt, distances)
    p = _drafts(dials, log_q, tilt, strength, excluded)
    return q, p


def _largest_at(tilt: Rows, token: Tensor) -> Rows:
    """Return the tilts with the largest of each row moved to ``token`` (N, 1) by a swap.

    The strongest tilt puts all mass there, so that this decides what distances are in reach.
    """
    top = tilt.argmax(-1, keepdim=True)
    largest, other = tilt.gather(-1, top), tilt.gather(-1, token)
    return tilt.scatter(-1, top, other).scatter(-1, token, largest)


def _drafts(dials: Dials, log_q: Rows, tilt: Rows, strength: PerRow, excluded: Tensor) -> Rows:
    """Return p ∝ q e^{tξ}, and its mass on excluded tokens evenly over them."""
    inside = (1 - dials.over_propose) * (log_q + strength[:, None] * tilt).softmax(-1)
    spread = dials.over_propose / excluded.double().sum(-1, keepdim=True).clamp(min=1)
    return torch.where(excluded, spread, inside)


def _strength(dials: Dials, q: Rows, log_q: Rows, tilt: Rows, distances: PerRow) -> PerRow:
    """Return t of each row; every distance rises with t, as p has monotone ratios in ξ."""

    def distance(strength: Tensor) -> Tensor:
        log_p = (log_q + strength[:, None] * tilt).log_softmax(-1)
        p = log_p.exp()
        if dials.measure == "kl":
            return torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)
        return 1 - torch.minimum(q, (1 - dials.over_propose) * p).sum(-1)

    high = torch.full_like(distances, LARGEST_TILT * 2.0**-DOUBLINGS)
    for _ in range(DOUBLINGS):
        high = torch.where(distance(high) < distances, 2 * high, high)
    unreached = distance(high) < distances
    if bool(unreached.any()):
        row = int(unreached.nonzero()[0])
        limit = float(distance(high)[row])
        raise ValueError(
            f"distance: must be below about {limit:.4g}, what the draft reaches in this vocabulary "
            f"with all mass on one token; got {float(distances[row]):.4g}"
        )
    return halved(torch.zeros_like(high), high, lambda t: distance(t) < distances, HALVINGS)[1]


# levels of the distance that are drawn stay this far from total rejection
MOST_VARIATION = 0.95


@dataclass(frozen=True)
class Texts:
    """How many rounds there are, and how the distance changes along a text."""

    texts: int = 32
    cycles: int = 16  # rounds of a text
    num_draft_tokens: int = 8
    spread: float = 0.0  # standard deviation of the distance's logarithm; its mean is the dial's
    persistence: float = 0.0  # correlation of that from one position to the next, in [0, 1)
    seed: int = 0  # of the one generator that draws everything

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

    Rows do not depend on the tokens that were drafted before them. Raises ValueError for a folder
    that is not empty and a distance that cannot be reached.
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
    innovation = math.sqrt(1 - texts.persistence**2)
    walk = [float(noise[0])]
    for step in noise[1:].tolist():
        walk.append(texts.persistence * walk[-1] + innovation * step)
    z = torch.tensor(walk, dtype=torch.float64)
    level = dials.distance * (texts.spread * z - texts.spread**2 / 2).exp()
    if not texts.spread:
        return level
    least, most = dials.distance_range
    return level.clamp(least, min(most, max(MOST_VARIATION, dials.distance)) if most <= 1 else most)


def _cycles(text: int, dials: Dials, texts: Texts, generator: torch.Generator) -> Iterator[Cycle]:
    rows = texts.num_draft_tokens + 1
    distances = levels(dials, texts, texts.cycles * rows, generator)
    q, p = synthetic_rows(dials, distances, generator)
    ids = torch.multinomial(p, 1, generator=generator)[:, 0]
    for number in range(texts.cycles):
        at = slice(number * rows, (number + 1) * rows)
        yield Cycle(text, number, ids[at][:-1], q[at], p[at][:-1])
