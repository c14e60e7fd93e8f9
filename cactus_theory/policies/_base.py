r"""A policy is a pair (φ, g).

Draft n ~ p and keep it with probability φ(n); otherwise emit one token from g(·|n).
The emitted law is :math:`out(x) = p_x φ(x) + Σ_n p_n (1 − φ(n)) g(x|n)` and the acceptance
:math:`A = Σ p_n φ(n)`. Rows are probabilities over a vocabulary of V tokens, q of the
target and p of the draft. Methods trust their rows (the public functions check them);
they compute in float64. ``p=None`` stands for a draft that is certain of its token.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import fields
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.policies._declaration import Declaration

Rows = Float[Tensor, "*batch vocab"]
Ids = Int[Tensor, "*batch m"]
Id = Int[Tensor, "*batch"]

# rows built at once by the O(V²) enumeration: 2^24 float64 entries are 128 MiB
ENUMERATION_ENTRIES = 2**24
# sums of whole rows against a threshold: ties such as those of uniform rows must not be
# decided by the order in which the tokens were added up
TIE = 1e-12


def keep_probability(raised: Tensor, drafted: Tensor) -> Tensor:
    """Return min(1, raised/drafted), 0 where nothing may be emitted, 1 where p = 0 < raised."""
    return (raised / drafted).nan_to_num_(nan=0.0).clamp_(max=1.0)  # 0/0 is 0, x/0 is 1


def normalised_or(residual: Tensor, fallback: Tensor) -> Tensor:
    """Return ``residual`` (..., V) divided by its sum, or ``fallback`` rows where it is empty."""
    total = residual.sum(-1, keepdim=True)
    return torch.where(total > 0, residual / torch.where(total > 0, total, 1.0), fallback)


def residual_or(difference: Tensor, fallback: Tensor) -> Tensor:
    """Return the positive part of ``difference`` (..., V), or ``fallback`` rows if it is empty.

    Works in the memory of ``difference``. The rows are not normalised.
    """
    positive = difference.clamp_(min=0.0)
    total = positive.sum(-1, keepdim=True)
    if not positive.is_cuda and bool((total > 0).all()):
        return positive
    return torch.where(total > 0, positive, fallback)


def draft_row(q: Tensor, p: Tensor | None, n: Tensor) -> Tensor:
    """Return p as float64, or the one-hot rows (..., V) of a draft certain of ``n`` (...)."""
    if p is not None:
        return p.double()
    row = torch.zeros((*n.shape, q.shape[-1]), dtype=torch.float64, device=q.device)
    return row.scatter_(-1, n[..., None], 1.0)


class Policy(ABC):
    """An acceptance rule with its recovery; subclasses are frozen dataclasses of knobs."""

    name: ClassVar[str]
    knob: ClassVar[str | None] = None

    @property
    def spec(self) -> str:
        """Return the string that rebuilds this policy: ``name:knob=value,…``."""
        knobs = [
            f"{field.name}={_text(getattr(self, field.name))}"
            for field in fields(self)  # type: ignore[arg-type]
            if getattr(self, field.name) != field.default
        ]
        return ":".join(filter(None, [self.name, ",".join(knobs)]))

    @property
    def declares(self) -> Declaration:
        """Return what this rule promises."""
        return Declaration()

    @abstractmethod
    def acceptance(self, q: Rows, p: Rows | None, n: Ids) -> Float[Tensor, "*batch m"]:
        """Return φ(n), the probability of keeping each drafted token, float64."""

    @abstractmethod
    def recovery(self, q: Rows, p: Rows | None, n: Id) -> Rows:
        """Return g(·|n), the law of the token emitted after rejecting n; q if φ(n) = 1."""

    def decide(
        self, q: Rows, p: Rows | None, n: Id
    ) -> tuple[Float[Tensor, "*batch"], Callable[[Any], Tensor]]:
        """Return φ of one drafted token per row, and a function from an index to recovery rows.

        The index selects among the batch shape: a mask, or one tensor of positions per axis.
        Recovery rows are proportional to g; they need not sum to 1. A rule that solves
        something per row overrides this to solve it once.
        """

        def recover(at: Any) -> Tensor:
            return self.recovery(q[at], None if p is None else p[at], n[at])

        return self.acceptance(q, p, n[..., None])[..., 0], recover

    def proposal(self, q: Rows, p: Rows, n: Ids) -> Float[Tensor, "*batch m vocab"] | None:
        """Return the row each drafted token was verified against, or None if there is none."""
        return None

    def keep(self, q: Rows, p: Rows) -> Rows:
        """Return φ of every token, (..., V)."""
        return self.acceptance(q, p, _all_tokens(q))

    def emitted(self, q: Rows, p: Rows) -> Rows:
        """Return the exact law of the next token by enumerating drafted tokens, O(V²) a row."""
        phi = self.keep(q, p)
        rejected = p * (1 - phi)
        vocab = q.shape[-1]
        rows = [r.reshape(-1, vocab) for r in (q, p, rejected)]
        out = (p * phi).reshape(-1, vocab).clone()
        for row, (q_row, p_row, lost) in enumerate(zip(*rows, strict=True)):
            tokens = lost.nonzero()[:, 0]
            for chunk in tokens.split(max(1, ENUMERATION_ENTRIES // vocab)):
                shape = (len(chunk), vocab)
                recovered = self.recovery(q_row.expand(shape), p_row.expand(shape), chunk)
                out[row] += lost[chunk] @ recovered
        return out.reshape(q.shape)


class SharedRecovery(Policy):
    """A rule whose recovery row is the same whichever token was rejected."""

    @abstractmethod
    def recovery_row(self, q: Rows, p: Rows) -> Rows:
        """Return the recovery law of each row."""

    def recovery(self, q: Rows, p: Rows | None, n: Id) -> Rows:
        """Return the recovery law; see :meth:`recovery_row`."""
        return self.recovery_row(q.double(), draft_row(q, p, n))

    def emitted(self, q: Rows, p: Rows) -> Rows:
        """Return pφ + (1 − A)·g, O(V) a row."""
        kept = p * self.keep(q, p)
        lost = (p - kept).clamp(min=0.0).sum(-1, keepdim=True)
        return kept + lost * self.recovery_row(q, p)


class FixedTarget(SharedRecovery):
    """Lossless speculative sampling on a row h that does not depend on the drafted token.

    φ(n) = min(1, h_n/p_n), g ∝ (h − p)₊. The emitted law is h and the acceptance
    Σ min(p, h) = 1 − TV(p, h), the best possible for that h.
    """

    @abstractmethod
    def target(self, q: Rows, p: Rows) -> Rows:
        """Return the row h that is emitted instead of q."""

    def acceptance(self, q: Rows, p: Rows | None, n: Ids) -> Float[Tensor, "*batch m"]:
        """Return min(1, h_n/p_n)."""
        if p is None:
            wide = q[..., None, :].expand(*n.shape, q.shape[-1])
            target = self.target(wide.double(), draft_row(wide, None, n))
            return target.gather(-1, n[..., None])[..., 0].clamp(max=1.0)
        target = self.target(q.double(), p.double())
        return keep_probability(target.gather(-1, n), p.double().gather(-1, n))

    def decide(
        self, q: Rows, p: Rows | None, n: Id
    ) -> tuple[Float[Tensor, "*batch"], Callable[[Any], Tensor]]:
        """Return φ and, on demand, (h − p)₊ in the rows' own precision."""

        def recover(at: Any) -> Tensor:
            own_q = q[at]
            own_p = draft_row(own_q, None, n[at]) if p is None else p[at]
            return residual_or(self.target(own_q, own_p) - own_p, own_q)

        return self.acceptance(q, p, n[..., None])[..., 0], recover

    def recovery_row(self, q: Rows, p: Rows) -> Rows:
        """Return (h − p)₊ normalised, q where nothing can be rejected."""
        return normalised_or((self.target(q, p) - p).clamp(min=0.0), q)

    def emitted(self, q: Rows, p: Rows) -> Rows:
        """Return h itself."""
        return self.target(q, p)


def _all_tokens(q: Tensor) -> Tensor:
    return torch.arange(q.shape[-1], device=q.device).expand(q.shape)


def _text(value: Any) -> str:
    return repr(value) if isinstance(value, float) else str(value)
