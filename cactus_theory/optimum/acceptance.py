"""The best acceptance under a budget on the emitted law, row by row.

Source: THEORY.md, Theorems 7, 9 and 19.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.base import tensors
from cactus_theory.base.chunks import in_parts, joined
from cactus_theory.base.threads import one_thread
from cactus_theory.divergences import Divergence, read_divergence
from cactus_theory.optimum.batch_edges import chosen_knob, solve_edges
from cactus_theory.optimum.certificate import geometry_of

SUPPORTS = ("target", "free")
ROUNDING = 1e-9  # rounding of a sum that exceeds its budget, relative to 1 plus the budget


@dataclass(frozen=True)
class OptimalAcceptance:
    """Result of :func:`optimal_acceptance` for each row.

    ``target`` has the input's dtype, other fields float64; all are torch or numpy, as the input.
    """

    target: Any
    acceptance: Any
    divergence: Any
    lower: Any
    upper: Any
    price: Any
    gap: Any


@one_thread()
@torch.no_grad()
def optimal_acceptance(
    target_probs: Any,
    draft_probs: Any,
    *,
    divergence: str | Divergence = "kl",
    delta: Any = None,
    price: Any = None,
    acceptance: Any = None,
    support: str = "target",
    normalise: bool = False,
) -> OptimalAcceptance:
    r"""Maximise the acceptance of a drafted token under a bound on the divergence from the target.

    .. math:: \max_{h \in \Delta} \sum_i \min(p_i, h_i) \;\text{ s.t. }\; D(h\|q) \le \delta

    The optimal row h is a band, and ``gap`` proves that no row is better (THEORY.md, Theorems 7 and
    8). The result is exact up to float64 rounding for every divergence. The solver takes a few
    passes over the rows, or one sort by p/q and lookups where these passes do not converge. No
    gradient flows through the result. A few rows are solved at a time, on one thread: beside the
    input and the result the function takes at most 100 MB, whatever the batch.

    Parameters
    ----------
    target_probs, draft_probs : (..., V) probabilities, torch or numpy, one dtype; rows may
        miss 1 by the dtype's tolerance and are divided by their float64 sum.
    divergence : spec string (``kl``, ``renyi:a=2``, …) or a Divergence.
    delta : budget ≥ 0 (nats for KL), a number or an array broadcasting to (...).
    price : instead of delta, the slope dA/dδ ≥ 0 of the best acceptance A in the budget. To spend
        a common budget best, give all rows the same price.
    acceptance : instead of delta, the acceptance to reach at the least divergence; rows
        that reach this acceptance losslessly keep h = q.
    support : with ``target``, h is 0 wherever q is 0; with ``free``, the program above is solved
        without this condition.
    normalise : if True, rows may have any positive sum, such as an upcast float32 softmax, and are
        divided by their sums.

    Returns
    -------
    target : (..., V), the row h to verify against instead of q.
    acceptance : (...), Σ min(p, h), the probability of accepting the drafted token.
    divergence : (...), D(h‖q) spent, in the divergence's unit (nats for KL).
    lower, upper : (...), the band's edges a and b; the least and largest p/q where h = p.
    price : (...), dA/dδ at the optimum: acceptance bought by one more unit of divergence.
    gap : (...), the proven upper bound on the acceptance of any row that spends no more, minus
        ``acceptance``: zero up to rounding, which may have either sign; ∞ where float64 cannot hold
        the divergence, so that nothing is proven.

    Raises
    ------
    ValueError
        Not a distribution, a knob missing or outside its range, an unknown divergence.
    TypeError
        Rows that are not floats.

    Examples
    --------
    >>> q, p = np.array([0.2, 0.2, 0.6]), np.array([0.45, 0.45, 0.1])
    >>> best = ct.optimal_acceptance(q, p, divergence="kl", delta=0.1)
    >>> print(f"accept {best.acceptance:.4f}, proven: {abs(best.gap) < 1e-12}")
    accept 0.7221, proven: True
    >>> print(f"{ct.optimal_acceptance(q, p, acceptance=0.6).divergence:.4f} nats buy 0.6")
    0.0204 nats buy 0.6
    """
    kind = read_divergence(divergence)
    name, amount, most = chosen_knob(kind, delta=delta, price=price, acceptance=acceptance)
    check.one_of("support", support, SUPPORTS)
    target, draft = tensors.checked_rows(target_probs, draft_probs, normalise)
    batch = target.shape[:-1]
    amounts = tensors.row_numbers(name, amount, batch, target.device, 0.0, most).reshape(-1)

    def solved(at: slice, q: Tensor, p: Tensor) -> tuple[Tensor, ...]:
        geometry = geometry_of(q, p, kind, support)
        best = geometry.measured(solve_edges(geometry, name, amounts[at]))
        edges = best.edges.lower, best.edges.upper
        limit, spent = amounts[at], best.divergence
        within = limit + ROUNDING * (1 + limit) if name == "delta" else limit.new_tensor(math.inf)
        # float64 may fail to hold the divergence; at a price of 0 any divergence is right
        broken = (spent > within) | (spent.isinf() & (limit > 0) & (name == "price"))
        gap = torch.where(broken, math.inf, best.gap)
        scalars = best.acceptance, spent, *edges, best.price, gap
        return best.rows.to(target.dtype), *scalars

    parts = ((at, solved(at, *rows)) for at, rows in in_parts(target, draft))
    rows, *scalars = joined(parts, amounts.numel())
    columns = rows.reshape(target.shape), *(value.reshape(batch) for value in scalars)
    return OptimalAcceptance(*(tensors.scalar_like(value, target_probs) for value in columns))
