"""Seeded batches of rows, from smooth to spiky."""

import numpy as np
import torch

KINDS = ("smooth", "spiky", "tiny", "zeros")


def rows(*shape: int, seed: int = 0, kind: str = "smooth") -> torch.Tensor:
    """Return float64 distributions of this shape, the last axis being the vocabulary."""
    generator = torch.Generator().manual_seed(seed)

    def uniform():
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    weight = -uniform().log()
    if kind == "spiky":
        weight = (4 * torch.randn(shape, generator=generator, dtype=torch.float64)).exp()
    elif kind == "tiny":
        weight = 10 ** (-30 * uniform())
    elif kind == "zeros":
        weight = weight * (uniform() < 0.6)
        weight[..., 0] += 1e-3
    return weight / weight.sum(-1, keepdim=True)


def pair(*shape: int, seed: int = 0, kinds: tuple[str, str] = ("smooth", "smooth")):
    """Return (target, draft) batches."""
    return rows(*shape, seed=2 * seed, kind=kinds[0]), rows(
        *shape, seed=2 * seed + 1, kind=kinds[1]
    )


def two_tokens(q_n):
    """Return rows (B, K, 2) of drafted tokens with these entries of q, and the tokens' ids."""
    return torch.stack([q_n, 1 - q_n], -1), torch.zeros_like(q_n, dtype=torch.int64)


def numpy_pairs(count, vocab, seed=0):
    """Return random rows (q, p) of numpy, some with zeros, one-hot ones and ties; some p are q."""
    source = np.random.default_rng(seed)
    q, p = source.dirichlet(np.full(vocab, 0.6), (2, count))
    q[::5, 1:3] = 0
    q[::7] = np.eye(vocab)[0]
    q[1::7] = 1 / vocab
    p[::3, 0] = 0
    p[4::9] = np.eye(vocab)[1]
    q, p = (part / part.sum(-1, keepdims=True) for part in (q, p))
    p[2::11] = q[2::11]
    return q, p
