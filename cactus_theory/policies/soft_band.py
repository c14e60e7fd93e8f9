"""The best row at a node of a drafted path, for the verifier of whole blocks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory import _arguments as check
from cactus_theory.divergences import FDivergence
from cactus_theory.divergences import divergence as find_divergence
from cactus_theory.optimum.soft import Worth, soft_rows
from cactus_theory.optimum.soft_row import Pieces, SoftRow, sure_of
from cactus_theory.policies._base import FixedTarget, Rows
from cactus_theory.policies._declaration import Declaration
from cactus_theory.policies._path import Node, Path
from cactus_theory.policies._registry import register
from cactus_theory.policies._values import NO_VALUES, read_values

# float64 entries of rows that are solved together
TOGETHER = 2**18


@register("soft_band")
@dataclass(frozen=True)
class SoftBand(FixedTarget):
    r"""Verify a block against the best row at each node, given how the node was reached.

    :math:`h = \max\{aq, \max_j \min(u_j q, r_j p/P)\}` for the alive ratio P, see
    :mod:`cactus_theory.optimum.soft`: to accept a token is worth one token and what may follow
    it. ``price`` is in tokens per unit of divergence. ``values`` is a file that
    ``python -m simulations values`` learns from a trace; without it a token is worth 1 and h is
    the band of p/P at a constant price. Needs ``verifier="block"``. On a single row the policy
    is what it is at the first token of a block (P = 1) with ``depth`` drafted tokens after it.
    """

    price: float
    values: str | None = None
    divergence: str = "kl"
    depth: int = 0
    knob = "price"
    needs_path = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "price", check.number("price", self.price, 0))
        if self.price == 0:
            raise ValueError("price: must be above 0; got 0")
        if self.depth < 0:
            raise ValueError(f"depth: must be at least 0; got {self.depth}")
        kind = find_divergence(self.divergence)
        if not (kind.priced and isinstance(kind, FDivergence) and kind.smooth):
            raise ValueError(
                f"divergence: must be an f-divergence with a smooth generator; got {kind.spec}"
            )
        object.__setattr__(self, "divergence", kind.spec)
        if self.values is not None and read_values(self.values).divergence != kind.spec:
            raise ValueError(
                f"values: must be learned for {kind.spec}; {self.values!r} is for "
                f"{read_values(self.values).divergence}"
            )

    @property
    def declares(self) -> Declaration:
        """Return: lossless at an infinite price; without a file also between q and p."""
        plain = self.values is None
        return Declaration(-1, math.inf, None, between=plain, at_least_speculative=plain)

    @cached_property
    def worths(self) -> tuple[Worth, ...]:
        """Return φ for 0, 1, … drafted tokens that follow; the last one stands for more."""
        if self.values is None or self.price == math.inf:
            return NO_VALUES
        return read_values(self.values).worths(self.price)

    @cached_property
    def kind(self) -> FDivergence:
        """Return the divergence."""
        kind = find_divergence(self.divergence)
        assert isinstance(kind, FDivergence)
        return kind

    @cached_property
    def pieces(self) -> list[Pieces]:
        """Return what rows with 0, 1, … drafted tokens to follow have in common."""
        return [Pieces(worth, self.kind, self.price) for worth in self.worths]

    def worth(self, left: Sequence[int]) -> list[Worth]:
        """Return φ for each number of drafted tokens that follow."""
        last = len(self.worths) - 1
        return [self.worths[min(own, last)] for own in left]

    def target(self, q: Rows, p: Rows) -> Rows:
        """Return h at the first token of a block with ``depth`` drafted tokens after it."""
        alive = torch.ones(q.shape[:-1], dtype=torch.float64, device=q.device)
        return self.target_in_block(q, p, Path(alive, torch.full_like(alive, self.depth).long()))

    def target_in_block(self, q: Rows, p: Rows, path: Path) -> Rows:
        """Return h at each node, float64."""
        if self.price == math.inf:
            return q.double()
        flat = [row.reshape(-1, q.shape[-1]) for row in (q, p)]
        alive, left = path.alive.reshape(-1), path.left.reshape(-1)
        size = max(1, TOGETHER // q.shape[-1])
        chunks = zip(*(part.split(size) for part in (*flat, alive, left)), strict=True)
        rows = [
            soft_rows(q_rows, p_rows, own, self.worth(after.tolist()), self.kind, self.price)
            for q_rows, p_rows, own, after in chunks
        ]
        return torch.cat(rows).reshape(q.shape) if rows else q.double()

    def reach(
        self, q_n: Float[Tensor, "*any"], p_n: Float[Tensor, "*any"]
    ) -> tuple[Float[Tensor, "*any"], Float[Tensor, "*any"]]:
        """Return bounds on h_n/p_n; a ratio of at least 1 may be taken for more."""
        ratio = (q_n / p_n).nan_to_num(nan=0.0)
        if self.price == math.inf:
            return ratio, ratio
        least, most = self.bounds
        return least * ratio, torch.where(q_n > 0, most * ratio, 0.0)

    @cached_property
    def bounds(self) -> tuple[float, float]:
        """Return bounds on h_n/q_n of tokens with r < 1."""
        return sure_of(self.pieces)

    @property
    def follows_rows(self) -> bool:
        """Return that it does."""
        return True

    def follow_row(self, node: Node) -> tuple[float, float]:
        """Return P h_n/p_n and P a, in the precision of the rows."""
        if self.price == math.inf:
            return node.alive * node.q_n / node.p_n, node.alive
        row = SoftRow(node.q, node.p, node.alive, self.pieces[min(node.left, len(self.pieces) - 1)])
        asked = node.asked
        if row.passes(asked if node.alive == 1 else math.inf):
            return 1.0, node.alive
        return row.ratio_of(asked), row.scale
