r"""A policy is a pair (φ, g).

Draft n ~ p and keep it with probability φ(n); otherwise emit one token from g(·|n).
The emitted law is :math:`out(x) = p_x φ(x) + Σ_n p_n (1 − φ(n)) g(x|n)` and the acceptance
:math:`A = Σ p_n φ(n)`. Rows are probabilities over a vocabulary of V tokens, q of the
target and p of the draft. Methods do not validate their rows (the public functions do).

**Laws are float64**: rows may be float64, float32, float16 or bfloat16, q and p of different
precisions, on any strides, of any batch shape (...), and may require gradients. φ, g, the row h,
proposals and the emitted law are those of the rows as they are, computed and returned in float64,
and part of no graph.

``acceptance`` and ``recovery`` may be called with ``p=None``, a draft that is certain of its
token. Subclasses need not handle it: :class:`Policy` calls their methods with one-hot rows.

:class:`Mathematics` is what a user overrides and reads; :class:`Policy` adds what verifiers ask
for speed. What it ``declares`` is a claim, which only audits and property tests read; what a
verifier may rely on is a fact of the class (:mod:`cactus_theory.verify.contract`).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cactus_theory.base.arguments import float64_rows, ungraphed
from cactus_theory.base.specs import spec_of
from cactus_theory.divergences import Divergence
from cactus_theory.policies._foreign_code import Forecast, guard
from cactus_theory.policies._records import Decision, Declaration, Node, Path, Residual, Step

Rows = Float[Tensor, "*batch vocab"]
Ids = Int[Tensor, "*batch m"]
Id = Int[Tensor, "*batch"]
# what verifiers ask with: rows and tokens of many places, and entries of rows
Flat = Float[Tensor, "rows vocab"]
FlatIds = Int[Tensor, "rows"]
FlatCoins = Float[Tensor, "rows"]
Entries = Float[Tensor, "*any"]
Flags = Bool[Tensor, "*any"]

# rows built at once by the O(V²) enumeration: 2^22 float64 entries are 32 MiB
ENUMERATION_ENTRIES = 2**22
# methods whose rows are float64, whatever those that they are given
LAWS = ("keep", "proposal", "proposal_divergence", "target", "emitted")
# relative slack where a sum over a row is compared with a threshold, so that ties (uniform rows,
# for example) do not depend on the order of summation
TIE = 1e-12
# what rounding may add to a sum over the vocabulary
SUM = 1e-9


def keep_probability(raised: Tensor, drafted: Tensor) -> Tensor:
    """Return min(1, raised/drafted), 0 where nothing may be emitted, 1 where p = 0 < raised."""
    return (raised / drafted).nan_to_num_(nan=0.0).clamp_(max=1.0)  # 0/0 is 0, x/0 is 1


def normalised_or(residual: Tensor, fallback: Tensor) -> Tensor:
    """Return ``residual`` (..., V) over its sum, ``fallback`` rows where it is empty; NaN stays."""
    total = residual.sum(-1, keepdim=True)
    empty = total <= 0
    return torch.where(empty, fallback, residual / torch.where(empty, 1.0, total))


def raised_alone(kind: Divergence, h_n: Tensor, q_n: Tensor) -> Tensor:
    """Return D(h‖q) for q scaled off n so that h_n is given: the cheapest row with that h_n."""
    rows = (torch.stack([entry, 1 - entry], -1) for entry in (h_n.clamp(0, 1), q_n))
    return kind.value(*rows)


def one_hot(n: Int[Tensor, "*some"], like: Rows) -> Float[Tensor, "*some vocab"]:
    """Return rows (..., V) with 1 at ``n`` (...), of the dtype of ``like``: certain drafts."""
    row = torch.zeros((*n.shape, like.shape[-1]), dtype=like.dtype, device=like.device)
    return row.scatter_(-1, n[..., None], 1.0)


def in_float64(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let a method of (self, q, p, …) see float64 rows outside of graphs, and return such rows."""

    @wraps(method)
    def law(self: Any, q: Rows, p: Rows, *more: Any, **named: Any) -> Any:
        row = method(self, *float64_rows(q, p), *more, **named)
        return row if row is None else row.double()

    return law


def _explicit_acceptance(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let ``acceptance`` answer for certain drafts through their one-hot rows."""

    @wraps(method)
    def acceptance(self: Any, q: Rows, p: Rows | None, n: Ids) -> Tensor:
        if p is not None:
            return method(self, ungraphed(q), ungraphed(p), n)
        q = ungraphed(q)
        wide = q[..., None, :].expand(*n.shape, q.shape[-1])
        return method(self, wide, one_hot(n, q), n[..., None])[..., 0]

    return acceptance


def _explicit_recovery(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let ``recovery`` answer for certain drafts through their one-hot rows."""

    @wraps(method)
    def recovery(self: Any, q: Rows, p: Rows | None, n: Id) -> Tensor:
        q, p = ungraphed(q), one_hot(n, q) if p is None else ungraphed(p)
        return method(self, q, p, n)

    return recovery


class Mathematics(ABC):
    """What a policy is: what it keeps, what replaces a refused token, what is emitted then."""

    name: ClassVar[str]
    knob: ClassVar[str | None] = None
    shared_recovery: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "target" in vars(cls) and "path" not in signature(cls.target).parameters:
            raise TypeError(
                f"{cls.__name__}.target: must be target(self, q, p, path=None); path is how a "
                f"verifier of blocks reached a row, got {signature(cls.target)}"
            )
        guard(cls)
        for name, explicit in (
            ("acceptance", _explicit_acceptance),
            ("recovery", _explicit_recovery),
            *((name, in_float64) for name in LAWS),
        ):
            if name in vars(cls):
                setattr(cls, name, explicit(vars(cls)[name]))

    @property
    def spec(self) -> str:
        """Return the string that rebuilds this policy: ``name:knob=value,…``."""
        return spec_of(self.name, self)

    @property
    def declares(self) -> Declaration:
        """Return what this policy claims."""
        return Declaration()

    @abstractmethod
    def acceptance(self, q: Rows, p: Rows | None, n: Ids) -> Float[Tensor, "*batch m"]:
        """Return φ(n), the probability of keeping each drafted token, float64."""

    @abstractmethod
    def recovery(self, q: Rows, p: Rows | None, n: Id) -> Rows:
        """Return g(·|n), the law of the token emitted after rejecting n; q if φ(n) = 1."""

    @in_float64
    def proposal(self, q: Rows, p: Rows, n: Ids) -> Float[Tensor, "*batch m vocab"] | None:
        """Return the row each drafted token was verified against, or None if there is none."""
        return None

    @in_float64
    def proposal_divergence(self, q: Rows, p: Rows, kind: Divergence) -> Rows:
        """Return D(h⁽ⁿ⁾‖q) for every token n, (..., V).

        Without proposals it is the least D of a row that keeps n so often. A proposal is charged
        ∞ if it is no distribution, or gives n less than is kept.
        """
        tokens, kept = _all_tokens(q), p * self.keep(q, p)
        rows = self.proposal(q, p, tokens)
        if rows is None:
            return raised_alone(kind, torch.maximum(kept, q), q)
        h_n = rows.gather(-1, tokens[..., None])[..., 0]
        sound = ((rows.sum(-1) - 1).abs() <= SUM) & (h_n >= kept - SUM)
        costs = kind.value(rows, q[..., None, :].expand_as(rows))
        return torch.where(sound, costs, torch.inf)

    @in_float64
    def keep(self, q: Rows, p: Rows) -> Rows:
        """Return φ of every token, (..., V)."""
        return self.acceptance(q, p, _all_tokens(q))

    @in_float64
    def target(self, q: Rows, p: Rows, path: Path | None = None) -> Rows | None:
        """Return the row h that is emitted instead of q, float64; None for a policy without one.

        Any row will do that depends on the text before it but not on the drafted token; at the
        nodes of a block also on the ``path`` to each, None outside of blocks.
        """
        return None

    def certain_path(
        self, q_n: Float[Tensor, "batch K"], counts: Int[Tensor, "batch"]
    ) -> Float[Tensor, "batch K"] | None:
        """Return h_n of the drafted tokens of certain drafts, knowing what follows each; or None.

        A certain draft is a function of the text before it, so that its later rows may be used.
        The other tokens of h are in proportion to q; entries beyond ``counts`` are not read.
        """
        return None

    def certain_tree(
        self, q_n: Sequence[float], children: Sequence[Sequence[int]]
    ) -> list[float] | None:
        """Return h_n of the tokens of a certain tree, knowing what follows each; or None.

        ``children`` are the certain tokens after each node, none where another one was sampled:
        node 0 is the text, node n + 1 follows token n, ``q_n`` is its probability after its own.
        The other tokens of h are in proportion to q; tokens that are no node's are not read.
        """
        return None

    @in_float64
    def emitted(self, q: Rows, p: Rows) -> Rows:
        """Return the exact law of the next token, float64.

        pφ + (1 − A)·g, O(V) a row, where the recovery is shared; else by enumerating drafted
        tokens, O(V²) a row.
        """
        phi = self.keep(q, p)
        if self.shared_recovery:
            kept = p * phi
            refused = (p - kept).clamp(min=0.0)  # g is asked for a token that can be refused
            lost = refused.sum(-1, keepdim=True)
            return kept + lost * self.recovery(q, p, refused.argmax(-1))
        rejected = p * (1 - phi)
        vocab = q.shape[-1]
        rows = [r.reshape(-1, vocab) for r in (q, p, rejected)]
        out = (p * phi).reshape(-1, vocab).clone()
        with Forecast(self.spec, int(rejected.count_nonzero()), vocab) as forecast:
            for row, (q_row, p_row, lost) in enumerate(zip(*rows, strict=True)):
                tokens = lost.nonzero()[:, 0]
                for chunk in tokens.split(max(1, ENUMERATION_ENTRIES // vocab)):
                    out[row] += lost[chunk] @ self._recovered(q_row, p_row, chunk)
                    forecast.add(len(chunk))
        return out.reshape(q.shape)

    def _recovered(
        self, q: Float[Tensor, "vocab"], p: Float[Tensor, "vocab"], n: Int[Tensor, "m"]
    ) -> Float[Tensor, "m vocab"]:
        """Return g(·|n) of some tokens of one row."""
        shape = (len(n), len(q))
        return self.recovery(q.expand(shape), p.expand(shape), n)


class Policy(Mathematics):
    """When to keep a drafted token, and what replaces it; subclasses are frozen dataclasses.

    φ, g and all laws are float64 whatever the precision of the rows; see ``emitted``.

    Its own methods are what verifiers rely on for speed. Each answers by the mathematics; a class
    that overrides one answers sooner, the same up to rounding. Methods of a class outside this
    package get copies of the rows: one that changes them raises ValueError.

    Attributes
    ----------
    entrywise : class fact. φ(n) and the scale of the residual depend on q_n and p_n alone,
        so a verifier reads whole rows only after a refusal; see :class:`Entrywise`.
    keeps_what_lossless_keeps : class fact. φ(n) ≥ min(1, q_n/p_n), so a verifier calls the
        policy only for tokens that lossless sampling would refuse.
    shared_recovery : class fact. The recovery law is the same whichever token was refused,
        so the emitted law takes O(V) a row.

    Examples
    --------
    >>> q, p = torch.tensor([0.2, 0.8]), torch.tensor([0.8, 0.2])
    >>> lossless = ct.policy("speculative")
    >>> lossless.acceptance(q, p, torch.tensor([0, 1]))
    tensor([0.2500, 1.0000], dtype=torch.float64)
    >>> lossless.recovery(q, p, torch.tensor(0))
    tensor([0., 1.], dtype=torch.float64)
    """

    entrywise: ClassVar[bool] = False
    keeps_what_lossless_keeps: ClassVar[bool] = False

    def keeps_at_once(self, q_n: Entries, p_n: Entries, coin: Entries) -> Flags:
        """Return which tokens are kept whatever the rest of their rows holds.

        By their entries and coins alone; the others are asked about. Where the class states
        ``keeps_what_lossless_keeps``, those that lossless sampling keeps.
        """
        if self.keeps_what_lossless_keeps:
            return coin * p_n < q_n
        return torch.zeros_like(q_n, dtype=torch.bool)

    def decide(self, q: Flat, p: Flat, n: FlatIds, coin: FlatCoins) -> Decision:
        """Return whether each drafted token is kept, and what replaces it if not.

        A token is kept iff its coin < φ. Override this where the decision can be made without
        φ, or for less; it must be the same up to rounding.
        """
        kept = coin < self.acceptance(q, p, n[:, None])[:, 0]
        if not kept.is_cuda and bool(kept.all()):
            return Decision(kept, None)
        return Decision(kept, Residual(rows=self.recovery(q, p, n)))

    def ratio_bounds(self, q_n: Entries, p_n: Entries) -> tuple[Entries, Entries]:
        """Return bounds on h_n/p_n in a block, from a token's entries alone; equal if exact.

        A verifier of blocks reads whole rows only where the bounds leave a decision open.
        """
        return torch.zeros_like(q_n), torch.full_like(q_n, torch.inf)

    def follow(self, q: Flat, p: Flat, n: FlatIds, path: Path) -> Step:
        """Return what the row h makes of nodes of a block and the tokens drafted there."""
        row = self.target(q.double(), p.double(), path)
        assert row is not None
        mass = path.alive[:, None] * row
        ratio = mass.gather(-1, n[:, None])[:, 0] / p.gather(-1, n[:, None])[:, 0].double()
        return Step(ratio.nan_to_num_(nan=0.0), Residual(rows=(mass - p).clamp_(min=0.0)))

    @property
    def answers_rows(self) -> bool:
        """Return whether :meth:`follow_row` and, for chains, :meth:`decide_row` answer: faster."""
        return False

    def follow_row(self, node: Node) -> tuple[float, float | None, float | None]:
        """Return P h_n/p_n, the scale s of what is left, and P h/q of certain tokens, of one node.

        h is that of the node's selection law; (P h − p)₊ = (s q − p)₊ at tokens that are not
        certain. From 1 on the first may be any such number. The scale, at most P, may be None
        unless ``node.ends``, and so may the third, the same for all certain tokens with q > 0.
        """
        raise NotImplementedError

    @property
    def highest(self) -> float:
        """Return a bound on h_n/q_n of all tokens of all rows."""
        return math.inf

    def decide_row(self, q: np.ndarray, p: np.ndarray, ratio: float) -> tuple[bool, float]:
        """Return whether a token with coin·p_n/q_n = ``ratio`` is kept; if not, s of its residual.

        Rows (V,) are on the CPU, in one precision; the scale of a token that is kept is arbitrary.
        """
        raise NotImplementedError


def _all_tokens(q: Tensor) -> Tensor:
    return torch.arange(q.shape[-1], device=q.device).expand(q.shape)
