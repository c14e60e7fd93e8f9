"""The optimum under a budget on the emitted law, as a policy."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.base.arguments import float64_rows
from cactus_theory.base.tolerances import LEAST
from cactus_theory.divergences import Divergence, FDivergence
from cactus_theory.divergences.definition import registered_divergence as find_divergence
from cactus_theory.optimum import edges
from cactus_theory.optimum.look_ahead import LookAhead, with_raised
from cactus_theory.optimum.rows import (
    BudgetRow,
    NodeRow,
    PricedBand,
    PricedRow,
    is_compiled,
    path_rows,
)
from cactus_theory.policies._base_classes import FixedTarget
from cactus_theory.policies._decisions import Budget, Declaration, Path
from cactus_theory.policies._policy import (
    TIE,
    Entries,
    Flat,
    Ids,
    Rows,
    accept_probability,
)
from cactus_theory.policies._registry import register

# least budget δ of rows that are solved one by one: below it their divergence is mostly rounding
LEAST_BUDGET = 1e-6
# the word for the ids that end a text
EOS = "eos"
# most float64 entries of the rows of blocks that are solved together
TOGETHER = 2**18


@register("band")
@dataclass(frozen=True)
class Band(FixedTarget):
    r"""Verify against the best row within the budget: :math:`h = \mathrm{clip}(p, aq, bq)`.

    By ``delta`` every row may spend that much divergence; by ``price``, in tokens per unit of
    divergence, every row spends until one more unit buys less than that much acceptance, which
    is the best way to share a budget among rows. Accept n with min(1, b q_n/p_n). Source:
    THEORY.md, Theorem 7; for reverse_kl this is mentored decoding (Tran-Thien 2023).

    In blocks and trees a price gives the best row at a node that is reached with the alive ratio
    P, the band of p/P (:mod:`cactus_theory.optimum.rows`). A deterministic draft (greedy,
    n-gram) is known to its end, so that under KL its law is the best of all laws of blocks
    (:mod:`cactus_theory.optimum.look_ahead`). Every row keeps the band it would have by itself
    with ``per_row``, for comparisons, within a budget, at a price of 0, and for Rényi's
    divergence, whose price depends on what a row spends.

    With ``head`` only the likeliest tokens rise, those of at least that share of the likeliest
    one's probability: :math:`h = \mathrm{clip}(p, aq, \min(b, c)q)` with c = ∞ on this head and 1
    off it (Theorem 24). 0 is the band, 1 raises the likeliest alone. A price of 0 then accepts
    what may be accepted so, and not everything. Beside siblings it is lawful, not the best.

    Tokens of ``floor`` are never less likely than under the target, those of ``hold`` exactly as
    likely, at every prefix: token ids, as ``2+151645`` (Theorem 25). ``eos`` stands for the ids
    that end a text, for whoever knows them (:meth:`at_ends`). Held ends of text keep the chance of
    ending. Such rows are solved together and do not look ahead.
    """

    delta: float | None = None
    price: float | None = None
    divergence: str = "kl"
    per_row: bool = False
    head: float = 0.0
    floor: str = ""
    hold: str = ""

    between = True

    def __post_init__(self) -> None:
        kind = find_divergence(self.divergence)
        name, amount, _ = edges.chosen_knob(kind, delta=self.delta, price=self.price)
        object.__setattr__(self, name, check.number(name, amount, 0))
        object.__setattr__(self, "divergence", kind.spec)
        object.__setattr__(self, "head", check.number("head", self.head, 0, 1))
        for name in ("floor", "hold"):
            ids = _token_ids(name, getattr(self, name), ends=(EOS,))
            object.__setattr__(self, name, "+".join(map(str, ids)))

    def at_ends(self, token_ids: Iterable[int]) -> "Band":
        """Return the band with ``eos`` read as these ids; ValueError for none where it is meant."""
        if EOS not in self.floor + self.hold:
            return self
        ends = tuple(token_ids)
        own = {name: _token_ids(name, getattr(self, name), ends) for name in ("floor", "hold")}
        return replace(self, **{name: "+".join(map(str, ids)) for name, ids in own.items()})

    @cached_property
    def kind(self) -> Divergence:
        """Return the divergence."""
        return find_divergence(self.divergence)

    @cached_property
    def held(self) -> tuple[int, ...]:
        """Return the ids of ``hold``."""
        return _token_ids("hold", self.hold)

    @cached_property
    def floored(self) -> tuple[int, ...]:
        """Return the ids of ``hold`` and ``floor``, whose h is at least q."""
        return (*self.held, *_token_ids("floor", self.floor))

    @property
    def boxed(self) -> bool:
        """Return whether h/q of single tokens is bounded, by the head or by their ids."""
        return bool(self.head or self.floor or self.hold)

    @cached_property
    def priced(self) -> PricedBand | None:
        """Return the constants of all rows' bands at the price of an f-divergence, else None."""
        kind = self.kind
        if self.price is None or not 0 < self.price < math.inf:
            return None
        return PricedBand(kind, self.price) if isinstance(kind, FDivergence) else None

    @cached_property
    def of_path(self) -> PricedBand | None:
        """Return ``priced`` if bands of blocks depend on the path to a row (p/P), else None."""
        return None if self.per_row else self.priced

    @cached_property
    def highest(self) -> float:  # type: ignore[override]
        """Return a bound on h/q; of the band of p/P, on that over P."""
        if self.priced is not None:
            return self.priced.high
        return 1.0 if self.price == math.inf else math.inf

    @cached_property
    def look_ahead(self) -> LookAhead | None:  # type: ignore[override]
        """Return the best law of blocks of deterministic drafts, at a price of KL."""
        if self.of_path is None or self.divergence != "kl" or self.floored:
            return None
        return LookAhead(self.of_path.price, self._least_share)

    def bounds(self, q_n: Entries, p_n: Entries) -> tuple[Entries, Entries]:
        """Return q_n/p_n and the most that it is raised to.

        On a path P h_n ≥ p_n from P q_n ≥ p_n on; rows by themselves are raised to p_n at most.
        """
        ratio, most = (q_n / p_n).nan_to_num(nan=0.0), self.highest
        raised = ratio * most if most < math.inf else torch.where(ratio > 0, most, 0.0)
        if self.of_path is not None:
            return ratio, raised
        return ratio.clamp(max=1.0), torch.maximum(raised.clamp(max=1.0), ratio)

    def row(
        self, q: np.ndarray, p: np.ndarray, alive: float = 1.0, certain: Sequence[int] = ()
    ) -> NodeRow | None:
        """Return the row's band, of p/P at a price and else of p, where it is solved by itself."""
        if not self._by_row or (certain and (self.head or self.priced is None)):
            return None
        if self.of_path is not None:
            return self._row(q, p, alive, certain)
        row = self._row(q, p, certain=certain)
        row.factor = alive
        return row

    @property
    def knob(self) -> str:  # type: ignore[override]
        """Return the knob in use, delta or price."""
        return "price" if self.delta is None else "delta"

    @property
    def declares(self) -> Declaration:
        """Return: the emitted divergence within delta, or no bound when priced."""
        facts: Any = {"between": True, "at_least_speculative": True, "continuous": not self.head}
        facts |= {"floored": self.floored, "held": self.held}
        if self.delta is None:
            return Declaration(-1, math.inf, None, **facts)
        budget = Budget(self.divergence, self.delta, "emitted")
        return Declaration(1, 0.0, budget, **facts, optimal=not self.boxed)

    def edges(self, q: Rows, p: Rows) -> tuple[Tensor, Tensor]:
        """Return (a, b) of each row, (..., 1), without a sort where the search for them converges.

        Those of q and p over their sums, times Σp/Σq: rounded rows need not sum to 1. b = ∞ and
        a = 0 stand for h = p.
        """
        flat_q, flat_p = (row.detach().double().reshape(-1, row.shape[-1]) for row in (q, p))
        if q.device.type == "cpu" and self._by_row and len(flat_q):
            rows = zip(flat_q.numpy(), flat_p.numpy(), strict=True)
            solved = [self._row(*row).edges for row in rows]
            lower, upper = torch.tensor(solved, dtype=torch.float64, device="cpu").unbind(-1)
        else:
            lower, upper = self._edges_of_laws(flat_q, flat_p)
        shape = (*q.shape[:-1], 1)
        return lower.reshape(shape), upper.reshape(shape)

    def target(self, q: Rows, p: Rows, path: Path | None = None) -> Rows:
        """Return h = clip(p, max(a, c)q, min(b, C)q), 0 where q = 0; on a ``path`` that of p/P.

        Drafted tokens are raised to h_n where the path has ``raised``.
        """
        if path is not None and self.of_path is not None and q.numel():
            return self._along(path, q, p, self.of_path)
        q, p = float64_rows(q, p)
        return self._cut(p, *self.edges(q, p), q)

    def acceptance(self, q: Rows, p: Rows, n: Ids) -> Float[Tensor, "*batch m"]:
        """Return min(1, b q_n/p_n); only the upper edge is needed."""
        q, p = float64_rows(q, p)
        q_n, p_n = q.gather(-1, n), p.gather(-1, n)
        return _kept(self._most(q, q_n, self.edges(q, p)[1], n), q_n, p_n)

    def _along(self, path: Path, q: Rows, p: Rows, band: PricedBand) -> Rows:
        if path.raised is not None:
            return with_raised(q, p, path.raised)
        flat = [row.reshape(-1, q.shape[-1]) for row in (q, p)]
        size = max(1, TOGETHER // q.shape[-1])
        parts = zip(*(part.split(size) for part in (*flat, path.alive.reshape(-1))), strict=True)
        solve = self._boxed_rows if self.boxed else path_rows
        rows = [solve(own_q, own_p, alive, band) for own_q, own_p, alive in parts]
        return torch.cat(rows).reshape(q.shape)

    def _boxed_rows(self, q: Rows, p: Rows, alive: Tensor, band: PricedBand) -> Rows:
        """Return the rows h at nodes with these P, cut to the boxes of single tokens."""
        q, p = check.normalised(q), check.normalised(p)
        alive = torch.where(alive > 0, alive.double(), 1.0)
        lower, upper = edges.edges(q, p, band.f, price=band.price, **self._boxes(q), alive=alive)
        h = self._cut(p / alive[:, None], lower, upper, q)
        return h.div_(h.sum(-1, keepdim=True))

    def _cut(self, p: Rows, lower: Tensor, upper: Tensor, q: Rows) -> Rows:
        """Return clip(p, max(a, c)q, min(b, C)q)."""
        if self.floored:
            lower = torch.maximum(lower, self._floor(q))
        return _clipped(p, lower, self._most(q, q, upper), q)

    def _boxes(self, q: Rows) -> dict[str, Tensor]:
        """Return floors c and ceilings C of h/q, as far as there are any."""
        floor = {"floor": self._floor(q)} if self.floored else {}
        if not (self.head or self.held):
            return floor
        none = torch.full_like(q[:, :1], math.inf, dtype=torch.float64)
        return floor | {"ceiling": self._most(q, q, none).expand_as(q)}

    def _floor(self, q: Rows) -> Tensor:
        """Return 1 at tokens that may not fall, else 0; ValueError for ids beyond the rows."""
        if max(self.floored) >= q.shape[-1]:
            raise ValueError(
                f"floor, hold: must be below the rows' {q.shape[-1]} tokens; "
                f"got {max(self.floored)}"
            )
        floor = torch.zeros_like(q, dtype=torch.float64)
        floor[..., list(self.floored)] = 1.0
        return floor

    def _most(self, q: Rows, q_n: Entries, upper: Tensor, n: Ids | None = None) -> Tensor:
        """Return min(b, C) of tokens (..., m), all without ``n``, of rows by b (..., 1)."""
        if self.held:
            ids = torch.tensor(self.held, device=q.device)
            at = torch.arange(q.shape[-1], device=q.device) if n is None else n
            upper = torch.where(torch.isin(at, ids), upper.clamp(max=1.0), upper)
        if not self.head:
            return upper
        least = self._least_share * q.amax(-1, keepdim=True).double()
        return torch.where(q_n >= least, upper, upper.clamp(max=1.0))

    @cached_property
    def _least_share(self) -> float:
        """Return ``head`` less the rounding that dividing a row by its sum may add to a tie."""
        return self.head * (1 - TIE)

    def _edges_of_laws(self, q: Flat, p: Flat) -> tuple[Tensor, Tensor]:
        """Return (a, b), (R,), of all rows together: those of laws, times Σp/Σq."""
        unit = p.sum(-1, dtype=torch.float64) / q.sum(-1, dtype=torch.float64)
        # rows without mass, or with ∞, are refused at a draw
        unit = torch.where((unit > 0) & (unit < math.inf), unit, 1.0)
        q, p = map(check.normalised, (q, p))
        if not _all_normal(q):
            q = torch.where(q < LEAST, 0.0, q)  # NaN stays
        knobs: Any = {"delta": self.delta, "price": self.price, **self._boxes(q)}
        lower, upper = edges.edges(q, p, self.kind, **knobs)
        return unit * lower[:, 0], unit * upper[:, 0]

    @cached_property
    def _by_row(self) -> bool:
        """Return whether bands of rows on a CPU are solved one by one, by compiled loops."""
        f = self.kind.generator
        if self.floored or f is None or not is_compiled(f):
            return False
        within = not self.head and LEAST_BUDGET < (self.delta or 0.0) < math.inf
        return within or self.priced is not None

    def _row(
        self, q: np.ndarray, p: np.ndarray, alive: float = 1.0, certain: Sequence[int] = ()
    ) -> PricedRow | BudgetRow:
        """Return the band of one row on a CPU."""
        if self.priced is not None:
            return PricedRow(q, p, self.priced, alive, certain, self._least_share)
        f = self.kind.generator
        assert f is not None and self.delta is not None
        delta = torch.tensor(self.delta, dtype=torch.float64, device="cpu")
        return BudgetRow(q, p, f, float(self.kind.to_generator(delta)))


def _token_ids(name: str, text: str, ends: Iterable[Any] = ()) -> tuple[Any, ...]:
    """Return the ids of ``2+151645``, each once, with ``ends`` in the place of ``eos``."""
    parts = set(text.split("+")) if text else set()
    if not all(part.isascii() and part.isdigit() for part in parts - {EOS}):
        raise ValueError(f"{name}: must be token ids, as 2+151645, or eos; got {text!r:.80}")
    if EOS in parts and not ends:
        rule = "eos stands for the ends of a model's texts, and none are known here"
        raise ValueError(f"{name}: {rule}; write their ids, as {name}=2+151645; got {text!r:.80}")
    ids = {check.whole_number(name, int(part), 0) for part in parts - {EOS}}
    every = {*ids, *(ends if EOS in parts else ())}
    return tuple(sorted(every, key=lambda token: (token == EOS, token)))


def _all_normal(q: Tensor) -> bool:
    """Return whether every entry is a normal number; False on a GPU, to wait for nothing."""
    return bool(q.numel()) and not q.is_cuda and float(q.amin()) >= LEAST


def _ceiling(upper: Tensor, q: Tensor) -> Tensor:
    """Return bq, but q where q is no normal number: such a token may not rise."""
    if _all_normal(q):
        return upper * q
    inside = q >= LEAST
    return torch.where(inside, upper * torch.where(inside, q, 1.0), q)


def _clipped(p: Tensor, lower: Tensor, upper: Tensor, q: Tensor) -> Tensor:
    """Return clip(p, aq, bq)."""
    return torch.maximum(torch.minimum(p, _ceiling(upper, q)), lower * q)


def _kept(upper: Tensor, q_n: Tensor, p_n: Tensor) -> Tensor:
    """Return min(1, b q_n/p_n), with b = 1 where q_n is no normal number."""
    return accept_probability(_ceiling(upper, q_n), p_n)
