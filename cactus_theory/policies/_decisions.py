"""Records that policies and verifiers exchange: claims, decisions, residuals, paths."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cactus_theory.base.tolerances import LEAST

Scope = Literal["emitted", "per proposal"]
Support = Literal["target", "free"]
SUPPORTS = get_args(Support)
# tolerance of a budget for the rounding of a sum over the vocabulary, absolute up to an amount of
# 1 and relative above, and the largest amount at which the tolerance grows
BUDGET_TOLERANCE, LARGEST = 1e-9, 1e9


@dataclass(frozen=True)
class Budget:
    """A claim that a divergence stays within an amount.

    Attributes
    ----------
    divergence : spec string, such as ``kl``.
    amount : the bound, in the divergence's unit (nats for KL).
    scope : ``emitted`` bounds the emitted law; ``per proposal`` bounds the row that each
        drafted token is verified against, before averaging over drafts.

    Examples
    --------
    >>> ct.policy("cactus:delta=0.25").declares.budget
    Budget(divergence='kl', amount=0.25, scope='per proposal')
    """

    divergence: str
    amount: float
    scope: Scope

    def __str__(self) -> str:
        return f"{self.divergence} <= {self.amount:g} {self.scope}"

    @property
    def rounding(self) -> float:
        """Return the excess over the amount that counts as rounding."""
        return BUDGET_TOLERANCE * (1 + min(self.amount, LARGEST))

    def held(self, spent: Tensor) -> Tensor:
        """Return whether each divergence is within the budget, up to rounding; NaN is not."""
        return spent <= self.amount + self.rounding

    def bounds(self, stated: bool, token: str = "a token") -> str:
        """Return the bounded quantity in words; ``stated``: the policy states its proposals."""
        if self.scope == "emitted":
            return f"{self.divergence} of the emitted law"
        if stated:
            return f"{self.divergence} of the proposal of {token}"
        return f"least {self.divergence} of a row that accepts {token} so often"


@dataclass(frozen=True)
class Declaration:
    """The claims of a policy; every claim is tested.

    Attributes
    ----------
    direction : +1 if acceptance grows with the knob, −1 if it falls, 0 if there is no knob.
    strict : the knob value at which the policy is lossless, or None if there is none.
    budget : the divergence bound it claims, or None.
    between : the emitted law lies pointwise between p and q.
    at_least_speculative : acceptance is never below lossless speculative sampling.
    continuous : acceptance is continuous in the rows.
    support : ``target`` if no token with q = 0 is ever emitted, else ``free``.
    optimal : no policy that keeps the same budget accepts more.
    floored : ids of tokens that are emitted at least as often as the target has them.
    held : ids of tokens that are emitted exactly as often as the target has them.

    Examples
    --------
    >>> declared = ct.policy("lenience:lenience=0.5").declares
    >>> declared.direction, declared.strict, declared.budget.divergence
    (-1, 1.0, 'max_divergence')
    """

    direction: int = 0
    strict: float | None = None
    budget: Budget | None = None
    between: bool = False
    at_least_speculative: bool = False
    continuous: bool = True
    support: Support = "target"
    optimal: bool = False
    floored: tuple[int, ...] = ()
    held: tuple[int, ...] = ()


def ratio_in(drafted: float, q_n: float) -> float:
    """Return drafted/q_n of a token, ∞ where q_n is too small for it to rise."""
    return drafted / q_n if q_n >= LEAST else math.inf


# scale s of lossless sampling's residual (q − p)₊
UNSCALED = 1.0


@dataclass(frozen=True)
class Residual:
    """Rows ∝ (s·q − p)₊ with one scale s a row, or rows given as they are.

    Attributes
    ----------
    scale : (N,) float64, or one number for all; None where the rows are given.
    rows : (N, V), proportional to the residual law; they need not sum to 1.
    """

    scale: Float[Tensor, "rows"] | float | None = None
    rows: Float[Tensor, "rows vocab"] | None = None

    def law(
        self,
        q: Float[Tensor, "rows vocab"],
        p: Float[Tensor, "rows vocab"] | None,
        n: Int[Tensor, "rows"],
        out: Tensor | None = None,
    ) -> Float[Tensor, "rows vocab"]:
        """Return rows proportional to the residual law, in the precision of q.

        ``p`` None stands for a deterministic draft of the token n. ``out`` is memory to write into.
        Where nothing is left (rounding reaches it, or nothing can be refused) the row is q.
        """
        if self.rows is not None:
            return self.rows
        if isinstance(self.scale, float) and self.scale == UNSCALED and p is not None:
            return residual_or(torch.sub(q, p, out=out), q)
        assert self.scale is not None
        scale = self.scale.to(q.dtype)[:, None] if isinstance(self.scale, Tensor) else self.scale
        difference = torch.mul(q, scale, out=out)
        if p is None:  # a deterministic draft of n, which was refused
            difference.scatter_(-1, n[:, None], 0.0)
        else:
            difference.sub_(p)
        return residual_or(difference, q)

    def scale_at(self, entry: int) -> float:
        """Return the scale of one row."""
        assert self.scale is not None
        return float(self.scale[entry]) if isinstance(self.scale, Tensor) else self.scale

    def at(self, index: Tensor) -> "Residual":
        """Return the residual of some of the rows."""
        if self.rows is not None:
            return Residual(rows=self.rows[index])
        return Residual(scale=self.scale[index] if isinstance(self.scale, Tensor) else self.scale)


@dataclass(frozen=True)
class Decision:
    """Decisions of a policy about N drafted tokens, each with its coin.

    Attributes
    ----------
    accepted : (N,) whether the token is accepted.
    residual : for every token that was refused (ignored for the others); None if the policy
        knows that all were accepted.
    """

    accepted: Bool[Tensor, "rows"]
    residual: Residual | None


def residual_or(difference: Tensor, fallback: Tensor) -> Tensor:
    """Return ``difference`` (..., V) clamped in place at 0, ``fallback`` rows where that is empty.

    The rows are not normalised; NaN stays NaN.
    """
    positive = difference.clamp_(min=0.0)
    total = positive.sum(-1, keepdim=True)
    if not positive.is_cuda and float(total.amin()) > 0:
        return positive
    return torch.where(total <= 0, fallback, positive)


@dataclass(frozen=True)
class Path:
    """The alive ratio P of the path to each of some rows, and the entries raised there."""

    # alive ratio P, float64 in [0, 1]: the probability, given the tokens before the row, that they
    # are all accepted (averaged over the tokens drafted later)
    alive: Float[Tensor, "*batch"]
    # h_n of the drafted token, float64, where the drafter was deterministic and the policy has
    # looked ahead (LookAhead), else None; of several deterministic tokens the sum, with their
    # shares in the draft's row
    raised: Float[Tensor, "*batch"] | None = None

    def at(self, row: int) -> "Path":
        """Return the path to one of R rows; ``raised`` is None there if its entry is NaN."""
        alive = self.alive[row : row + 1]
        if self.raised is None or bool(self.raised[row].isnan()):
            return Path(alive)
        return Path(alive, self.raised[row : row + 1])


class Node(NamedTuple):
    """A node of a path, on the CPU: its rows, the token drafted there and the alive ratio P."""

    q: np.ndarray  # (V,), in the precision of p
    p: np.ndarray  # (V,), where tokens are deterministic the row sampled beside them; 0 if none
    q_n: float  # entry of q at the drafted token
    p_n: float  # entry of p there
    alive: float  # P
    ends: bool  # whether the path may end at the node, so that the residual is needed
    deterministic: Sequence[int] = ()  # ids of the deterministic tokens there
    joint: bool = False  # whether the drafted token is deterministic, too

    @property
    def draft_ratio(self) -> float:
        """Return p_n/q_n, ∞ where q_n is too small for the token to rise."""
        return ratio_in(self.p_n, self.q_n)

    @property
    def lossless_ratio(self) -> float:
        """Return P q_n/p_n, ∞ where p_n = 0 < q_n."""
        if self.p_n > 0:
            return self.alive * self.q_n / self.p_n
        return math.inf if self.q_n > 0 else 0.0


@dataclass(frozen=True)
class Step:
    """Ratios P h/p and residuals of N nodes and the tokens drafted there, under a row h."""

    ratio: Float[Tensor, "rows"]  # float64, P h_n/p_n; the alive ratio afterwards is min(1, ratio)
    # (P h − p)₊; rows have its mass. Arbitrary where ``ratio`` ≥ 1, as a path does not end before
    # such a token
    residual: Residual
