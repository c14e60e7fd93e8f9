"""A verifier asked what it does with chosen coins, on some of the paths that can be drafted."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.testing._property import LAST_COIN
from cactus_theory.testing.verifiers._enumeration import Enumeration
from cactus_theory.verify import Draft, Verdict

# paths of a tree that coins are tossed for: of the likeliest, of any, and with impossible tokens
EACH = 2


class Asked:
    """N paths with their rows, and what the verifier does on them with chosen coins.

    Attributes
    ----------
    tree, path : (N,) which they are. ``ids`` : (N, K). ``weight`` : (N,) how likely they are.
    q, p : (N, K + 1, V) and (N, K, V). ``stop``, ``last``, ``alive`` : what the law states.
    aims : (N, K + 1, V) h, and the target's row at the end.
    """

    def __init__(self, seen: Enumeration, tree: Tensor, path: Tensor) -> None:
        self.seen, self.tree, self.path = seen, tree, path
        self.ids, self.weight = seen.trees.paths[path], seen.weight[tree, path]
        self.q, self.p = seen.q[tree, path], seen.p[tree, path]
        self.stop, self.last = (part[tree, path] for part in (seen.law.stop, seen.law.last))
        self.alive, self.aims = seen.law.alive[tree, path], seen.aims[tree, path]
        self.turns = None if seen.law.turns is None else seen.law.turns[tree, path]

    @property
    def coins(self) -> int:
        """Return how many acceptance coins a path takes."""
        return self.seen.verifier.coins(self.seen.trees.depth)

    @property
    def length(self) -> int:
        """Return K."""
        return self.ids.shape[1]

    def some(self, chosen: Tensor) -> "Asked":
        """Return a part of the paths."""
        return Asked(self.seen, self.tree[chosen], self.path[chosen])

    def verify(
        self,
        accept: Float[Tensor, "N trials coins"],
        draw: Float[Tensor, "N trials"],
        dtype: torch.dtype = torch.float64,
    ) -> Verdict:
        """Return the verdict on N × trials rows, each path's one after another."""
        each = torch.arange(len(self.ids)).repeat_interleave(accept.shape[1])
        ids = self.ids[each]
        draft = Draft(ids, [self.length] * len(ids), self.p[each].to(dtype))
        return self.seen.verifier.verify(
            self.seen.assigned, self.q[each].to(dtype), draft, accept.flatten(0, 1), draw.flatten()
        )

    @cached_property
    def thresholds(self) -> Float[Tensor, "N K two"]:
        """Return the coins at which a decision may turn, by the stated law.

        If the first coin that does not pass ends the path, coin i turns at
        Pr(τ ≥ i)/Pr(τ ≥ i − 1); if the last one that passes does, at Pr(τ = i)/Pr(τ ≤ i).
        Else the law says so: ``turns``.
        """
        if self.turns is not None:
            return torch.stack([self.turns, self.turns], -1)
        tail = self.stop.flip(-1).cumsum(-1).flip(-1)
        head = self.stop.cumsum(-1)
        pairs = torch.stack([tail[:, 1:] / tail[:, :-1], self.stop[:, 1:] / head[:, 1:]], -1)
        return pairs.nan_to_num(nan=0.0).clamp(0.0, 1.0)

    def name(self, index: int) -> str:
        """Return a path as text."""
        return tokens(self.ids[index])


def tokens(ids: Int[Tensor, "K"]) -> str:
    """Return token ids as text."""
    return " ".join(map(str, ids.tolist())) or "(none)"


def some_paths(seen: Enumeration) -> Asked:
    """Return a few paths of every tree that can be drafted, seeded."""
    source = torch.Generator().manual_seed(seen.seed)
    weight = seen.weight
    impossible = (seen.aims[:, :, :-1].gather(-1, _drafted(seen)) == 0).any(2)[..., 0]
    lots = torch.rand(weight.shape, generator=source, dtype=torch.float64)
    chosen = torch.zeros(weight.shape, dtype=torch.bool)
    for rank in (weight, lots, lots * impossible):
        best = torch.where(weight > 0, rank, 0.0).topk(min(EACH, weight.shape[1]), -1)
        chosen |= torch.zeros_like(chosen).scatter(-1, best.indices, best.values > 0)
    tree, path = chosen.nonzero(as_tuple=True)
    return Asked(seen, tree, path)


def _drafted(seen: Enumeration) -> Tensor:
    """Return the drafted token of every row, (T, V^K, K, 1)."""
    return seen.trees.paths[..., None].expand(*seen.p.shape[:3], 1)


@dataclass(frozen=True)
class Cells:
    """Coins that stand for all others: (N, patterns, coins) and the mass (N, patterns) of each."""

    accept: Tensor
    mass: Tensor


def cells(edges: Float[Tensor, "N coins edges"], inside: float) -> Cells:
    """Return coins just inside both ends of each interval between edges, all combined.

    A decision that turns anywhere but at an edge weighs as much as half the interval. Intervals
    too thin to have an inside, between two roundings of one edge for example, have no mass.
    """
    ends = torch.zeros_like(edges[..., :1])
    cuts = torch.cat([ends, edges, ends + 1], -1).sort(-1).values
    low, high = cuts[..., :-1], cuts[..., 1:]
    step = torch.minimum((high - low) / 2, torch.tensor(inside))
    points = torch.cat([low + step, high - step], -1).clamp(0.0, LAST_COIN)
    width = high - low
    mass = torch.where(width > 4 * inside, width / 2, 0.0).repeat(1, 1, 2)
    every = combinations(points.shape[-1], points.shape[1])
    return Cells(combined(points, every), combined(mass, every).prod(-1))


def combinations(values: int, places: int) -> Int[Tensor, "all places"]:
    """Return every way to choose one of so many values at each place."""
    return torch.cartesian_prod(*[torch.arange(values)] * places).reshape(-1, places)


def combined(
    points: Float[Tensor, "N places values"], every: Int[Tensor, "all places"]
) -> Float[Tensor, "N all places"]:
    """Return the chosen value at each place."""
    return points[:, torch.arange(points.shape[1]), every]


def named(asked: Asked, tell: Callable[[tuple[int, ...]], str]) -> Callable[..., str]:
    """Return a text about an entry of N paths: the drafted tokens, then what ``tell`` says."""

    def about(index: tuple[int, ...]) -> str:
        return f"draft {asked.name(index[0])}: {tell(index)}"

    return about
