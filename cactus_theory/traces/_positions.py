"""A draft of one token, averaged over the row it would be drawn from."""

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.policies import Policy
from cactus_theory.policies._path import Path
from cactus_theory.verify.block import Block
from cactus_theory.verify.chain import Chain
from cactus_theory.verify.contract import Assignment, Draft, Verifier

Rows = Float[Tensor, "rows vocab"]


def mean_alive(
    verifier: Verifier, rule: Policy, q: Rows, p: Rows
) -> tuple[Float[Tensor, "rows"], Rows]:
    """Return the probability that the token drafted from p is accepted, and the emitted law.

    Σ p φ for the chain and Σ min(p, h) for blocks, which at one token is the same for a
    fixed h; any other verifier's law is enumerated over tokens, O(V²) a row.
    """
    emitted = verifier.emitted(rule, q, p, start_of_block(len(q)))
    if isinstance(verifier, Chain):
        return (p * rule.keep(q, p)).sum(-1), emitted
    if isinstance(verifier, Block):
        return torch.minimum(p, emitted).sum(-1), emitted
    kept = [_enumerated(verifier, rule, *rows) for rows in zip(q, p, strict=True)]
    return torch.stack(kept), emitted


def start_of_block(rows: int) -> Path:
    """Return the path of rows that begin a block of one drafted token."""
    alive = torch.ones(rows, dtype=torch.float64)
    return Path(alive, torch.zeros(rows, dtype=torch.int64))


def _enumerated(verifier: Verifier, rule: Policy, q: Tensor, p: Tensor) -> Tensor:
    """Return Σ_n p_n alive_1(n) of one row (V,)."""
    total = q.new_zeros(())
    for token in p.nonzero()[:, 0]:
        draft = Draft(token[None, None], [1], p[None, None])
        law = verifier.law(Assignment((rule,)), q.expand(1, 2, -1), draft)
        total += p[token] * law.alive[0, 1]
    return total
