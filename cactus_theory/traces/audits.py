"""What a policy does on many rows, with errors that count texts: acceptance, divergence, optima."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.divergences import Divergence
from cactus_theory.divergences import divergence as find_divergence
from cactus_theory.emitted import Audit, audit
from cactus_theory.policies import Declaration, Policy
from cactus_theory.policies import policy as find_policy
from cactus_theory.traces.estimate import Estimate, ratio_of_sums
from cactus_theory.traces.rows import SavedRows
from cactus_theory.traces.trace import Trace

# numbers of target rows audited at once: a few dozen rows at V=2,048
ENTRIES = 2**17
Source = Trace | SavedRows
Rows = Float[Tensor, "rows vocab"]


@dataclass(frozen=True, eq=False)
class PooledAudit:
    """A policy on N rows of T texts. Saved rows are texts of their own.

    Attributes
    ----------
    policy, declares : its spec, and what it declares.
    reference : the divergence asked for.
    rows : N.
    acceptance, divergence : means over rows of Σ p φ and of D(emitted‖q).
    share : mean acceptance over the mean of the best acceptance of each row at the divergence
        the policy spends on that row; above 1 only for policies that emit tokens with q = 0.
    held : on how many rows the declared budget held; None without one.

    Examples
    --------
    >>> q, p = np.array([[0.2, 0.8], [0.5, 0.5]]), np.array([[0.9, 0.1], [0.6, 0.4]])
    >>> seen = pooled_audit("cactus:delta=0.25", SavedRows.of(q, p))
    >>> print(f"{seen.acceptance.value:.3f}, held on {seen.held} of {seen.rows} rows")
    0.791, held on 1 of 2 rows
    """

    policy: str
    declares: Declaration
    reference: str
    rows: int
    acceptance: Estimate
    divergence: Estimate
    share: Estimate
    held: int | None


def row_pairs(
    source: Source, entries: int = ENTRIES
) -> Iterator[tuple[Int[Tensor, "n"], Rows, Rows]]:
    """Yield text, target row and draft row of all drafted tokens that have a draft row, in parts.

    Parts have at most ``entries`` numbers of target rows, but at least one row or cycle.

    Examples
    --------
    >>> rows = SavedRows.of(np.array([[0.2, 0.8], [0.5, 0.5]]), np.array([[0.9, 0.1], [0.6, 0.4]]))
    >>> [(text.tolist(), tuple(q.shape)) for text, q, p in row_pairs(rows)]
    [([0, 1], (2, 2))]
    """
    if isinstance(source, SavedRows):
        size = max(1, entries // source.target_probs.shape[-1])
        for at in torch.arange(len(source)).split(size):
            yield at, source.target_probs[at], source.draft_probs[at]
        return
    for batch in source.batches(entries):
        if batch.draft_probs is not None:
            width = batch.draft_probs.shape[1]
            target = batch.target_probs[:, :-1].flatten(0, 1)
            yield batch.text.repeat_interleave(width), target, batch.draft_probs.flatten(0, 1)


def pooled_audit(
    policy: str | Policy,
    source: Source | str | Path,
    *,
    divergence: str | Divergence = "kl",
    on_rows: Callable[[int], None] | None = None,
) -> PooledAudit:
    """Return what a policy does on all rows of a trace or of saved rows; nothing is sampled.

    Parameters
    ----------
    policy : a Policy or a spec, such as ``"band:price=1"``.
    source : a trace, its folder, or :class:`SavedRows`. Of a trace, all rows that have a draft
        row, those after a refusal too.
    divergence : in which the emitted law is measured and the optima are found.
    on_rows : called with how many rows are done, now and then.

    Raises
    ------
    ValueError, TypeError
        As :func:`cactus_theory.audit`; a trace of certain drafts only.

    Examples
    --------
    >>> q, p = np.array([[0.2, 0.8], [0.5, 0.5]]), np.array([[0.9, 0.1], [0.6, 0.4]])
    >>> seen = pooled_audit("band:price=1", SavedRows.of(q, p))
    >>> print(f"{seen.acceptance.value:.3f}, {seen.share.value:.3f} of the optimum at equal spend")
    0.752, 1.000 of the optimum at equal spend
    """
    found = source if isinstance(source, Trace | SavedRows) else Trace.open(source)
    rule, kind = find_policy(policy), find_divergence(divergence)
    sums = np.zeros((4, found.texts))
    held = 0
    for text, q, p in row_pairs(found, ENTRIES):
        seen = audit(rule, q, p, divergence=kind)
        np.add.at(sums.T, text.numpy(), _columns(seen))
        held += 0 if seen.within is None else int(seen.within.sum())
        if on_rows is not None:
            on_rows(int(sums[0].sum()))
    rows, accepted, spent, best = sums
    if not rows.sum():
        raise ValueError("source: must hold draft rows; every draft in it was certain")
    mark = found.fingerprint
    return PooledAudit(
        policy=rule.spec,
        declares=rule.declares,
        reference=kind.spec,
        rows=int(rows.sum()),
        acceptance=ratio_of_sums(accepted, rows, mark),
        divergence=ratio_of_sums(spent, rows, mark),
        share=ratio_of_sums(accepted, best, mark),
        held=None if rule.declares.budget is None else held,
    )


def _columns(seen: Audit) -> Float[np.ndarray, "rows 4"]:
    """Return 1, acceptance, divergence and the best acceptance at that divergence."""
    spent = seen.divergences[seen.reference]
    parts = (torch.ones_like(spent), seen.acceptance, spent, seen.optimum_acceptance)
    return torch.stack(parts, -1).numpy()
