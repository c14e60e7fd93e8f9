"""Rows as wide as a vocabulary, made from a drawn seed because drawing every entry is slow."""

import numpy as np
import torch
from torch import Tensor

# smaller entries become 0, so that float32 holds all; narrow rows test deeper tails
LEAST = 1e-30
# how many tokens a draft cut to its top proposes
TOP = 16
TARGETS = ("zipf", "zipf", "dirichlet", "flat", "zeros")
DRAFTS = ("tempered", "independent", "top", "equal", "over")
# in wider rows every draft is cut to its top, as enumerating drafted tokens takes O(V) each
DENSE = 64


def wide_row(random: np.random.Generator, vocab: int, kind: str) -> np.ndarray:
    """Return a row (V,): a power law, Dirichlet, nearly flat, or a third of it zeros."""
    if kind == "zipf":
        ranks = 1.0 + random.permutation(vocab)
        row = ranks ** -random.uniform(0.5, 3.0)
    elif kind == "dirichlet":
        row = random.gamma(10.0 ** random.integers(-2, 2), size=vocab)
    elif kind == "flat":
        row = 1 + 0.01 * random.uniform(size=vocab)
    else:
        row = random.exponential(size=vocab) * (random.uniform(size=vocab) < 2 / 3)
    row[row < LEAST] = 0.0
    row[int(random.integers(vocab))] += 1e-3
    return row / row.sum()


def wide_pair(vocab: int, seed: int, draft: str | None = None) -> tuple[Tensor, Tensor]:
    """Return (target, draft), float64 rows (V,); ``draft`` names the relation of the two.

    ``tempered``: p ∝ q^a; ``top``: that on its 16 likeliest tokens; ``over``: half of p on
    tokens that are rare in q; ``independent``; ``equal``. Beyond 64 tokens all are cut to 16.
    """
    random = np.random.default_rng(seed)
    q = wide_row(random, vocab, TARGETS[int(random.integers(len(TARGETS)))])
    relation = DRAFTS[int(random.integers(len(DRAFTS)))] if draft is None else draft
    p = q.copy()
    if relation == "independent":
        p = wide_row(random, vocab, TARGETS[int(random.integers(len(TARGETS)))])
    elif relation in ("tempered", "top"):
        p = np.where(q > 0, q, 1.0) ** random.uniform(0.4, 1.6) * (q > 0)
    if relation == "over":
        p += (q < np.median(q) + 1e-9) / vocab
    if relation == "top" or vocab > DENSE:
        p[np.argsort(-p, kind="stable")[TOP:]] = 0.0
    return torch.from_numpy(q), torch.from_numpy(p / p.sum())
