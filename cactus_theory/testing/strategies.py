"""Hypothesis strategies for probability rows, pairs of rows, and budgets.

The strategies favour rows that break samplers: zeros, one-hot rows, entries of 1e-30 or 1e-310
next to entries of 0.3, entries that differ by one rounding, drafts that keep proposing rare
tokens; and budgets of 0 and ∞. Every strategy takes keywords only and draws float64 tensors
unless a dtype is named. Hypothesis shrinks failing examples to few tokens and round numbers.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cactus_theory.base import arguments as check

check.optional_module("hypothesis", "testing")
from hypothesis import strategies as st  # noqa: E402

__all__ = ["budgets", "distributions", "pairs"]

# −log10 of the smallest weight drawn together with weights of order one
TINY_EXPONENT = 30
# an entry of a near tie is moved by at most so many float64 roundings
TIE_ULPS = 4
# powers of ten that the smallest entries of a row span; and −log10 of the smallest entry, before
# the row is divided by its sum, with which ratios p/q are finite except in rare cases
TAIL_SPREAD, DEEPEST_RATIO = 15, 307


def weights(*, zeros: bool = True, tiny: bool = True) -> st.SearchStrategy[float]:
    """Draw one unnormalised entry of a row: 1 … 9, a float from 0.01 to 1, 10^−k (k ≤ 30), or 0."""
    kinds = [st.integers(1, 9).map(float), st.floats(0.01, 1.0)]
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

    With ``zeros`` some entries may be 0, up to one-hot rows; with ``tiny`` entries may be as small
    as about 1e-30. The row sums to 1 up to rounding in ``dtype``.
    """
    entry = weights(zeros=zeros, tiny=tiny)
    return _row(draw(st.lists(entry, min_size=min_vocab, max_size=max_vocab))).to(dtype)


def _row(entries: Sequence[float]) -> Tensor:
    """Return the entries divided by their sum; one-hot on the first token if all are 0."""
    row = torch.tensor(entries, dtype=torch.float64)
    if not row.any():
        row[0] = 1.0
    return row / row.sum()


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
    """Draw a target row and a draft row over one vocabulary, (V,) each.

    The draft row is independent of the target row, equal to the target row, a permutation of the
    target row, or the target row moved by a few float64 roundings.
    """
    # entries are drawn in pairs, so that Hypothesis leaves out a token in one step of shrinking
    relation = draw(st.sampled_from(("independent", "independent", "equal", "shuffled", "near")))
    entry = weights(zeros=zeros, tiny=tiny)
    # beside each entry of the target: one of the draft, or how many roundings to move it by
    seconds = {"independent": entry, "near": st.integers(-TIE_ULPS, TIE_ULPS)}
    both = st.tuples(entry, seconds.get(relation, st.just(0)))
    drawn = draw(st.lists(both, min_size=min_vocab, max_size=max_vocab))
    entries, second = zip(*drawn, strict=True)
    target = _row(entries)
    if relation == "independent":
        draft = _row(second)
    elif relation == "shuffled":
        draft = target[torch.tensor(draw(st.permutations(range(len(target)))))]
    else:  # near, or equal: moved by 0
        draft = target * (1 + torch.tensor(second, dtype=torch.float64) * 2.0**-52)
        draft = draft / draft.sum()
    return target.to(dtype), draft.to(dtype)


@st.composite
def one_hot(draw: st.DrawFn, *, min_vocab: int = 1, max_vocab: int = 10) -> Tensor:
    """Draw a one-hot row (V,)."""
    vocab = draw(st.integers(min_vocab, max_vocab))
    return torch.eye(vocab, dtype=torch.float64)[draw(st.integers(0, vocab - 1))]


@st.composite
def near_ties(draw: st.DrawFn, *, min_vocab: int = 2, max_vocab: int = 10) -> Tensor:
    """Draw a row (V,) of equal entries, each moved by up to four float64 roundings."""
    vocab = draw(st.integers(min_vocab, max_vocab))
    steps = draw(st.lists(st.integers(-TIE_ULPS, TIE_ULPS), min_size=vocab, max_size=vocab))
    row = 1 + torch.tensor(steps, dtype=torch.float64) * 2.0**-52
    return row / row.sum()


@st.composite
def subnormal_tails(
    draw: st.DrawFn, *, min_vocab: int = 2, max_vocab: int = 10, deepest: int = 323
) -> Tensor:
    """Draw a row (V,) with entries down to 10^−deepest; below 1e-308 float64 has fewer digits."""
    vocab = draw(st.integers(min_vocab, max_vocab))
    tail = st.integers(deepest - TAIL_SPREAD, deepest).map(lambda k: float(f"1e-{k}"))
    entries = draw(st.lists(st.one_of(weights(tiny=False), tail), min_size=vocab, max_size=vocab))
    entries[draw(st.integers(0, vocab - 1))] = 1.0
    return _row(entries)


@st.composite
def over_proposing(
    draw: st.DrawFn, *, min_vocab: int = 3, max_vocab: int = 40
) -> tuple[Tensor, Tensor]:
    """Draw rows (target, draft) in which the draft gives much mass to tokens that are rare in q.

    This is the worst case of budgets per proposal: each drafted token is within the budget, but
    all of them together move the emitted law far away from q.
    """
    vocab = draw(st.integers(min_vocab, max_vocab))
    rare = draw(st.integers(1, vocab - 1))
    tail, share = draw(st.integers(1, 9)) / 10, draw(st.integers(5, 10)) / 10
    target, draft = torch.empty(2, vocab, dtype=torch.float64)
    target[:rare], target[rare:] = tail / rare, (1 - tail) / (vocab - rare)
    draft[:rare], draft[rare:] = share / rare, (1 - share) / (vocab - rare)
    return target / target.sum(), draft / draft.sum()


@st.composite
def any_pairs(draw: st.DrawFn, *, min_vocab: int = 1, max_vocab: int = 6) -> tuple[Tensor, Tensor]:
    """Draw rows (target, draft) by any of the strategies above.

    Pairs by :func:`over_proposing` have up to 2 · max_vocab tokens. Entries of
    :func:`subnormal_tails` reach down to 1e-307 before a row is divided by its sum, so that hardly
    any ratio p/q overflows.
    """
    sizes: dict[str, Any] = {"min_vocab": min_vocab, "max_vocab": max_vocab}
    kind = draw(st.sampled_from(("pair", "pair", "rare", "mixed", "mixed")))
    if kind == "pair":
        return draw(pairs(**sizes))
    if kind == "rare" and max_vocab >= 3:
        vocab = draw(st.sampled_from((3, max_vocab, 2 * max_vocab)))
        return draw(over_proposing(min_vocab=vocab, max_vocab=vocab))
    vocab = draw(st.integers(min_vocab, max_vocab))
    sizes = {"min_vocab": vocab, "max_vocab": vocab}
    kinds = [distributions(**sizes), one_hot(**sizes)]
    if vocab > 1:
        kinds += [near_ties(**sizes), subnormal_tails(**sizes, deepest=DEEPEST_RATIO)]
    row = st.one_of(kinds)
    return draw(row), draw(row)


def budgets() -> st.SearchStrategy[float]:
    """Draw a budget δ: 10^k (1e-12 … 1e6), 0, ∞, or any float from 1e-12 to 100."""
    return st.one_of(
        st.integers(-12, 6).map(lambda exponent: 10.0**exponent),
        st.floats(-12, 2).map(lambda exponent: 10.0**exponent),
        st.sampled_from((0.0, math.inf)),
    )


def acceptances() -> st.SearchStrategy[float]:
    """Draw an acceptance that a row is to have: 0, 1 or any number between 0 and 1."""
    return st.one_of(st.floats(0, 1), st.sampled_from((0.0, 1.0)))
