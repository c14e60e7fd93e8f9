"""Strategies that return a problem together with its answer, derived by hand.

A check against them shares no code with what it checks.

Examples
--------
>>> from hypothesis import given, settings
>>> @settings(max_examples=5)
... @given(families.two_token_pairs())
... def check(known):
...     lossless = ct.audit(ct.policy("speculative"), known.target, known.draft)
...     assert abs(lossless.acceptance - known.speculative) < 1e-9
>>> check()
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cactus_theory.base import arguments as check

check.optional_module("hypothesis", "testing")
from hypothesis import strategies as st  # noqa: E402

__all__ = ["two_token_optima"]


@dataclass(frozen=True)
class Known:
    """A pair of rows (V,) with numbers about it.

    Attributes
    ----------
    target, draft : the rows.
    speculative : Σ min(p, q), the acceptance of lossless speculative sampling.
    kl : KL(draft‖target) in nats.
    """

    target: Tensor
    draft: Tensor
    speculative: float
    kl: float


@dataclass(frozen=True)
class KnownOptimum:
    """A pair of rows (V,), a KL budget, and the best that any policy can do within it.

    Attributes
    ----------
    target, draft : the rows.
    delta : KL budget of the emitted law, in nats.
    emitted : (V,) the best row. ``acceptance`` : its overlap with the draft.
    """

    target: Tensor
    draft: Tensor
    delta: float
    emitted: Tensor
    acceptance: float


def _two(x: float) -> Tensor:
    return torch.tensor([x, 1 - x], dtype=torch.float64)


def _two_point_kl(x: float, y: float) -> float:
    """Return KL((x, 1 − x)‖(y, 1 − y)) for 0 < y < 1."""
    return sum(a * math.log(a / b) for a, b in ((x, y), (1 - x, 1 - y)) if a > 0)


@st.composite
def uniform_overlaps(draw: st.DrawFn, *, max_vocab: int = 40) -> Known:
    """Draw q uniform on V tokens and p uniform on m of them.

    Σ min(p, q) = m/V and D_f(p‖q) = (m/V) f(V/m) + (1 − m/V) f(0); for KL that is ln(V/m).
    """
    vocab = draw(st.integers(1, max_vocab))
    chosen = draw(st.integers(1, vocab))
    draft = torch.zeros(vocab, dtype=torch.float64)
    draft[:chosen] = 1 / chosen
    target = torch.full((vocab,), 1 / vocab, dtype=torch.float64)
    return Known(target, draft, chosen / vocab, math.log(vocab / chosen))


@st.composite
def two_token_pairs(draw: st.DrawFn) -> Known:
    """Draw q = (x, 1 − x) and p = (y, 1 − y): Σ min(p, q) = 1 − |x − y|."""
    inside = st.integers(1, 99).map(lambda k: k / 100)
    x, y = draw(inside), draw(inside)
    return Known(_two(x), _two(y), 1 - abs(x - y), _two_point_kl(y, x))


@st.composite
def two_token_optima(draw: st.DrawFn) -> KnownOptimum:
    """Draw q = (x, 1 − x), p = (y, 1 − y), and a row h = (z, 1 − z) on the way from q to p.

    With two tokens there is only one direction. Within the budget KL(h‖q) a policy can emit h
    and nothing closer to p, so the best acceptance is 1 − |y − z|.
    """
    inside = st.integers(1, 99).map(lambda k: k / 100)
    x, y, share = draw(inside), draw(inside), draw(st.integers(0, 10)) / 10
    z = x + share * (y - x)
    return KnownOptimum(_two(x), _two(y), _two_point_kl(z, x), _two(z), 1 - abs(y - z))
