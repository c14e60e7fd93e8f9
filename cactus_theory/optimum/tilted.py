r"""The best acceptance within a KL budget and with a least worth: the band of a tilted target.

.. math:: \max_{h \in \Delta} \sum_i \min(p_i, h_i) \quad\text{s.t.}\quad
   \mathrm{KL}(h\|q) \le \delta,\;\; \sum_i h_i r_i \ge c

A KL budget alone does not say where h leaves q. A worth r of each token does: ln q (likelihood
under the target), q (the probability that a reference token drawn from the target is this token),
or a reward. With :math:`q^\theta \propto q e^{\theta r}` and its normaliser Z,
KL(h‖q) − θ Σ h r = KL(h‖q^θ) − ln Z. So for every θ ≥ 0 the optimum is at most the optimum of the
target q^θ with the budget δ − θ c + ln Z and no limit on the worth. At one θ both optima are equal:
the band of q^θ has the worth c and spends δ nats (THEORY.md, Theorem 28). Σ h r − c has the sign of
the bound's derivative in θ, so the search below is a bisection. Where the worth alone binds, the
optimum is a knapsack's: drafted mass of the least worth is given up for the token of the largest
worth.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.base import tensors
from cactus_theory.base.chunks import in_parts, joined
from cactus_theory.base.roots import convex_root
from cactus_theory.base.threads import one_thread
from cactus_theory.divergences import read_divergence
from cactus_theory.optimum.acceptance import ROUNDING
from cactus_theory.optimum.batch_edges import solve_edges
from cactus_theory.optimum.certificate import geometry_of
from cactus_theory.optimum.regret import marginal_loss

Rows = Float[Tensor, "rows vocab"]
PerRow = Float[Tensor, "rows"]
KL = read_divergence("kl")
# factor between tried θ until the worth is reached, and most factors: by then q^θ is one token
FASTER, MOST_FACTORS = 4.0, 200
IMPOSSIBLE = "delta, at_least: a row must exist within both; got a worth that {}"


@dataclass(frozen=True)
class TiltedAcceptance:
    """The optimum for each row; rows in the input's kind and dtype, scalars in float64."""

    target: Any
    acceptance: Any
    divergence: Any
    worth: Any
    tilt: Any
    price: Any
    gap: Any


@one_thread()
@torch.no_grad()
def tilted_acceptance(
    target_probs: Any,
    draft_probs: Any,
    worth: Any,
    *,
    delta: Any,
    at_least: Any,
    normalise: bool = False,
) -> TiltedAcceptance:
    r"""Maximise acceptance within a KL budget and with a least mean worth of the emitted token.

    .. math:: \max_{h \in \Delta} \sum_i \min(p_i, h_i) \;\text{ s.t. }\;
       \mathrm{KL}(h\|q) \le \delta,\; \sum_i h_i r_i \ge c

    Parameters
    ----------
    target_probs, draft_probs : (..., V) probabilities, as for
        :func:`cactus_theory.optimal_acceptance`.
    worth : (..., V) numbers r, broadcast to the rows, finite where q > 0; such as ln q.
    delta : budget ≥ 0 in nats, a number or an array broadcasting to (...).
    at_least : c, a number or an array like delta; Σ q r to demand the target's own mean worth.
    normalise : as for :func:`cactus_theory.optimal_acceptance`.

    Returns
    -------
    target : (..., V), the row h to verify against instead of q.
    acceptance : (...), Σ min(p, h).
    divergence : (...), KL(h‖q) in nats.
    worth : (...), Σ h r.
    tilt : (...), θ; 0 where the nats alone bind, ∞ where the worth alone binds.
    price : (...), dA/dδ, the slope of the best acceptance A in the budget; dA/dc is −θ times this
        price; at θ = ∞ dA/dc is not given.
    gap : (...), the proven upper bound on the acceptance minus ``acceptance``; 0 up to rounding.

    Raises
    ------
    ValueError
        As :func:`cactus_theory.optimal_acceptance`; no row within ``delta`` reaches the worth.
    TypeError
        Rows that are not floats.

    Examples
    --------
    >>> q, p = np.array([0.6, 0.3, 0.1]), np.array([0.2, 0.4, 0.4])
    >>> likely = float(q @ np.log(q))  # the target's own
    >>> best = ct.tilted_acceptance(q, p, np.log(q), delta=0.01, at_least=likely)
    >>> print(f"accept {best.acceptance:.4f} at a tilt of {best.tilt:.3f}")
    accept 0.6373 at a tilt of 0.413
    >>> print(f"{ct.optimal_acceptance(q, p, delta=0.01).acceptance:.4f} by nats alone")
    0.6698 by nats alone
    """
    target, draft = tensors.checked_rows(target_probs, draft_probs, normalise)
    batch, like = target.shape[:-1], dict[str, Any](dtype=torch.float64, device=target.device)
    try:
        worths = torch.as_tensor(worth, **like).expand(target.shape).reshape(-1, target.shape[-1])
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"worth: must be numbers that broadcast to the rows; got {error}"
        ) from None
    limits = {"delta": (delta, 0.0, math.inf), "at_least": (at_least, -math.inf, math.inf)}
    amounts = [tensors.row_numbers(name, value, batch, target.device, *ends).reshape(-1)
               for name, (value, *ends) in limits.items()]  # fmt: skip

    def solved(at: slice, q: Tensor, p: Tensor) -> tuple[Tensor, ...]:
        rows, *scalars = _solved(q, p, worths[at], *(amount[at] for amount in amounts))
        return rows.to(target.dtype), *scalars

    parts = ((at, solved(at, *rows)) for at, rows in in_parts(target, draft))
    rows, *scalars = joined(parts, amounts[0].numel())
    columns = rows.reshape(target.shape), *(value.reshape(batch) for value in scalars)
    return TiltedAcceptance(*(tensors.scalar_like(value, target_probs) for value in columns))


def tilted_rows(q: Rows, worth: Rows, tilt: PerRow) -> tuple[Rows, PerRow]:
    """Return q^θ ∝ q e^{θ r} and ln Z = ln Σ q e^{θ r}; tokens with q = 0 keep no mass."""
    logits = q.log() + torch.where(q > 0, tilt[:, None] * worth, 0.0)
    log_z = logits.logsumexp(-1)
    about = torch.where(tilt[:, None] == 0, q, logits.softmax(-1))
    return about, torch.where(tilt == 0, 0.0, log_z)


def _solved(q: Rows, p: Rows, worth: Rows, delta: PerRow, least: PerRow) -> tuple[Tensor, ...]:
    """Return row, acceptance, nats, worth, θ, price and gap, for float64 rows that sum to 1.

    The band of q is tried first, then the knapsack, then the search over θ. A row keeps the first
    solution that satisfies both limits.
    """
    if bool(((q > 0) & ~worth.isfinite()).any()):
        raise ValueError("worth: must be finite where target_probs is above 0; got other numbers")
    # only differences of worths count; they are scaled to about 1, which the tolerances assume
    top = torch.where(q > 0, worth, -math.inf).amax(-1, keepdim=True)
    lost = torch.where(q > 0, top - worth, 0.0)
    unit = lost.amax(-1, keepdim=True)
    unit = torch.where(unit > 0, unit, 1.0)
    unscaled = worth.where(q > 0, 0.0)
    worth, least = -lost / unit, ((least[:, None] - top) / unit)[:, 0]
    if bool((least > ROUNDING).any()):
        raise ValueError(IMPOSSIBLE.format("is above that of every token"))
    least = least.clamp(max=0.0)  # the best token's own worth, up to rounding
    program = q, p, worth, delta, least
    rows, columns = _about(torch.zeros_like(delta), *program)
    short = (rows * worth).sum(-1) < least - ROUNDING * (1 + least.abs())
    for solve in (_by_worth_alone, _by_both):
        if bool(short.any()):
            rows[short], columns[:, short] = solve(*(part[short] for part in program))
            short = short & ~(columns[1] <= delta * (1 + ROUNDING))  # columns[1] are the nats
    accepted, spent, tilt, price, gap = columns
    return rows, accepted, spent, (rows * unscaled).sum(-1), tilt / unit[:, 0], price, gap


def _about(
    tilt: PerRow, q: Rows, p: Rows, worth: Rows, delta: PerRow, least: PerRow
) -> tuple[Rows, Tensor]:
    """Return the bands of the target q^θ, θ = ``tilt``, and their acceptance, nats, θ, price, gap.

    The numbers are stacked, (5, R). A band's budget is δ − θ c + ln Z of the module, at least 0.
    """
    about, log_z = tilted_rows(q, worth, tilt)
    # nats about q^θ; below 0 no row at this θ is within both limits, and h = q^θ comes closest
    budget = (delta - tilt * least + log_z).clamp(min=0.0)
    geometry = geometry_of(about, p, KL)
    best = geometry.measured(solve_edges(geometry, "delta", budget))
    # acceptance is concave in the budget: what was not spent adds at most price · unspent to the
    # bound, and nothing where that is 0 · ∞: a budget of 0 at a price of ∞, or ∞ at a price of 0
    worth_of_unspent = best.price * (budget - best.divergence).clamp(min=0.0)
    gap = best.gap + torch.where(worth_of_unspent.isnan(), 0.0, worth_of_unspent)
    spent = KL.value(best.rows, q).clamp(min=0.0)
    return best.rows, torch.stack([best.acceptance, spent, tilt, best.price, gap])


def _by_worth_alone(
    q: Rows, p: Rows, worth: Rows, delta: PerRow, least: PerRow
) -> tuple[Rows, Tensor]:
    """Return the knapsack's rows in the form of :func:`_about`; they may exceed ``delta`` nats.

    Drafted mass is given up in order of its worth, the least first, and goes to the tokens of the
    largest worth. Tokens of equal worth share the mass that is left to them, or that comes to them,
    at the least KL.
    """
    top = torch.where(q > 0, worth, -math.inf).amax(-1, keepdim=True)
    lost = torch.where(q > 0, top - worth, 0.0)
    # ``room`` is the mean loss of worth that the least worth c allows
    kept, room = torch.where(q > 0, p, 0.0), top - least[:, None]
    marginal = marginal_loss(lost, kept * lost, room)
    rate = 1 / marginal
    # the dual bound Σ p (1 − rate·lost)₊ + rate·room, which holds at any rate ≥ 0
    bound = ((kept * (1 - rate * lost).clamp(min=0.0)).sum(-1, keepdim=True) + rate * room)[:, 0]
    rows, tied, best = torch.where(lost < marginal, kept, 0.0), lost == marginal, lost == 0
    left = (room - (rows * lost).sum(-1, keepdim=True)) / marginal
    rows = torch.where(tied, _shared(q, kept, tied, left.clamp(min=0.0), torch.minimum), rows)
    rest = 1 - torch.where(best, 0.0, rows).sum(-1, keepdim=True)
    rows = torch.where(best, _shared(q, kept, best, rest, torch.maximum), rows)
    accepted, zero = torch.minimum(p, rows).sum(-1), torch.zeros_like(delta)
    spent = KL.value(rows, q).clamp(min=0.0)
    return rows, torch.stack([accepted, spent, zero + math.inf, zero, bound - accepted])


def _shared(q: Rows, p: Rows, among: Tensor, mass: Tensor, limit: Any) -> Rows:
    """Return the minimum or maximum (``limit``) of p and s q at the tokens ``among``, 0 elsewhere.

    s is such that the result sums to ``mass``.
    """
    q, p = (torch.where(among, row, 0.0) for row in (q, p))

    def mass_at(level: PerRow) -> tuple[PerRow, PerRow]:
        """Return the mass at s, and no derivative (NaN)."""
        return limit(p, level[:, None] * q).sum(-1), level + math.nan

    low = torch.zeros_like(mass[:, 0])
    high = low + 1 / q.where(q > 0, math.inf).amin(-1)  # here s q ≥ 1 wherever q > 0
    level = convex_root(mass_at, over=high, under=low, budget=mass[:, 0])
    rows = limit(p, level[:, None] * q)
    return rows * (mass / rows.sum(-1, keepdim=True)).nan_to_num(nan=1.0, posinf=1.0)


def _by_both(q: Rows, p: Rows, worth: Rows, delta: PerRow, least: PerRow) -> tuple[Rows, Tensor]:
    """Return the rows of :func:`_about` at the θ at which their worth is the least allowed."""
    zero, program = torch.zeros_like(delta), (q, p, worth, delta, least)

    def short_of(mean: PerRow) -> tuple[PerRow, PerRow]:
        """Return by how much a mean worth is too small, and no derivative (NaN)."""
        return least - mean, zero + math.nan

    def of_target(tilt: PerRow) -> tuple[PerRow, PerRow]:
        return short_of((tilted_rows(q, worth, tilt)[0] * worth).sum(-1))

    def of_row(tilt: PerRow) -> tuple[PerRow, PerRow]:
        return short_of((_about(tilt, *program)[0] * worth).sum(-1))

    # of all rows with the least worth, q^θ at this θ has the least KL
    cheapest = convex_root(of_target, over=zero, under=_beyond(of_target, worth, zero), budget=zero)
    log_z = tilted_rows(q, worth, cheapest)[1]
    missing = cheapest * least - log_z - delta
    if bool((missing > ROUNDING * (1 + delta)).any()):
        row = int(missing.argmax())
        nats = float(delta[row] + missing[row])
        raise ValueError(IMPOSSIBLE.format(f"takes {nats:.6g} nats or more"))
    tilt = convex_root(of_row, over=zero, under=_beyond(of_row, worth, zero), budget=zero)
    return _about(tilt, *program)


def _beyond(short: Any, worth: Rows, zero: PerRow) -> PerRow:
    """Return for each row a tilt θ at which its worth reaches the limit, if float64 has such a θ.

    ``short(θ)`` returns by how much the worth falls short of the limit, and a derivative.
    """
    tilt = zero + 1 / worth.std(-1, correction=0).clamp(min=1e-300)
    for _ in range(MOST_FACTORS):
        lacking = short(tilt)[0] > 0
        if not bool(lacking.any()):
            break
        tilt = torch.where(lacking, tilt * FASTER, tilt).clamp(max=1e300)
    return tilt
