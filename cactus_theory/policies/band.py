"""The policy ``band``: emit the row that accepts most within a divergence budget or at a price."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from cactus_theory.base import arguments as check
from cactus_theory.base.tensors import normalised
from cactus_theory.divergences.definition import known_divergence
from cactus_theory.optimum.band_row import NodeRow
from cactus_theory.optimum.bands import Bands
from cactus_theory.optimum.batch_edges import chosen_knob
from cactus_theory.optimum.boxes import Boxes, boxed_about
from cactus_theory.optimum.look_ahead import LookAhead
from cactus_theory.policies._base_classes import FixedTarget
from cactus_theory.policies.claims import Budget, Declaration
from cactus_theory.policies.knob_values import DivergenceSpec, NotNegative, Share
from cactus_theory.policies.policy import TIE, Entries, PathState, Rows
from cactus_theory.policies.registry import register
from cactus_theory.policies.tilt import Tilted, colder

# the word that stands for the ids that end a text
EOS = "eos"


@register("band")
@dataclass(frozen=True)
class Band(Tilted, FixedTarget):
    r"""Emit the row that accepts most within a budget: :math:`h = \mathrm{clip}(p, aq, bq)`.

    The edges a ≤ 1 ≤ b of this band follow from the budget or the price. A drafted token n is
    accepted with probability min(1, b q_n/p_n). Source: THEORY.md, Theorem 7. For
    ``divergence=reverse_kl`` the band is mentored decoding (Tran-Thien 2023; Tran-Thien & Nock,
    arXiv 2609.30474); in blocks, mentored decoding has the rows of ``per_row=True``.

    In blocks and trees a node is reached with the alive ratio P, the probability that the tokens
    before the node are all accepted. At a price the best row there is the band of p/P: the band
    with p/P in place of p (:mod:`cactus_theory.optimum.band_row`). The tokens of a deterministic
    draft (greedy, n-gram) are known in advance. So at a price of KL the rows depend on later
    drafted tokens, too, and the emitted law is the best of all laws of blocks
    (:mod:`cactus_theory.optimum.look_ahead`). The band of p is kept in blocks within a budget, at a
    price of 0, and for Rényi's divergence, whose price depends on the divergence spent.

    Parameters
    ----------
    delta : the divergence that every row may spend, ≥ 0. Exactly one of ``delta`` and ``price``
        must be given.
    price : the least gain in acceptance for which one more unit of divergence is spent, in tokens
        per unit, ≥ 0. One price for all rows is the best way to share a budget among them.
    divergence : spec of the divergence of h from q.
    per_row : if True, rows in blocks are bands of p, not p/P, even at a price; for comparisons.
    head : a share, from 0 to 1. The head is the tokens with at least this share of the largest q.
        Only they are raised: :math:`h = \mathrm{clip}(p, aq, \min(b, c)q)` with c = ∞ on the head
        and 1 off it (Theorem 24). 0 is the plain band; 1 raises the likeliest token alone. With a
        head even a price of 0 does not accept every token. Where a tree has several tokens drafted
        after one node, this row is emitted exactly, but is not the best row.
    floor : token ids, as ``2+151645``, that after every prefix are at least as likely as under the
        target (Theorem 25). ``eos`` stands for the ids that end a text (:meth:`at_ends`).
    hold : token ids that after every prefix are exactly as likely as under the target. So
        ``hold=eos`` keeps the target's probability of ending.
    tilt : see :mod:`cactus_theory.policies.tilt`; only with a price of KL.

    ``head``, ``floor`` and ``hold`` are bounds c q ≤ h ≤ C q on single tokens, called boxes
    (:mod:`cactus_theory.optimum.boxes`). q is the target's row here even if there is a ``tilt``.
    With boxes and a tilt, rows do not depend on later drafted tokens.
    """

    delta: NotNegative | None = None
    price: NotNegative | None = None
    divergence: DivergenceSpec = "kl"
    per_row: bool = False
    head: Share = 0.0
    floor: str = ""
    hold: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        chosen_knob(known_divergence(self.divergence), delta=self.delta, price=self.price)
        for name in ("floor", "hold"):
            ids = _token_ids(name, getattr(self, name), ends=(EOS,))
            object.__setattr__(self, name, "+".join(map(str, ids)))
        if self.tilt and (self.price is None or self.divergence != "kl"):
            rule = "goes with a price of kl; ct.tilted_acceptance solves rows within a budget"
            raise ValueError(f"tilt: {rule}; got {self.spec!r}")

    def at_ends(self, token_ids: Iterable[int]) -> "Band":
        """Return the band with the ids in place of ``eos``; ValueError for ``eos`` without ids."""
        if EOS not in self.floor + self.hold:
            return self
        ends = tuple(token_ids)
        knobs = {name: _token_ids(name, getattr(self, name), ends) for name in ("floor", "hold")}
        return replace(self, **{name: "+".join(map(str, ids)) for name, ids in knobs.items()})

    @cached_property
    def boxes(self) -> Boxes:
        """Return the boxes; ``head`` is lowered a little, so that rounding decides no ties."""
        floor, hold = (_token_ids(name, getattr(self, name)) for name in ("floor", "hold"))
        return Boxes(self.head * (1 - TIE), floor, hold)

    @property
    def boxed(self) -> bool:
        """Return whether there are boxes, bounds on h/q of single tokens."""
        return bool(self.head or self.floor or self.hold)

    @property
    def tilt_of_rows(self) -> float:
        """Return the tilt of the rows to verify against; 0 with boxes, which refer to q itself."""
        return 0.0 if self.boxed else self.tilt

    @property
    def between(self) -> bool:  # type: ignore[override]
        """Return whether h lies pointwise between q and p."""
        return not (self.tilt and self.boxed)

    @cached_property
    def bands(self) -> Bands:
        """Return the solver of bands at this policy's divergence, budget or price, and boxes."""
        return Bands(known_divergence(self.divergence), self.delta, self.price, self.boxes)

    @cached_property
    def of_path(self) -> bool:
        """Return whether the row at a node of a block is the band of p/P rather than of p."""
        return self.bands.priced is not None and not self.per_row

    @property
    def highest(self) -> float:  # type: ignore[override]
        """Return an upper bound on h/q of all tokens, at the nodes of blocks, too."""
        if not self.between:
            return math.inf
        if self.bands.priced is not None:
            return self.bands.priced.high
        return 1.0 if self.price == math.inf else math.inf

    @cached_property
    def look_ahead(self) -> LookAhead | None:  # type: ignore[override]
        """Return the solver for blocks of deterministic drafts; None if h ignores later tokens."""
        if self.price is None or not self.of_path or self.divergence != "kl" or not self.between:
            return None
        return LookAhead(self.price, self.boxes)

    def bounds(self, q_n: Entries, p_n: Entries) -> tuple[Entries, Entries]:
        """Return bounds on h_n/p_n: q_n/p_n from below, and ``highest`` times q_n/p_n from above.

        In a block h_n may be below q_n where P q_n ≥ p_n. The lower bound is wrong there, but does
        no harm: P h_n ≥ p_n, so that the next alive ratio is 1 in any case. If rows do not depend
        on P, h lies between p and q, so that both bounds lie on the same side of 1.
        """
        if not self.between:
            return super().bounds(q_n, p_n)
        ratio, highest = (q_n / p_n).nan_to_num(nan=0.0), self.highest
        raised = ratio * highest if highest < math.inf else torch.where(ratio > 0, highest, 0.0)
        if self.of_path:
            return ratio, raised
        least = torch.where(p_n > 0, ratio.clamp(max=1.0), ratio)  # p = 0: accepted, as in a block
        return least, torch.maximum(raised.clamp(max=1.0), ratio)

    def row(self, q: np.ndarray, p: np.ndarray, alive: float = 1.0) -> NodeRow | None:
        """Return the solver of a node's row, the band of p/P or p; None if ``target`` solves it."""
        if not self.between:
            return None
        row = self.bands.row(q, p, alive if self.of_path else 1.0)
        if row is not None and not self.of_path:
            row.factor = alive  # the row is solved for P = 1: g is P times that row
        return row

    def target(self, q: Rows, p: Rows, path: PathState | None = None) -> Rows:
        """Return the band h = clip(p, max(a, c)q, min(b, C)q) with boxes c, C; 0 where q = 0.

        At the nodes of a ``path`` p/P takes the place of p if ``of_path``. If ``path.raised`` is
        given, h has these entries at the drafted tokens.
        """
        if not self.between:
            drafted = p if path is None or not self.of_path else p / path.alive[..., None]
            return self._boxed_about(q, drafted)
        if path is None or not self.of_path:
            return self.bands.laws(q, p)
        if path.raised is not None and self.look_ahead is not None:
            return self.look_ahead.law(q, p, path.raised)
        return self.bands.laws(q, p, path.alive)

    def tilted(self, q: Rows) -> Rows:
        """Return the row emitted where nothing was drafted: q^θ ∝ q^(1+θ), within the boxes."""
        return super().tilted(q) if self.between else self._boxed_about(q, torch.zeros_like(q))

    def _boxed_about(self, q: Rows, p: Rows) -> Rows:
        """Return the rows h for a tilt and boxes; p = 0 gives the row where nothing was drafted."""
        flat, drafted = (rows.detach().reshape(-1, rows.shape[-1]).double() for rows in (q, p))
        flat, price = normalised(flat), self.price
        assert price is not None  # the only knob that goes with a tilt
        # f′(b) − f′(a) is 1/price; the price may be 0 or ∞
        step = 0.0 if price == math.inf else math.inf if price == 0 else 1 / price
        h = boxed_about(colder(flat, self.tilt), flat, drafted, self.boxes, step)
        return h.div_(h.sum(-1, keepdim=True)).reshape(q.shape)

    @property
    def knob(self) -> str:  # type: ignore[override]
        """Return the knob in use, delta or price."""
        return "price" if self.delta is None else "delta"

    @property
    def declares(self) -> Declaration:
        """Return: with delta: divergence of h from q at most delta; with price: no bound."""
        facts: Any = {"between": True, "at_least_speculative": True, "continuous": not self.head}
        facts |= {"floored": self.boxes.ids, "held": self.boxes.held}
        if self.delta is None:
            return Declaration(direction=-1, strict=math.inf, budget=None, **facts)
        budget = Budget(self.divergence, self.delta, "emitted")
        optimal = not self.boxed
        return Declaration(direction=1, strict=0.0, budget=budget, **facts, optimal=optimal)


def _token_ids(name: str, text: str, ends: Iterable[Any] = ()) -> tuple[Any, ...]:
    """Return the different ids in ``text``, such as ``2+eos``, with ``ends`` for ``eos``."""
    parts = set(text.split("+")) if text else set[str]()
    if not all(part.isascii() and part.isdigit() for part in parts - {EOS}):
        raise ValueError(f"{name}: must be token ids, as 2+151645, or eos; got {text!r:.80}")
    if EOS in parts and not ends:
        rule = "eos stands for the ends of a model's texts, and none are known here"
        raise ValueError(f"{name}: {rule}; write their ids, as {name}=2+151645; got {text!r:.80}")
    ids = {check.whole_number(name, int(part), 0) for part in parts - {EOS}}
    every = {*ids, *(ends if EOS in parts else ())}
    # ``eos`` comes last: a word cannot be compared with numbers
    return tuple(sorted(every, key=lambda token: (token == EOS, token)))
