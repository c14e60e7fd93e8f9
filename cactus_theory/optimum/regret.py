r"""The best acceptance under a budget of regret: a knapsack of drafted mass.

.. math:: \max_{h \in \Delta} \sum_i \min(p_i, h_i) \quad\text{s.t.}\quad
   \sum_i h_i ρ_i \le δ, \qquad ρ_i = \max \ln q − \ln q_i

Regret is linear in h, so the optimum is a knapsack's: drafted mass is kept in the order of regret
until the budget is spent, and the rest goes to the likeliest token, which costs nothing. At a price
ν, in tokens per nat, a token is kept iff ν ρ_n ≤ 1. For any ν ≥ 0 the acceptance is at most
ν δ + Σ p_n (1 − ν ρ_n)₊ (THEORY.md, Theorem 30). The policy ``regret`` uses this module.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.base import tensors
from cactus_theory.base.chunks import in_parts, joined
from cactus_theory.base.rows import greedy
from cactus_theory.base.threads import one_thread
from cactus_theory.divergences.regret import REGRET, regrets
from cactus_theory.optimum.acceptance import ROUNDING
from cactus_theory.optimum.band_row import NodeRow
from cactus_theory.optimum.bands import HEAD, Charge
from cactus_theory.optimum.look_ahead import LookAhead

Rows = Float[Tensor, "*batch vocab"]
PerRow = Float[Tensor, "*batch #vocab"]


@dataclass(frozen=True)
class OptimalRegret:
    """Result of :func:`optimal_regret` for each row.

    ``target`` has the input's dtype, other fields float64; all are torch or numpy, as the input.
    """

    target: Any
    acceptance: Any
    regret: Any
    price: Any
    gap: Any


@one_thread()
@torch.no_grad()
def optimal_regret(
    target_probs: Any,
    draft_probs: Any,
    *,
    delta: Any = None,
    price: Any = None,
    acceptance: Any = None,
    normalise: bool = False,
) -> OptimalRegret:
    r"""Maximise the acceptance of a drafted token under a bound on the emitted token's regret.

    .. math:: \max_{h \in \Delta} \sum_i \min(p_i, h_i) \;\text{ s.t. }\;
       \sum_i h_i (\max \ln q − \ln q_i) \le \delta

    Regret takes the place of KL at temperature 0. Tokens that tie with the likeliest token keep
    their drafted mass at no cost. A price of ∞ is strict greedy decoding instead: h = 1 at the
    first of the tied tokens.

    Parameters
    ----------
    target_probs, draft_probs : (..., V) probabilities, as for
        :func:`cactus_theory.optimal_acceptance`; the target's row at temperature 1.
    delta : budget ≥ 0 in nats, a number or an array broadcasting to (...).
    price : instead of delta, tokens per nat: a token is kept iff its regret × price is at most 1.
    acceptance : instead of delta, the acceptance to reach at the least regret.
    normalise : as for :func:`cactus_theory.optimal_acceptance`.

    Returns
    -------
    target : (..., V), the row h to verify against.
    acceptance : (...), Σ min(p, h).
    regret : (...), Σ h_i (max ln q − ln q_i) in nats.
    price : (...), acceptance per further nat: 1/regret of the token at which the budget ends, 0 if
        all drafted mass is kept.
    gap : (...), the proven upper bound on the acceptance of any row that spends no more, minus
        ``acceptance``: 0 up to rounding; at a price of ∞ the drafted mass of tied tokens that is
        given up.

    Raises
    ------
    ValueError, TypeError
        As :func:`cactus_theory.optimal_acceptance`; ``acceptance`` above Σ p over q > 0.

    Examples
    --------
    >>> q, p = np.array([0.5, 0.4, 0.1]), np.array([0.2, 0.6, 0.2])
    >>> best = ct.optimal_regret(q, p, price=2.0)
    >>> best.target.round(3), round(float(best.regret), 3)  # token 2 would cost 1.61 nats
    (array([0.4, 0.6, 0. ]), 0.134)
    >>> ct.optimal_regret(q, p, delta=0.0).target
    array([1., 0., 0.])
    """
    knobs = {"delta": delta, "price": price, "acceptance": acceptance}
    name = check.the_only_one(**knobs)
    target, draft = tensors.checked_rows(target_probs, draft_probs, normalise)
    batch, most = target.shape[:-1], 1.0 if name == "acceptance" else math.inf
    amounts = tensors.row_numbers(name, knobs[name], batch, target.device, 0.0, most).reshape(-1)

    def solved(at: slice, q: Tensor, p: Tensor) -> tuple[Tensor, ...]:
        rows, *scalars = _solved(q, p, name, amounts[at][:, None])
        return rows.to(target.dtype), *scalars

    parts = ((at, solved(at, *rows)) for at, rows in in_parts(target, draft))
    rows, *scalars = joined(parts, amounts.numel())
    columns = rows.reshape(target.shape), *(value.reshape(batch) for value in scalars)
    return OptimalRegret(*(tensors.scalar_like(value, target_probs) for value in columns))


def marginal_loss(lost: Rows, amounts: Rows, room: PerRow) -> PerRow:
    """Return the ``lost`` of the token at which the running sum of ``amounts`` exceeds ``room``.

    The sum runs over tokens by rising ``lost``. Return ∞ if it never exceeds ``room``.
    """
    by_loss, order = lost.sort(-1)
    count = (amounts.gather(-1, order).cumsum(-1) <= room).sum(-1, keepdim=True)  # fit in
    following = by_loss.gather(-1, count.clamp(max=lost.shape[-1] - 1))
    return torch.where(count < lost.shape[-1], following, math.inf)


def _solved(q: Rows, p: Rows, name: str, amount: PerRow) -> tuple[Tensor, ...]:
    """Return row, acceptance, regret, price and gap, for float64 rows that sum to 1."""
    lost = regrets(q)
    drafted = torch.where(q > 0, p, 0.0)
    if name == "price":
        price, kept = amount, kept_at(lost, drafted, amount)
    else:
        if bool((amount > drafted.sum(-1, keepdim=True) + ROUNDING).any()) and name == "acceptance":
            rule = "must be at most the drafted mass with q > 0, in some row"
            raise ValueError(f"acceptance: {rule} {float(drafted.sum(-1).min()):g}; got more")
        price, kept = kept_within(lost, drafted, amount, drafted if name == "acceptance" else None)
    rows = completed(kept, q)
    accepted, spent = torch.minimum(p, rows).sum(-1), REGRET.value(rows, q)
    # at a price of 0 or ∞ the terms 0 · ∞ are 0, but for tokens without regret
    saved = (1 - price * lost).nan_to_num(nan=1.0).clamp(min=0.0)
    bound = (price[:, 0] * spent).nan_to_num(nan=0.0) + (drafted * saved).sum(-1)
    return rows, accepted, spent, price[:, 0], bound - accepted


def kept_at(lost: Rows, drafted: Rows, price: float | PerRow) -> Rows:
    """Return the drafted mass of tokens with regret ``lost`` × price ≤ 1; 0 at a price of ∞."""
    return torch.where(lost * price <= 1, drafted, 0.0)  # 0 · ∞ is NaN


def kept_within(
    lost: Rows, drafted: Rows, room: PerRow, amounts: Rows | None = None
) -> tuple[PerRow, Rows]:
    """Return the price, and the drafted mass that is kept, by rising regret, within ``room``.

    ``room`` limits the sum of regret, or of ``amounts`` if given, such as drafted mass. The token
    at which ``room`` runs out keeps a part of its mass; tokens that tie with it keep the same part.
    """
    if amounts is None:
        amounts = torch.where(drafted > 0, drafted * lost, 0.0)
    marginal = marginal_loss(lost, amounts, room)
    cheaper, tied = lost < marginal, (lost == marginal) & (lost < math.inf)
    spent, due = (
        torch.where(tokens, amounts, 0.0).sum(-1, keepdim=True) for tokens in (cheaper, tied)
    )
    share = torch.where(marginal > 0, (room - spent) / due, 1.0).clamp(0.0, 1.0)
    return 1 / marginal, torch.where(cheaper, drafted, torch.where(tied, share * drafted, 0.0))


def completed(kept: Rows, q: Rows) -> Rows:
    """Return rows with sum 1: ``kept``, and the rest on q's first argmax; NaN for rows with NaN."""
    rest = (1 - kept.sum(-1, keepdim=True)).clamp(min=0.0)
    return kept.addcmul(rest, first_argmax(q))


def first_argmax(q: Rows) -> Rows:
    """Return one-hot rows, float64, at the first of the likeliest tokens; NaN for a row of 0s."""
    return greedy(torch.where(q == 0, -math.inf, q.double()))


def losses(
    q: Float[Tensor, "*batch vocab"], ids: Int[Tensor, "*batch"]
) -> tuple[Float[Tensor, "*batch"], Bool[Tensor, "*batch"]]:
    """Return the regret ρ of the token of each row, and whether it is the row's first argmax."""
    entries = q.gather(-1, ids[..., None])[..., 0]
    lost = q.amax(-1).double().log() - entries.double().log()
    return lost, (ids == q.argmax(-1)) & lost.isfinite()


@dataclass(frozen=True)
class RegretPath(LookAhead):
    r"""Keep the first n drafted tokens of a path, n maximising :math:`n − ν \sum_{i \le n} ρ_i`."""

    def path(
        self,
        q: Float[Tensor, "batch K vocab"],
        ids: Int[Tensor, "batch K"],
        counts: Int[Tensor, "batch"],
        worth: Float[Tensor, "batch K1"] | None = None,
    ) -> Float[Tensor, "batch K"]:
        """Return 1 for drafted tokens that are kept if reached, else 0; ties keep more tokens."""
        return self.kept(*losses(q, ids), counts)

    def kept(
        self,
        lost: Float[Tensor, "batch K"],
        best: Bool[Tensor, "batch K"],
        counts: Int[Tensor, "batch"],
        ahead_counts: bool = True,
    ) -> Float[Tensor, "batch K"]:
        """Return the result of :meth:`path`, from :func:`losses` of the tokens, in a backward pass.

        A token and the tokens after it are worth F = max(0, 1 + F′ − ν ρ), with F′ the worth of the
        tokens after it, 0 after the last token. A token is kept iff 1 + F′ ≥ ν ρ. Without
        ``ahead_counts`` F′ is 0 for every token, as in a chain.
        """
        # at a price of ∞ a tied token costs ∞ · 0 = NaN, here ∞: only the first argmax is kept
        cost = (self.price * lost).nan_to_num(nan=math.inf, posinf=math.inf)
        cost = torch.where(best, 0.0, cost)
        kept, ahead = torch.zeros_like(cost), cost.new_zeros(len(cost))
        for place in range(cost.shape[1] - 1, -1, -1):
            ahead = torch.where(counts == place + 1, 0.0, ahead)
            gain = 1 + ahead - cost[:, place]
            kept[:, place] = (gain >= 0).double()
            if ahead_counts:
                ahead = gain.clamp(min=0.0)
        return kept

    def descent(
        self, q: Float[Tensor, "nodes vocab"], above: Sequence[int], ids: Sequence[int]
    ) -> list[int]:
        """Return for each node of a deterministic tree the id of the child to keep, −1 for none.

        The worth F of a node is 0, or the largest 1 + F′ − ν ρ of its children, with F′ the child's
        worth. Children come after their parents, so one backward pass finds every F. Drafted token
        i has the id ``ids[i]``, follows the node ``above[i]``, and makes node i + 1.
        """
        nodes = torch.tensor(list(above), device=q.device, dtype=torch.int64)
        drafted = torch.tensor(list(ids), device=q.device, dtype=torch.int64)
        lost, best = losses(q[nodes], drafted)
        cost = torch.where(best, 0.0, (self.price * lost).nan_to_num(nan=math.inf, posinf=math.inf))
        ahead, kept = [0.0] * (len(nodes) + 1), [-1] * (len(nodes) + 1)
        for place in range(len(nodes) - 1, -1, -1):
            # the drafted token ``place`` makes the node ``place`` + 1, a child of ``node``
            gain, node = 1 + ahead[place + 1] - float(cost[place]), above[place]
            # a child worth just as much as no child is kept, too
            if gain > ahead[node] or (gain == ahead[node] and kept[node] < 0):
                ahead[node], kept[node] = gain, ids[place]
        return kept

    def law(self, q: Rows, p: Rows, raised: Float[Tensor, "*batch"]) -> Rows:
        """Return p where the token is kept, else the one-hot row of the first argmax."""
        return completed(torch.where(raised[..., None] > 0, p.double(), 0.0), q)

    def row(self, q: Any, token: int, raised: float, alive: float) -> "OneTokenRow | None":
        """Return the row that emits the token if it is kept, else the first argmax."""
        row = OneTokenRow(q, token, raised > 0, alive)
        return None if math.isnan(row.chance) else row  # NaN: the row is written, and draws fail


class OneTokenRow(NodeRow):
    """The row h = 1 at one token: the deterministic drafted token if kept, else the likeliest."""

    is_solved, compiled = True, False

    def __init__(self, q: Any, token: int, kept: bool, alive: float) -> None:
        super().__init__(alive)
        self.kept, self.scale, self.best = kept, 0.0, int(q.argmax())
        self.token = token if kept else self.best
        self.q_token, self.chance = float(q[self.token]), float(q[self.best])

    @property
    def charge(self) -> Charge:
        """Return the token's regret in nats, acceptance, and mass given to unlikely tokens."""
        lost = 0.0
        if self.token != self.best:
            lost = math.log(self.chance) - math.log(self.q_token) if self.q_token else math.inf
        off_head = 1 - self.q_token if self.q_token < HEAD * self.chance else 0.0
        return Charge(spent=lost, accepted=float(self.kept), raised=off_head)

    def upper_exceeds(self, threshold: float) -> bool:
        """Return False, which means that the row is solved: h is 1 at one token, without edges."""
        return False

    def ratio_of(self, token: int, q_n: float, p_n: float) -> float:
        """Return P if the drafted token is kept, else 0."""
        return self.alive if self.kept else 0.0

    def raised(self, token: int, q_n: float, p_n: float) -> float:
        """Return P/q for the emitted token, 0 for other tokens."""
        return self.alive / float(q_n) if token == self.token and q_n > 0 else 0.0

    @property
    def levels(self) -> dict[int, float]:
        """Return by token id the residual's scale at the emitted token, P/q."""
        return {self.token: self.alive / self.q_token} if self.q_token else {}

    def law_at(self, token: int, q: Any, p: Any) -> float:
        """Return 1 for the emitted token, else 0."""
        return float(token == self.token)

    def write(self, q: Any, p: Any, out: Any) -> None:
        """Write the one-hot row h."""
        out[:] = 0.0
        out[self.token] = 1.0

    @property
    def band(self) -> None:
        """Return None: loops over bands cannot read this row, so it is written."""
        return None
