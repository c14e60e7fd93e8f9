"""Rows of a target and of a draft at a distance from it that is met exactly."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory import _arguments as check
from cactus_theory.optimum.roots import halved

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
    """What a synthetic pair is like.

    Attributes
    ----------
    vocab : V ≥ 2 tokens.
    zipf : the target's row is rank^−zipf, the ranks in an order drawn anew for each row; 0 is
        uniform.
    distance : of the draft's row from the target's, met exactly by the strength of a random tilt
        p ∝ q e^{tξ}, ξ standard normal and largest at the target's rarest token.
    measure : of the distance: ``total_variation``, which is what lossless sampling rejects, or
        ``kl``, KL(p‖q) in nats on the tokens that the target does not exclude.
    over_propose : the draft's mass on a tenth of the tokens, which the target then excludes, in
        [0, 1); part of the total variation.

    Raises
    ------
    ValueError
        A dial outside its range.
    """

    vocab: int = 1000
    zipf: float = 1.0
    distance: float = 0.3
    measure: str = "total_variation"
    over_propose: float = 0.0

    def __post_init__(self) -> None:
        if self.vocab < 2:
            raise ValueError(f"vocab: must be at least 2; got {self.vocab!r}")
        check.number("zipf", self.zipf, 0.0)
        check.one_of("measure", self.measure, MEASURES)
        if not 0 <= self.over_propose < 1:
            raise ValueError(f"over_propose: must lie in [0, 1); got {self.over_propose!r}")
        check.number("distance", self.distance, *self.reach)

    @property
    def reach(self) -> tuple[float, float]:
        """Return the least and the largest distance that can be asked for."""
        if self.measure == "total_variation":
            return self.over_propose, 1.0
        return 0.0, float("inf")


def synthetic_rows(
    dials: Dials, distances: PerRow, generator: torch.Generator
) -> tuple[Rows, Rows]:
    """Return rows q and p (N, V) float64, each pair at its own distance (N,), by the dials.

    Raises
    ------
    ValueError
        A distance that no tilt reaches in this vocabulary.
    """
    size = max(1, ENTRIES // dials.vocab)
    parts = [_some(dials, part, generator) for part in distances.double().split(size)]
    target, draft = zip(*parts, strict=True)
    return torch.cat(target), torch.cat(draft)


def _some(dials: Dials, distances: PerRow, generator: torch.Generator) -> tuple[Rows, Rows]:
    shape = len(distances), dials.vocab
    order = torch.rand(shape, generator=generator, dtype=torch.float64).argsort(-1)
    log_q = -dials.zipf * (order + 1.0).double().log()
    tilt = torch.randn(shape, generator=generator, dtype=torch.float64)
    excluded = torch.zeros(shape, dtype=torch.bool)
    if dials.over_propose:
        chosen = torch.rand(shape, generator=generator, dtype=torch.float64).argsort(-1)
        excluded = chosen < min(max(1, round(EXCLUDED * dials.vocab)), dials.vocab - 1)
        log_q = log_q.masked_fill(excluded, -torch.inf)
    log_q = log_q.log_softmax(-1)
    q = log_q.exp()
    rarest = torch.where(excluded, torch.inf, q).argmin(-1, keepdim=True)
    tilt = _largest_at(tilt.masked_fill(excluded, -torch.inf), rarest).masked_fill(excluded, 0.0)
    strength = _strength(dials, q, log_q, tilt, distances)
    p = _drafts(dials, log_q, tilt, strength, excluded)
    return q, p


def _largest_at(tilt: Rows, place: Tensor) -> Rows:
    """Return the tilts with the largest of each row moved to ``place`` (N, 1) by a swap.

    The strongest tilt puts all mass there, so that this decides what distances are in reach.
    """
    top = tilt.argmax(-1, keepdim=True)
    largest, other = tilt.gather(-1, top), tilt.gather(-1, place)
    return tilt.scatter(-1, top, other).scatter(-1, place, largest)


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
    short = distance(high) < distances
    if bool(short.any()):
        row = int(short.nonzero()[0])
        most = float(distance(high)[row])
        raise ValueError(
            f"distance: must be below about {most:.4g}, what the draft reaches in this vocabulary "
            f"with all mass on one token; got {float(distances[row]):.4g}"
        )
    return halved(torch.zeros_like(high), high, lambda t: distance(t) < distances, HALVINGS)[1]
