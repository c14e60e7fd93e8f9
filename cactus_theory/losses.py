r"""Losses for training a draft, per row and from logits: what the policy that judges it will gain.

q is the target's row and p the draft's. The best a policy can make of them at a price λ is

.. math:: V(p) = \max_{h \in \Delta} \sum_i \min(p_i, h_i) - λ D(h\|q),

acceptance minus price times what is emitted beside the target. V is concave in p, and its gradient
is closed (THEORY.md, Theorem 7: the optimum is a band :math:`h = \mathrm{clip}(p, aq, bq)`):
:math:`\mathrm{clip}(1 - λ(f'(p_i/q_i) - f'(a)), 0, 1)`, 1 for what the band lifts and 0 for what
it cuts. :func:`at_price` is −V; at λ = ∞ it is the total variation minus 1. Beside it are the
losses of the field, and :func:`along_block`, which weighs the places of a drafted block.

Logits are (..., V), float32 or wider inside whatever their dtype; divide them by a temperature
first if drafts are sampled at one. A target's logits of −∞ are tokens that it never emits. No
gradient reaches the target.
"""

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.base.chunks import parts_of
from cactus_theory.divergences import Divergence, FDivergence, read_divergence
from cactus_theory.optimum.batch_edges import edges

__all__ = [
    "along_block",
    "at_price",
    "forward_kl",
    "log_overlap",
    "mixed",
    "overlap",
    "total_variation",
]

# logits of the target; the draft's must have the same shape, or the package's own error says so
Logits = Float[Tensor, "*rows vocab"]
PerRow = Float[Tensor, "*rows"]
# rate of LK's mixture, at which the weight moves from KL to total variation as the overlap grows
LK_RATE = 3.0


class Judged(NamedTuple):
    """A loss per row and, detached, the acceptance of the policy that it stands for, both (...)."""

    loss: PerRow
    acceptance: PerRow


def at_price(
    target_logits: Logits,
    draft_logits: Tensor,
    *,
    price: Any = 1.0,
    divergence: str | Divergence = "kl",
) -> Judged:
    """Return price × divergence − acceptance of each row's best relaxed law, and the acceptance.

    That is ``price*s.divergence − s.acceptance`` of :func:`cactus_theory.optimal_acceptance` at
    ``price``. It is solved in float64 going forward, once; the gradient is closed, is stored in the
    dtype of the draft's logits, and solves nothing. Tokens with q = 0 are never emitted.

    Parameters
    ----------
    target_logits, draft_logits : (..., V) of one shape; −∞ is a probability of 0.
    price : λ in [0, ∞], acceptance bought by one nat more, a number or one a row (...). At ∞ the
        policy is lossless and the loss is the total variation minus 1; at 0 all is accepted that
        the target can emit.
    divergence : a smooth f-divergence (``kl``, ``reverse_kl``, ``alpha:a=0.5``, …).

    Raises
    ------
    ValueError
        A divergence without a price or that is no f-divergence, a price outside [0, ∞], shapes that
        differ, a row without a softmax.
    TypeError
        Logits that are not floats.

    Examples
    --------
    >>> q = torch.tensor([[0.2, 0.2, 0.6]]).log()
    >>> logits = torch.tensor([[0.45, 0.45, 0.1]]).log().requires_grad_()
    >>> at_price(q, logits, price=1.0).loss.sum().backward()
    >>> logits.grad
    tensor([[ 0.0450,  0.0450, -0.0900]])
    """
    _check(target_logits, draft_logits)
    kind = read_divergence(divergence)
    if not (isinstance(kind, FDivergence) and kind.priced):
        raise ValueError(f"divergence: must be a smooth f-divergence; got {kind.spec}")
    batch = draft_logits.shape[:-1]
    prices = check.row_numbers("price", price, batch, draft_logits.device, 0.0, math.inf)
    return Judged(*_AtPrice.apply(target_logits.detach(), draft_logits, prices, kind))


class _AtPrice(torch.autograd.Function):
    """−V and the acceptance; the gradient of −V in the logits is stored going forward."""

    @staticmethod
    def forward(
        ctx: Any, target_logits: Logits, draft_logits: Tensor, prices: PerRow, kind: FDivergence
    ) -> tuple[PerRow, PerRow]:
        vocab, batch = draft_logits.shape[-1], draft_logits.shape[:-1]
        flat_q, flat_p = target_logits.reshape(-1, vocab), draft_logits.reshape(-1, vocab)
        needed = ctx.needs_input_grad[1]
        slopes = torch.empty_like(flat_p) if needed else None
        results = flat_p.new_empty(2, len(flat_p), dtype=_wide(draft_logits))
        for at in parts_of(flat_p):  # float64 rows of a part stay in the cache
            q, p = flat_q[at].double().softmax(-1), flat_p[at].double().softmax(-1)
            _check_laws(q, p)
            price = prices.reshape(-1)[at]
            lower, upper = edges(q, p, kind, price=price)
            # h = p where nothing is cut; tokens with q = 0 get nothing at any edge
            emitted = torch.maximum(p, q * lower).minimum(torch.where(q > 0, q * upper, 0.0))
            acceptance = torch.minimum(p, emitted).sum(-1)
            free = (price == 0) | torch.isinf(price)
            cost = torch.where(free, 0.0, price * kind.value(emitted, q))
            results[0, at] = (cost - acceptance).to(results.dtype)
            results[1, at] = acceptance.to(results.dtype)
            if slopes is not None:
                gain = _gain(q, p, price[:, None], lower, kind)
                slopes[at] = (p * ((p * gain).sum(-1, keepdim=True) - gain)).to(slopes.dtype)
        ctx.save_for_backward(slopes)
        loss, acceptance = results.reshape(2, *batch)
        ctx.mark_non_differentiable(acceptance)
        return loss, acceptance

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[None, Logits, None, None]:
        (slopes,) = ctx.saved_tensors
        above = upstream[0]
        return None, (above[..., None] * slopes.view(*above.shape, -1)).to(slopes.dtype), None, None


def _gain(
    q: Tensor, p: Tensor, price: Tensor, lower: Tensor, kind: FDivergence
) -> Float[Tensor, "rows vocab"]:
    """Return dV/dp up to a constant a row, in [0, 1]; 0 where p = q = 0."""
    ratio, inside = p / q, (q > 0) & (p > 0)
    least = torch.where(inside, ratio, torch.inf).amin(-1, keepdim=True)
    lower = torch.where(lower > 0, lower, least.clamp(max=1.0))
    rise = kind.slope(torch.where(inside, ratio, lower)) - kind.slope(lower)
    gain = (1 - torch.where(price == 0, 0.0, price * rise)).clamp_(0.0, 1.0)
    gain = torch.where(torch.isinf(price), (ratio < 1).to(gain.dtype), gain)
    return torch.where(q > 0, gain, 0.0)


def overlap(target_logits: Logits, draft_logits: Tensor) -> PerRow:
    """Return Σ min(q, p), the chance that lossless verification accepts a token, (...).

    Examples
    --------
    >>> q, p = torch.tensor([0.2, 0.2, 0.6]).log(), torch.tensor([0.45, 0.45, 0.1]).log()
    >>> round(float(overlap(q, p)), 6)
    0.5
    """
    q, p = (rows.exp() for rows in _log_rows(target_logits, draft_logits))
    return torch.minimum(q, p).sum(-1)


def total_variation(target_logits: Logits, draft_logits: Tensor) -> PerRow:
    """Return 1 − Σ min(q, p), the chance that lossless verification refuses a token, (...).

    Its gradient vanishes where p has almost nothing of what q has.

    Examples
    --------
    >>> q, p = torch.tensor([0.2, 0.2, 0.6]).log(), torch.tensor([0.45, 0.45, 0.1]).log()
    >>> round(float(total_variation(q, p)), 6)
    0.5
    """
    return 1 - overlap(target_logits, draft_logits)


def forward_kl(target_logits: Logits, draft_logits: Tensor) -> PerRow:
    """Return KL(q‖p) in nats, (...): the loss of distillation.

    Examples
    --------
    >>> q, p = torch.tensor([0.2, 0.2, 0.6]).log(), torch.tensor([0.45, 0.45, 0.1]).log()
    >>> print(f"{forward_kl(q, p):.4f}")
    0.7507
    """
    return _kl(*_log_rows(target_logits, draft_logits))


def log_overlap(target_logits: Logits, draft_logits: Tensor) -> PerRow:
    """Return −ln Σ min(q, p), (...), the loss LK.

    Its gradient is that of the total variation over the overlap: it does not fade where little is
    accepted yet, and no entry of it exceeds 1. A row in which no token has both probabilities is
    as one of the smallest overlap, and has no gradient. Source: the ``speculators`` project, "LK
    losses".

    Examples
    --------
    >>> q, p = torch.tensor([0.2, 0.2, 0.6]).log(), torch.tensor([0.45, 0.45, 0.1]).log()
    >>> print(f"{log_overlap(q, p):.4f}")
    0.6931
    """
    shared = torch.minimum(*_log_rows(target_logits, draft_logits))
    apart = (shared == -math.inf).all(-1, keepdim=True)
    return -shared.masked_fill(apart, math.log(torch.finfo(shared.dtype).tiny)).logsumexp(-1)


def mixed(target_logits: Logits, draft_logits: Tensor, *, rate: float = LK_RATE) -> PerRow:
    """Return w·KL(q‖p) + (1 − w)·TV, w = e^(−rate·Σ min(q, p)) detached, (...): LK's mixture.

    Examples
    --------
    >>> q, p = torch.tensor([0.2, 0.2, 0.6]).log(), torch.tensor([0.45, 0.45, 0.1]).log()
    >>> print(f"{mixed(q, p):.4f}")
    0.5559
    """
    check.number("rate", rate, 0.0)
    log_q, log_p = _log_rows(target_logits, draft_logits)
    shared = torch.minimum(log_q.exp(), log_p.exp()).sum(-1)
    weight = (-rate * shared.detach()).exp()
    return weight * _kl(log_q, log_p) + (1 - weight) * (1 - shared)


def along_block(
    losses: Float[Tensor, "*blocks places"], acceptance: Float[Tensor, "..."]
) -> Float[Tensor, "*blocks"]:
    r"""Return the losses along drafted blocks, each weighed by the chance of getting there.

    .. math:: \sum_i w_i \ell_i, \qquad w_i = \prod_{j < i} \alpha_j

    with the acceptance α_j of every place before it, detached. Of −acceptance it is minus the
    expected number of tokens that are accepted, where places are refused independently.

    Parameters
    ----------
    losses, acceptance : (..., K), of the rows along a block; ``acceptance`` is that of
        :func:`at_price`, or :func:`overlap`.

    Raises
    ------
    ValueError
        Shapes that differ.

    Examples
    --------
    >>> accepted = torch.tensor([[0.5, 0.5, 1.0]])
    >>> along_block(-accepted, accepted)
    tensor([-1.])
    """
    if acceptance.shape != losses.shape:
        raise ValueError(
            f"acceptance: shape must equal that of losses {tuple(losses.shape)}; "
            f"got {tuple(acceptance.shape)}"
        )
    alive = acceptance.detach().cumprod(-1)
    reached = torch.cat([torch.ones_like(alive[..., :1]), alive[..., :-1]], -1)
    return (reached * losses).sum(-1)


def _kl(log_q: Logits, log_p: Logits) -> PerRow:
    q = log_q.exp()
    terms = q * (log_q - log_p)
    return torch.where(q > 0, terms, 0.0).sum(-1) if bool((q == 0).any()) else terms.sum(-1)


def _log_rows(target_logits: Logits, draft_logits: Tensor) -> tuple[Logits, Logits]:
    """Return ln q, without gradient, and ln p, at least float32."""
    _check(target_logits, draft_logits)
    wide = _wide(draft_logits)
    return target_logits.detach().to(wide).log_softmax(-1), draft_logits.to(wide).log_softmax(-1)


def _wide(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _check(target_logits: Tensor, draft_logits: Tensor) -> None:
    for name, logits in (("target_logits", target_logits), ("draft_logits", draft_logits)):
        if not (isinstance(logits, Tensor) and logits.is_floating_point()):
            raise TypeError(
                f"{name}: must be a tensor of floats; got {getattr(logits, 'dtype', type(logits))}"
            )
        if not logits.ndim or not logits.shape[-1]:
            raise ValueError(f"{name}: needs a last axis of tokens; got {check.describe(logits)}")
    if target_logits.shape != draft_logits.shape:
        raise ValueError(
            f"draft_logits: shape must equal that of target_logits {tuple(target_logits.shape)}; "
            f"got {tuple(draft_logits.shape)}"
        )


def _check_laws(q: Tensor, p: Tensor) -> None:
    """Raise ValueError for rows without a softmax; on CUDA that would wait for the device."""
    for name, rows in (("target_logits", q), ("draft_logits", p)):
        if not rows.is_cuda and bool(torch.isnan(rows[:, 0]).any()):
            raise ValueError(f"{name}: every row must have a softmax; got NaN or no finite logit")
