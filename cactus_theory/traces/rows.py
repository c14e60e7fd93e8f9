"""Saved rows in the place of a trace: drafts of one token, averaged over the draft's row."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.base.rows import load_rows
from cactus_theory.policies import Policy
from cactus_theory.policies._path import Path as Place
from cactus_theory.traces._manifest import digest
from cactus_theory.verify.block import Block
from cactus_theory.verify.chain import Chain
from cactus_theory.verify.contract import Verifier
from cactus_theory.verify.draft import Assignment, Draft

Rows = Float[Tensor, "rows vocab"]


@dataclass(frozen=True, eq=False)
class SavedRows:
    """N pairs of rows, each the cycle of a draft of one token and a text of its own.

    The drafted token is averaged over the draft's row, so none is needed. Rows along one text
    are alike; errors that take each for a text of its own are then too small.

    Attributes
    ----------
    target_probs, draft_probs : (N, V) float64 rows that sum to 1.

    Examples
    --------
    >>> rows = SavedRows.of(np.array([[0.2, 0.8], [0.5, 0.5]]), np.array([[0.9, 0.1], [0.6, 0.4]]))
    >>> rows.texts, rows.num_draft_tokens
    (2, 1)
    """

    target_probs: Rows
    draft_probs: Rows
    num_draft_tokens = 1

    @classmethod
    def of(cls, target_probs: check.ArrayLike, draft_probs: check.ArrayLike) -> "SavedRows":
        """Return rows (..., V) as cycles.

        Raises
        ------
        ValueError, TypeError
            Rows that are not distributions over one vocabulary, or none.
        """
        q, p = check.probability_rows(target_probs, draft_probs)
        if not q.numel():
            raise ValueError(f"target_probs: must hold a row; got {check.describe(q)}")
        vocab = q.shape[-1]
        return cls(q.reshape(-1, vocab).contiguous(), p.reshape(-1, vocab).contiguous())

    @classmethod
    def load(cls, target: str | Path, draft: str | Path, *, logits: bool = False) -> "SavedRows":
        """Return the rows of two files, as the command line's audits read them.

        Raises
        ------
        OSError, ValueError, TypeError
            Files that cannot be read, rows that are not distributions over one vocabulary.
        """
        return cls.of(*(load_rows(str(path), logits=logits) for path in (target, draft)))

    @property
    def texts(self) -> int:
        """Return the number of rows."""
        return len(self.target_probs)

    def __len__(self) -> int:
        """Return the number of cycles: rows."""
        return len(self.target_probs)

    @cached_property
    def fingerprint(self) -> str:
        """Return what tells these rows from others: a digest."""
        content = (rows.numpy().tobytes() for rows in (self.target_probs, self.draft_probs))
        return digest(b"".join(content))


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


def start_of_block(rows: int) -> Place:
    """Return the path of rows that begin a block of one drafted token."""
    alive = torch.ones(rows, dtype=torch.float64)
    return Place(alive, torch.zeros(rows, dtype=torch.int64))


def _enumerated(verifier: Verifier, rule: Policy, q: Tensor, p: Tensor) -> Tensor:
    """Return Σ_n p_n alive_1(n) of one row (V,)."""
    total = q.new_zeros(())
    for token in p.nonzero()[:, 0]:
        draft = Draft(token[None, None], [1], p[None, None])
        law = verifier.law(Assignment((rule,)), q.expand(1, 2, -1), draft)
        total += p[token] * law.alive[0, 1]
    return total
