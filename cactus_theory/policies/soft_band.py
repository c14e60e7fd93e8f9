"""The best row at a node of a drafted path, for the verifier of whole blocks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.divergences import FDivergence
from cactus_theory.divergences.definition import registered_divergence as find_divergence
from cactus_theory.optimum.soft import PricedBand, soft_rows
from cactus_theory.optimum.soft_row import SoftRow
from cactus_theory.policies._base import Entries, Rows
from cactus_theory.policies._forms import FixedTarget
from cactus_theory.policies._records import Declaration, Node, Path
from cactus_theory.policies._registry import register

# float64 entries of rows that are solved together
TOGETHER = 2**18


@register("soft_band")
@dataclass(frozen=True)
class SoftBand(FixedTarget):
    r"""Verify a block against the best row at each node, given how the node was reached.

    :math:`h = \max\{aq, \min(uq, p/P)\}` for the alive ratio P, see
    :mod:`cactus_theory.optimum.soft`: to accept a token is worth 1, and h is the band of p/P at a
    constant price. ``price`` is in tokens per unit of divergence. A certain draft (greedy, n-gram)
    is known to its end, so that what follows a token is worth is known exactly: with ``ahead``
    its law under KL is the best of all laws of blocks, h(block) ∝ q(block) e^{N/ν} for N accepted
    tokens (THEORY.md, Theorem 14).

    Needs ``verifier="block"``. On a single row the policy is what it is at the first token of a
    block (P = 1).
    """

    price: float
    divergence: str = "kl"
    ahead: bool = True
    knob = "price"
    needs_path = True

    def __post_init__(self) -> None:
        price = check.number("price", self.price, 0, open_low=True)
        object.__setattr__(self, "price", price)
        kind = find_divergence(self.divergence)
        if not (kind.priced and isinstance(kind, FDivergence) and kind.smooth):
            raise ValueError(
                f"divergence: must be an f-divergence with a smooth generator; got {kind.spec}"
            )
        object.__setattr__(self, "divergence", kind.spec)

    @property
    def declares(self) -> Declaration:
        """Return: lossless at an infinite price, between q and p, never below speculative."""
        return Declaration(-1, math.inf, None, between=True, at_least_speculative=True)

    @cached_property
    def kind(self) -> FDivergence:
        """Return the divergence."""
        kind = find_divergence(self.divergence)
        assert isinstance(kind, FDivergence)
        return kind

    @cached_property
    def band(self) -> PricedBand:
        """Return what all rows have in common."""
        return PricedBand(self.kind, self.price)

    def target(self, q: Rows, p: Rows) -> Rows:
        """Return h at the first token of a block."""
        alive = torch.ones(q.shape[:-1], dtype=torch.float64, device=q.device)
        return self.target_in_block(q, p, Path(alive, torch.zeros_like(alive).long()))

    def target_in_block(self, q: Rows, p: Rows, path: Path) -> Rows:
        """Return h at each node, float64."""
        if self.price == math.inf or not q.numel():
            return q.double()
        if path.raised is not None:
            return _raised(q.double(), p.double(), path.raised[..., None])
        flat = [row.reshape(-1, q.shape[-1]) for row in (q, p)]
        alive = path.alive.reshape(-1)
        size = max(1, TOGETHER // q.shape[-1])
        chunks = zip(*(part.split(size) for part in (*flat, alive)), strict=True)
        rows = [soft_rows(q_rows, p_rows, ratios, self.band) for q_rows, p_rows, ratios in chunks]
        return torch.cat(rows).reshape(q.shape)

    def certain_path(
        self, q_n: Float[Tensor, "batch K"], counts: Int[Tensor, "batch"]
    ) -> Float[Tensor, "batch K"] | None:
        r"""Return :math:`h_n = q_n z/(1 − q_n + q_n z)`, z what follows the token.

        Backwards, z = e^{1/ν} after the last token and before a token e^{1/ν}(1 − q_n + q_n z),
        in logarithms.
        """
        if not self.ahead or self.divergence != "kl" or self.price == math.inf:
            return None
        q_n = q_n.clamp(max=1.0)  # a row may round to an ulp above
        odds = q_n.log() - (-q_n).log1p()
        unit, width = 1 / self.price, q_n.shape[1]
        follows = torch.full_like(q_n[:, 0], unit) if width else q_n.sum(-1)
        raised = torch.zeros_like(q_n)
        for place in range(width - 1, -1, -1):
            follows = torch.where(counts == place + 1, unit, follows)
            raised[:, place] = (odds[:, place] + follows).sigmoid()
            none, one = (-q_n[:, place]).log1p(), q_n[:, place].log()
            follows = unit + torch.logaddexp(none, one + follows)
        return raised

    def certain_tree(
        self, q_n: Sequence[float], children: Sequence[Sequence[int]]
    ) -> list[float] | None:
        r"""Return :math:`h_n = q_n e^{1/ν} z_n/z` of the tokens of a certain tree.

        z of a node is 1 − Σ q_n + e^{1/ν} Σ q_n z_n over its children, 1 where it has none: the
        Gibbs law of trees, in logarithms (THEORY.md, Theorem 14).
        """
        if not self.ahead or self.divergence != "kl" or self.price == math.inf:
            return None
        follows, raised = [0.0] * len(children), [0.0] * len(q_n)
        for node in range(len(children) - 1, -1, -1):
            places = [place for place in children[node] if q_n[place] > 0]
            if not places:
                continue
            rest = 1 - math.fsum(q_n[place] for place in places)
            worths = [1 / self.price + math.log(q_n[at]) + follows[at + 1] for at in places]
            terms = [*worths, math.log(rest)] if rest > 0 else worths
            most = max(terms)
            follows[node] = most + math.log(math.fsum(math.exp(term - most) for term in terms))
            for place, worth in zip(places, worths, strict=True):
                raised[place] = math.exp(worth - follows[node])
        return raised

    def ratio_bounds(self, q_n: Entries, p_n: Entries) -> tuple[Entries, Entries]:
        """Return bounds on h_n/p_n; a ratio of at least 1 may be taken for more."""
        ratio = (q_n / p_n).nan_to_num(nan=0.0)
        if self.price == math.inf:
            return ratio, ratio
        return ratio, torch.where(q_n > 0, self.highest * ratio, 0.0)

    @property
    def answers_rows(self) -> bool:
        """Return that it does."""
        return True

    @property
    def highest(self) -> float:
        """Return the largest U/P."""
        return self.band.high

    def follow_row(self, node: Node) -> tuple[float, float | None, float | None]:
        """Return P h_n/p_n, P a and P h/q of certain tokens, in the precision of the rows."""
        if self.price == math.inf:
            return node.lossless_ratio, node.alive, node.alive
        row = SoftRow(node.q, node.p, node.alive, self.band, certain=node.certain)
        if row.passes(math.inf if node.ends or node.draft_ratio >= row.cap else node.draft_ratio):
            return 1.0, None, None
        return row.ratio_of(node.draft_ratio, node.joint), row.scale, row.raised


def _raised(q: Rows, p: Rows, raised: Float[Tensor, "*batch 1"]) -> Rows:
    """Return rows with mass ``raised`` on the tokens of p, as p has it, and q's on the others."""
    drafted = p > 0
    rest = q.masked_fill(drafted, 0.0)
    total = rest.sum(-1, keepdim=True)
    scale = torch.where(total > 0, (1 - raised) / torch.where(total > 0, total, 1.0), 0.0)
    return torch.where(drafted, p * raised, rest * scale)
