"""Hold saved rows that stand in for a trace, and compute means of a policy over many rows."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.base import tensors
from cactus_theory.base.threads import one_thread
from cactus_theory.divergences import Divergence
from cactus_theory.emitted import best_acceptance, directions, law_and_acceptance
from cactus_theory.policies import Policy
from cactus_theory.traces.estimate import Estimate, ratio_of_sums
from cactus_theory.traces.folder import digest
from cactus_theory.traces.trace import ENTRIES, Trace

Rows = Float[Tensor, "rows vocab"]


@dataclass(frozen=True, eq=False)
class SavedRows:
    """N pairs of a target row and a draft row, each counted as a separate text.

    If several rows come from one text, standard errors are too small, because such rows are alike.

    Attributes
    ----------
    target_probs, draft_probs : (N, V) float64 rows that sum to 1.
    """

    target_probs: Rows
    draft_probs: Rows

    @classmethod
    def of(cls, target_probs: tensors.ArrayLike, draft_probs: tensors.ArrayLike) -> "SavedRows":
        """Return given rows (..., V), checked and flattened to (N, V).

        Raises
        ------
        ValueError, TypeError
            Rows that are not distributions over one vocabulary, or no rows.
        """
        q, p = tensors.probability_rows(target_probs, draft_probs)
        if not q.numel():
            raise ValueError(f"target_probs: must hold a row; got {tensors.describe(q)}")
        vocab = q.shape[-1]
        return cls(q.reshape(-1, vocab).contiguous(), p.reshape(-1, vocab).contiguous())

    @property
    def texts(self) -> int:
        """Return the number of rows."""
        return len(self.target_probs)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.target_probs)

    @cached_property
    def fingerprint(self) -> str:
        """Return a digest of the rows."""
        content = (rows.numpy().tobytes() for rows in (self.target_probs, self.draft_probs))
        return digest(b"".join(content))


Source = Trace | SavedRows


@dataclass(frozen=True, eq=False)
class RowMeans:
    """Means over rows of what a policy accepts, emits and spends.

    Attributes
    ----------
    policy : the policy's spec.
    acceptance : mean of Σ p φ.
    divergence : mean of D(h‖q) of the emitted law h, nats for KL.
    entropy, surprise, agreement : means of :func:`cactus_theory.emitted.directions` of h.
    largest : the largest divergence of a row.
    share : mean acceptance over the mean of the best acceptance of each row at the divergence that
        the policy spends there; above 1 only if tokens with q = 0 are emitted; ∞ if not computed.
    """

    policy: str
    acceptance: Estimate
    divergence: Estimate
    entropy: Estimate
    surprise: Estimate
    agreement: Estimate
    largest: float
    share: Estimate


@one_thread()
def row_means(policy: Policy, source: Source, kind: Divergence, best: bool = False) -> RowMeans:
    """Return the means of a policy over all rows, with ``share`` if ``best`` is true."""
    sums, largest = np.zeros((7, source.texts)), 0.0  # by text
    for text, q, p in row_pairs(source, ENTRIES):
        law, accepted = law_and_acceptance(policy, q, p)
        spent = kind.value(law, q)
        largest = max(largest, float(spent.max()))
        optimum = best_acceptance(q, p, kind, spent) if best else torch.zeros_like(spent)
        parts = torch.ones_like(spent), accepted, optimum, spent, *directions(law, q)
        np.add.at(sums.T, text.numpy(), torch.stack(parts, -1).numpy())
    rows, accepted, optima, *others = sums
    divergence, entropy, surprise, agreement = (
        ratio_of_sums(other, rows, source.fingerprint) for other in others
    )
    return RowMeans(
        policy.spec,
        acceptance=ratio_of_sums(accepted, rows, source.fingerprint),
        divergence=divergence,
        entropy=entropy,
        surprise=surprise,
        agreement=agreement,
        largest=largest,
        share=ratio_of_sums(accepted, optima, source.fingerprint),
    )


def row_pairs(
    source: Source, entries: int = ENTRIES
) -> Iterator[tuple[Int[Tensor, "n"], Rows, Rows]]:
    """Yield batches of all places with a draft row: text numbers, target rows and draft rows.

    A batch has at most ``entries`` numbers in its target rows, but at least one pair of saved rows,
    or one cycle (logged round) of a trace.
    """
    if isinstance(source, SavedRows):
        size = max(1, entries // source.target_probs.shape[-1])
        for numbers in torch.arange(len(source), device="cpu").split(size):
            yield numbers, source.target_probs[numbers], source.draft_probs[numbers]
        return
    for batch in source.batches(entries):
        if batch.draft_probs is not None:
            width = batch.draft_probs.shape[1]
            target = batch.target_probs[:, :-1].flatten(0, 1)
            yield batch.text.repeat_interleave(width), target, batch.draft_probs.flatten(0, 1)
