r"""The selection law: the row to use as the draft row if several tokens are drafted at a node.

S is the set of drafted tokens, and f(A) = Pr(S has a token in A). A rule that chooses one token of
S has a law p* in the base polytope of f (p*(A) ≤ f(A), p*(V) = 1), and every such law belongs to a
rule (V is the vocabulary). One of these laws, p°, is the best for all convex functions φ at once:

.. math:: p° = \operatorname*{argmin}_{p^*} \sum_i q_i\, φ(p^*_i/q_i)
    \quad\text{for every convex } φ

so that the best rows h for several drafts are the bands of q and p° (THEORY.md, Theorem 21). For
independent drafts p°/q are the slopes of the greatest convex minorant of f against q over prefixes
in ascending p/q. For deterministic tokens T beside one token sampled from r, p° is cq on T and
min(r, cq) off T, with the c at which p° sums to 1. The verifier ``tree`` uses the second form.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.base import tensors
from cactus_theory.base.chunks import in_parts, joined
from cactus_theory.base.threads import one_thread
from cactus_theory.optimum.band_row import loops
from cactus_theory.optimum.boxes import FREE

Row = Float[np.ndarray, "vocab"]

# largest c that the search for c tries
LARGEST = 1e30
KINDS = ("iid", "deterministic", "deterministic+sampled", "deterministic+off")


@one_thread()
@torch.no_grad()
def selection_law(
    target_probs: Any,
    draft_probs: Any,
    k: int = 4,
    kind: str = "iid",
    deterministic: Any = None,
    *,
    normalise: bool = False,
) -> Any:
    r"""Return p°, the row to use as the draft row if several tokens are drafted for one position.

    ``optimal_acceptance(q, p°)`` gives the best acceptance of any policy with these drafts, and
    ``gap`` of its result proves this. :func:`verify_tree` reaches this acceptance for deterministic
    tokens beside one sampled token. p° is exact up to float64 rounding, in O(V log V) per row. How
    mass is divided among tokens with q = 0 is arbitrary.

    Parameters
    ----------
    target_probs, draft_probs : (..., V) probabilities, as for :func:`optimal_acceptance`;
        ``draft_probs`` may be None for ``kind="deterministic"``.
    k : number of tokens that are drawn, for ``iid``.
    kind : ``iid``: k independent tokens of the draft; ``deterministic``: only the tokens of
        ``deterministic``; ``deterministic+sampled``: these tokens and one sampled from the draft,
        which may be one of them; ``deterministic+off``: these tokens and one sampled from the rest
        of the draft's row, if that has mass.
    deterministic : (m,) or (..., m) token ids of each row, −1 for none.
    normalise : as for :func:`optimal_acceptance`.

    Raises
    ------
    ValueError
        Not a distribution, an unknown kind, k below 1, ids outside the vocabulary, a row without
        ids.
    TypeError
        Rows that are not floats, ids that are not integers.

    Examples
    --------
    >>> q, p = np.array([0.2, 0.2, 0.6]), np.array([0.45, 0.45, 0.1])
    >>> offered = ct.selection_law(q, p, k=2)
    >>> offered.round(4)
    array([0.405, 0.405, 0.19 ])
    >>> print(f"{ct.optimal_acceptance(q, offered, delta=0.1).acceptance:.4f} instead of 0.7221")
    0.8121 instead of 0.7221
    >>> ct.selection_law(q, p, kind="deterministic+sampled", deterministic=[2])
    array([0.2, 0.2, 0.6])
    """
    check.one_of("kind", kind, KINDS)
    # a draft row is not read then; the target's row has the shape that is checked
    undrafted = kind == "deterministic" and draft_probs is None
    draft = target_probs if undrafted else draft_probs
    target, draft = tensors.checked_rows(target_probs, draft, normalise)
    if kind == "iid" and deterministic is not None:
        raise ValueError(
            f"deterministic: must not be given with kind={kind!r}; got {deterministic!r}"
        )
    check.whole_number("k", k, 1)
    count = math.prod(target.shape[:-1])
    ids = [list[int]()] * count if kind == "iid" else _ids_of_rows(deterministic, target.shape)

    def laws(at: slice, q: Tensor, p: Tensor) -> tuple[Tensor]:
        rows = zip(q.cpu().numpy(), p.cpu().numpy(), ids[at], strict=True)
        law = np.reshape([_law(*row, k, kind) for row in rows], q.shape)
        return (tensors.from_numpy(law).to(target),)

    parts = ((at, laws(at, *rows)) for at, rows in in_parts(target, draft))
    (law,) = joined(parts, count)
    return tensors.scalar_like(law.reshape(target.shape), target_probs)


def _ids_of_rows(deterministic: Any, shape: torch.Size) -> list[list[int]]:
    """Check token ids and return the different ids of each row, for rows (..., V)."""
    ids = torch.as_tensor([] if deterministic is None else deterministic, device="cpu")
    if ids.dtype.is_floating_point and ids.numel():
        raise TypeError(f"deterministic: must hold token ids; got dtype {ids.dtype}")
    ids = ids.long()
    if not ids.numel() or bool(((ids < -1) | (ids >= shape[-1])).any()):
        raise ValueError(
            f"deterministic: must hold token ids in [0, {shape[-1]}); got {deterministic!r}"
        )
    try:
        ids = ids.expand(*shape[:-1], ids.shape[-1])
    except RuntimeError:
        raise ValueError(
            f"deterministic: shape must be (m,) or {tuple(shape[:-1])} and m; "
            f"got {tuple(ids.shape)}"
        ) from None
    rows = [sorted({*row} - {-1}) for row in tensors.as_list(ids.reshape(-1, ids.shape[-1]))]
    if not all(rows):
        raise ValueError(f"deterministic: must hold a token of each row; got {deterministic!r}")
    return rows


def _law(q: Row, p: Row, deterministic: Sequence[int], k: int, kind: str) -> Row:
    """Return the selection law p° of one row, for one of the kinds of drafts."""
    if kind == "iid":
        return _independent_drafts(q, p, k)
    sampled = p.copy()
    if kind == "deterministic+off":
        sampled[deterministic] = 0.0
    total = sampled.sum()
    drawn = kind != "deterministic" and total > 0
    return offered(q, sampled / total if drawn else None, deterministic)


def offered(q: Row, sampled: Row | None, deterministic: Sequence[int]) -> Row:
    """Return the selection law p° if deterministic tokens are drafted beside one sampled token.

    p° is the row to use as draft row. It is cq at deterministic tokens and min(r, cq) elsewhere.
    Rows (V,) are of one precision; ``sampled`` is the row r of the sampled token, None if there is
    none. c is found by Newton's method such that p° has the same sum as r, or as q if there is no
    r. The sum is concave in c, so Newton climbs to the root from below. A token is cut if cq
    exceeds r there. It stays cut in all later steps, so the search ends at the first step that cuts
    no further token.
    """
    most = np.zeros_like(q) if sampled is None else sampled.copy()
    compiled, rows = loops(), (q, q if sampled is None else sampled)
    mass, goal = map(np.sum, rows) if compiled is None else compiled.sums_of(*rows)
    most[deterministic] = np.inf
    # ``level`` is c; ``rising`` is the q of the tokens not cut, the slope of the sum in c
    level, rising_before = float(goal / mass), np.inf
    while True:
        if compiled is None:
            law = np.minimum(most, level * q)
            total, rising = float(law.sum()), float(q[law < most].sum())
        else:  # a band with the edges 0 and c
            total, rising, _ = compiled.clipped_sums(q, most, 0.0, level, 1.0, FREE)
        if not 0 < rising < rising_before:
            break
        level, rising_before = min(level + max(goal - total, 0.0) / rising, LARGEST), rising
    np.minimum(law := level * q, most, out=law)
    if q[deterministic].max() < 1 / LARGEST:  # deterministic tokens get the mass that is left over
        law[deterministic] = max(goal - float(law.sum()), 0.0) / len(deterministic)
    return law


def _independent_drafts(q: Row, p: Row, k: int) -> Row:
    """Return the selection law p° of k independent drafts.

    p° is made of the increments of f(A) = 1 − (1 − p(A))ᵏ over prefixes in ascending p/q,
    pooled where p°/q would fall.
    """
    with np.errstate(all="ignore"):  # ratios of denormal entries may be infinite
        ratio = np.divide(p, q, out=np.where(p > 0, np.inf, 0.0), where=q > 0)
        # ``law`` is in this order until the end; tokens with q = 0 have no ratio to pool
        order = np.argsort(ratio, kind="stable")
        law = _increments(p[order], k)
        support = q[order] > 0
        law[support] = _pooled(law[support], q[order][support])
    unsorted = np.empty_like(law)
    unsorted[order] = law
    return unsorted


def _pooled(mass: Row, weight: Row) -> Row:
    """Return masses with rising mass/weight, by pooling neighbours with a falling ratio.

    Each entry joins the pool before it as long as the pool's ratio is not below the entry's (pool
    adjacent violators). The pools' ratios are the slopes of the greatest convex minorant.
    """
    ratio = mass / weight
    if (ratio[1:] >= ratio[:-1]).all():
        return mass
    pools: list[tuple[float, float, int]] = []  # mass, weight and number of entries
    for pool_mass, pool_weight in zip(mass.tolist(), weight.tolist(), strict=True):
        size = 1
        # compare the ratios without a division
        while pools and pools[-1][0] * pool_weight >= pool_mass * pools[-1][1]:
            last_mass, last_weight, last_size = pools.pop()
            pool_mass, pool_weight = pool_mass + last_mass, pool_weight + last_weight
            size += last_size
        pools.append((pool_mass, pool_weight, size))
    masses, weights, sizes = (np.array(column) for column in zip(*pools, strict=True))
    masses, weights = (np.repeat(column, sizes.astype(np.int64)) for column in (masses, weights))
    return masses * (weight / weights)


def _increments(p: Row, k: int) -> Row:
    """Return the increments S_iᵏ − S_{i+1}ᵏ of 1 − (1 − p(A))ᵏ; S_i is the mass from i on.

    They are computed as −e^{k ln S_i}·expm1(k ln(1 − p_i/S_i)), which keeps their digits.
    """
    mass_on = p + np.append(np.cumsum(p[:0:-1])[::-1], 0.0)  # S_i
    share = np.divide(p, mass_on, out=np.zeros_like(p), where=mass_on > 0)
    before = np.append(0.0, np.cumsum(p[:-1]))  # 1 − S_i
    with np.errstate(divide="ignore"):  # the last token takes all: log 0
        # near 1 the logarithm needs the digits of the missing mass, multiplied by k
        logs = np.where(before < 0.5, np.log1p(-np.minimum(before, 0.5)), np.log(mass_on))
        return -np.exp(k * logs) * np.expm1(k * np.log1p(-np.minimum(share, 1.0)))
