"""Hypothesis strategies for probability rows, pairs of rows and budgets.

They lean towards what breaks samplers: zeros, certain tokens, entries of 1e-30 beside
entries of 0.3, rows that differ by one rounding, budgets of 0 and ∞. Every strategy takes
keywords only and returns float64 tensors unless a dtype is named.
"""

import math

import torch
from torch import Tensor

from cactus_theory import _arguments as check

check.optional_module("hypothesis", "testing")
from hypothesis import strategies as st  # noqa: E402

__all__ = ["acceptances", "budgets", "distributions", "pairs", "weights"]

# the smallest weight beside weights of order one
TINY_EXPONENT = 30
# near ties: factors this many float64 roundings away from 1
TIE_ULPS = 4


def weights(*, zeros: bool = True, tiny: bool = True) -> st.SearchStrategy[float]:
    """Draw one unnormalised entry: of order one, 10^−k down to 1e-30, exactly 1, or 0."""
    kinds = [st.floats(0.01, 1.0), st.just(1.0)]
    if tiny:
        kinds.append(st.integers(1, TINY_EXPONENT).map(lambda k: 10.0**-k))
    if zeros:
        kinds.append(st.just(0.0))
    return st.one_of(kinds)


@st.composite
def distributions(
    draw: st.DrawFn,
    *,
    min_vocab: int = 1,
    max_vocab: int = 10,
    zeros: bool = True,
    tiny: bool = True,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Draw one row (V,) of probabilities, min_vocab ≤ V ≤ max_vocab.

    With ``zeros`` some tokens may be impossible, up to rows certain of one token; with
    ``tiny`` entries go down to 1e-30. The sum misses 1 by rounding in ``dtype`` only.
    """
    vocab = draw(st.integers(min_vocab, max_vocab))
    entries = draw(st.lists(weights(zeros=zeros, tiny=tiny), min_size=vocab, max_size=vocab))
    if sum(entries) == 0:
        entries[draw(st.integers(0, vocab - 1))] = 1.0
    row = torch.tensor(entries, dtype=torch.float64)
    return (row / row.sum()).to(dtype)


@st.composite
def pairs(
    draw: st.DrawFn,
    *,
    min_vocab: int = 1,
    max_vocab: int = 10,
    zeros: bool = True,
    tiny: bool = True,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Draw (target, draft) rows over one vocabulary.

    The draft is independent of the target, equal to it, the target in another order, or
    the target moved by a few float64 roundings.
    """
    kinds = {"min_vocab": min_vocab, "max_vocab": max_vocab, "zeros": zeros, "tiny": tiny}
    target = draw(distributions(**kinds))
    vocab = len(target)
    relation = draw(st.sampled_from(("independent", "independent", "equal", "shuffled", "near")))
    if relation == "independent":
        draft = draw(distributions(**{**kinds, "min_vocab": vocab, "max_vocab": vocab}))
    elif relation == "shuffled":
        draft = target[torch.tensor(draw(st.permutations(range(vocab))))]
    else:
        ulps = st.integers(-TIE_ULPS, TIE_ULPS) if relation == "near" else st.just(0)
        steps = draw(st.lists(ulps, min_size=vocab, max_size=vocab))
        draft = target * (1 + torch.tensor(steps, dtype=torch.float64) * 2.0**-52)
        draft = draft / draft.sum()
    return target.to(dtype), draft.to(dtype)


def budgets(*, zero: bool = True, infinite: bool = True) -> st.SearchStrategy[float]:
    """Draw a budget δ: 0, ∞, or anything between 1e-12 and 100 with every scale as likely."""
    kinds = [st.floats(-12, 2).map(lambda exponent: 10.0**exponent)]
    if zero:
        kinds.append(st.just(0.0))
    if infinite:
        kinds.append(st.just(math.inf))
    return st.one_of(kinds)


def acceptances() -> st.SearchStrategy[float]:
    """Draw a wish for the acceptance of a row: 0, 1 or anything between."""
    return st.one_of(st.floats(0, 1), st.sampled_from((0.0, 1.0)))
