"""The law that a policy emits, and an audit of its claims on rows (THEORY.md, Theorems 1 and 5).

Commands, tests and the nodes of drafted paths (:mod:`cactus_theory.verify.node`) use this module.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cactus_theory.base import tensors
from cactus_theory.base.chunks import in_parts, joined
from cactus_theory.base.copies import called, lawful
from cactus_theory.base.threads import one_thread
from cactus_theory.divergences import Divergence, read_divergence
from cactus_theory.divergences.definition import examples
from cactus_theory.optimum.bands import HEAD
from cactus_theory.optimum.batch_edges import solve_edges
from cactus_theory.optimum.certificate import geometry_of
from cactus_theory.policies import Declaration, PerProposal, Policy, read_policy
from cactus_theory.policies.claims import BUDGET_TOLERANCE
from cactus_theory.policies.policy import one_hot


@one_thread()
def emitted_law(
    policy: str | Policy,
    target_probs: Any,
    draft_probs: Any = None,
    *,
    draft_token_ids: Any = None,
    normalise: bool = False,
) -> Any:
    """Return the emitted law: the exact distribution of the next token under a policy.

    out(x) = p_x φ(x) + Σ_n p_n (1 − φ(n)) g(x|n), with acceptance probability φ and residual law g.

    The law is computed in float64 and returned as rows (..., V) in the input's kind. Input rows may
    be float64, float32, float16 or bfloat16 and are divided by their sums. The work for a row is
    O(V log V) for per-proposal policies, O(V) if the residual is shared, O(V²) for any other
    policy. A few rows are computed at a time, on one thread: beside rows and laws the function
    takes at most 100 MB, whatever the batch.

    A deterministic draft (greedy, n-gram) has no rows. Give ``draft_probs=None`` and
    ``draft_token_ids`` n (...), one token a row; then out = φ(n) e_n + (1 − φ(n)) g(·|n).
    Rows must sum to 1 up to a tolerance by dtype. With ``normalise`` any positive sum will do, such
    as that of a float32 softmax that was cast to float64.

    Raises
    ------
    ValueError, TypeError
        Rows that are not distributions over one vocabulary, ids outside the vocabulary, draft rows
        and ids both given or both missing, or a ``policy`` that is neither a Policy nor a spec.

    Examples
    --------
    >>> q, p = np.array([0.2, 0.2, 0.6]), np.array([0.45, 0.45, 0.1])
    >>> ct.emitted_law("cactus:delta=0.25", q, p).round(4)
    array([0.45, 0.45, 0.1 ])
    >>> ct.emitted_law("cactus:delta=0.25", q, None, draft_token_ids=2).round(4)
    array([0.0268, 0.0268, 0.9464])
    """
    policy = read_policy(policy)
    target, parts = _few_rows(target_probs, draft_probs, draft_token_ids, normalise)
    laws = ((at, (lawful(called(policy), policy.emitted(q, p)),)) for at, q, p in parts)
    (law,) = joined(laws, math.prod(target.shape[:-1]))
    return tensors.scalar_like(law.reshape(target.shape), target_probs)


def raised_off_head(emitted: Tensor, target: Tensor, head: float = HEAD) -> Tensor:
    r"""Return the mass that rows h add to q at tokens far less likely than the target's likeliest.

    .. math:: \sum_{q_i < \beta \max q} (h_i - q_i)_+

    with β = ``head``, for rows (..., V); the result is (...).
    """
    h, q = tensors.float64_rows(emitted, target)
    return (h - q).clamp_(min=0.0).mul_(q < head * q.amax(-1, keepdim=True)).sum(-1)


@dataclass(frozen=True)
class Audit:
    """The result of :func:`audit`, which documents the fields."""

    policy: str
    declares: Declaration
    acceptance: Any
    divergences: dict[str, Any]
    raised_off_head: Any
    entropy: Any
    surprise: Any
    agreement: Any
    within: Any
    spent: Any
    bounds: str | None
    over_share: Any
    optimum_acceptance: Any
    optimum_divergence: Any
    reference: str


@one_thread()
def audit(
    policy: str | Policy,
    target_probs: Any,
    draft_probs: Any = None,
    *,
    draft_token_ids: Any = None,
    divergence: str | Divergence = "kl",
    normalise: bool = False,
) -> Audit:
    """Measure a policy exactly on given rows (..., V), and check its claims; nothing is sampled.

    ``divergence`` is the divergence in which the policy is compared with the optimum. Results are
    float64 of shape (...). Deterministic drafts (``draft_probs=None`` and ``draft_token_ids``
    (...)), ``normalise`` and the memory taken are as for :func:`emitted_law`.

    Returns
    -------
    policy : the policy's spec. ``declares`` is its declaration.
    acceptance : (...), Σ p φ, the probability of accepting the drafted token.
    divergences : spec → (...), D(emitted‖q).
    raised_off_head : (...), see :func:`cactus_theory.emitted.raised_off_head`.
    entropy, surprise, agreement : (...), see :func:`cactus_theory.emitted.directions`.
    within : (...) bool, whether the declared budget held; None without a budget.
    spent : (...), the divergence that the budget bounds; None without a budget. By the budget's
        scope it is the divergence of the emitted law, or the largest of any proposal with p > 0. If
        the policy is not ``PerProposal``, the proposal for a token is the row of least divergence
        that accepts the token as often as the policy does.
    bounds : the bounded divergence in words, as ``check`` prints it; None without a budget.
    over_share : (...), probability, over drafted tokens, that the proposal exceeds the budget; None
        for policies without a per-proposal budget.
    optimum_acceptance : (...), the best acceptance at an equal emitted divergence.
    optimum_divergence : (...), the least divergence at an equal acceptance; NaN if policies that
        never emit tokens with q = 0 cannot reach this acceptance.
    reference : the spec of ``divergence``, in which the two optima are measured.

    Raises
    ------
    ValueError, TypeError
        As for :func:`emitted_law`; an unknown divergence.

    Examples
    --------
    >>> q, p = np.array([0.2, 0.2, 0.6]), np.array([0.45, 0.45, 0.1])
    >>> report = ct.audit("band:delta=0.1", q, p)
    >>> print(f"{report.acceptance:.4f} at {report.divergences['kl']:.4f} nats")
    0.7221 at 0.1000 nats
    >>> print(f"held: {report.within}; the optimum there: {report.optimum_acceptance:.4f}")
    held: True; the optimum there: 0.7221
    """
    policy, reference = read_policy(policy), read_divergence(divergence)
    specs = tuple(dict.fromkeys((*examples(), reference.spec)))
    target, parts = _few_rows(target_probs, draft_probs, draft_token_ids, normalise)
    batch, budget = target.shape[:-1], policy.declares.budget
    measured = ((at, _measured(policy, q, p, reference, specs)) for at, q, p in parts)
    accepted, raised, entropy, surprise, agreement, spent, within, over, best, least, *values = (
        None if column is None else tensors.scalar_like(column.reshape(batch), target_probs)
        for column in joined(measured, math.prod(batch))
    )
    return Audit(
        policy=policy.spec,
        declares=policy.declares,
        acceptance=accepted,
        divergences=dict(zip(specs, values, strict=True)),
        raised_off_head=raised,
        entropy=entropy,
        surprise=surprise,
        agreement=agreement,
        within=within,
        spent=spent,
        bounds=None if budget is None else budget.bounds(isinstance(policy, PerProposal)),
        over_share=over,
        optimum_acceptance=best,
        optimum_divergence=least,
        reference=reference.spec,
    )


def _measured(
    policy: Policy, q: Tensor, p: Tensor, reference: Divergence, specs: Sequence[str]
) -> list[Tensor | None]:
    """Return a column for each measured field of :class:`Audit`, then one for each divergence."""
    law, accepted = law_and_acceptance(policy, q, p)
    kinds = (reference if spec == reference.spec else read_divergence(spec) for spec in specs)
    values = [kind.value(law, q) for kind in kinds]
    optima = _optima(q, p, reference, values[specs.index(reference.spec)], accepted)
    measures = accepted, raised_off_head(law, q), *directions(law, q)
    return [*measures, *_spent(policy, q, p, law), *optima, *values]


def directions(law: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return entropy, surprise and agreement of emitted laws h (..., V): how h departs from q.

    The entropy is that of h, in nats. The surprise Σ h (−ln q) − H(q), in nats, says how much lower
    the mean ln q of emitted tokens is than that of the target's tokens; it is ∞ where h emits
    tokens with q = 0. The agreement Σ h q − Σ q² says how much more often the emitted token equals
    an independent draw from q than another draw from q does. Surprise and agreement are linear in
    h, may have either sign, and are 0 for h = q.
    """
    moved = law - q
    surprise = -torch.special.xlogy(moved, q).sum(-1)
    return torch.special.entr(law).sum(-1), surprise, (moved * q).sum(-1)


def law_and_acceptance(policy: Policy, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Return the emitted law (N, V) and the acceptance (N,) of rows, float64.

    ValueError for a law without finite mass, and for a φ that is not a probability.
    """
    law = lawful(called(policy), policy.emitted(q, p))
    phi = policy.acceptance_row(q, p)
    wrong = ((phi < 0) | (phi > 1 + BUDGET_TOLERANCE)) & (p > 0)
    if bool(wrong.any()):
        got = float(phi[wrong][0])
        raise ValueError(f"{called(policy)}: must accept with a probability, 0 to 1; got {got:.6g}")
    return law, (p * phi).sum(-1)


def best_acceptance(q: Tensor, p: Tensor, kind: Divergence, spent: Tensor) -> Tensor:
    """Return the best acceptance (N,) of each row at the divergence ``spent``."""
    geometry = geometry_of(q, p, kind)
    edges = solve_edges(geometry, "delta", spent.clamp(min=0.0))
    return geometry.measured(edges).acceptance


def _spent(policy: Policy, q: Tensor, p: Tensor, law: Tensor) -> tuple[Tensor | None, ...]:
    """Return the fields ``spent``, ``within`` and ``over_share`` of :class:`Audit`."""
    budget, over = policy.declares.budget, None
    if budget is None:
        return None, None, None
    kind = read_divergence(budget.divergence)
    if budget.scope == "emitted":
        spent = kind.value(law, q)
    else:
        costs = proposal_divergence(policy, q, p, kind)
        over = torch.where(budget.held(costs), 0.0, p).sum(-1)
        spent = torch.where(p > 0, costs, 0.0).amax(-1)
    return spent, budget.held(spent), over


def proposal_divergence(policy: Policy, q: Tensor, p: Tensor, kind: Divergence) -> Tensor:
    """Return D(h‖q) of the row h that each token n is verified against, for all n: (..., V).

    :func:`raised_to` says which row this is.
    """
    return raised_alone(kind, raised_to(policy, q, p * policy.acceptance_row(q, p)), q)


def raised_to(policy: Policy, q: Tensor, accepted: Tensor) -> Tensor:
    """Return h_n of the row that each token n is verified against, from ``accepted`` = p φ.

    For per-proposal policies h_n is the policy's ``gamma``. For others it is the least h_n ≥ q_n
    that accepts n as often as the policy does.
    """
    least = torch.maximum(accepted, q)
    return torch.maximum(policy.gamma(q), least) if isinstance(policy, PerProposal) else least


def raised_alone(kind: Divergence, h_n: Tensor, q_n: Tensor) -> Tensor:
    """Return D(h‖q) of the cheapest row with a given h_n: q scaled at all other tokens.

    All tokens but n have one ratio h/q, so D is computed from two entries: h_n and the rest.
    """
    rows = (torch.stack([entry, 1 - entry], -1) for entry in (h_n.clamp(0, 1), q_n))
    return kind.value(*rows)


def _optima(
    q: Tensor, p: Tensor, kind: Divergence, spent: Tensor, accepted: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the best acceptance at a divergence, and the least divergence at an acceptance; (N,).

    The divergence is NaN if ``accepted`` is out of reach without emitting tokens of q = 0.
    """
    geometry = geometry_of(q, p, kind)
    reachable = geometry.reachable
    equal_acceptance = solve_edges(geometry, "acceptance", torch.minimum(accepted, reachable))
    least = geometry.measured(equal_acceptance).divergence
    beyond = accepted > reachable + BUDGET_TOLERANCE
    return best_acceptance(q, p, kind, spent), torch.where(beyond, torch.nan, least)


def _few_rows(
    target_probs: Any, draft_probs: Any, draft_token_ids: Any, normalise: bool
) -> tuple[Tensor, Iterator[tuple[slice, Tensor, Tensor]]]:
    """Return the checked target rows, and an iterator of a few float64 rows of q and p at a time.

    Target and draft are broadcast to one shape; each item is a slice of the flattened batch, and
    its rows of q and p. ``draft_token_ids``, one for a row, stand for one-hot draft rows.
    """
    if (draft_probs is None) == (draft_token_ids is None):
        number = "neither" if draft_probs is None else "both"
        raise ValueError(
            f"draft_probs, draft_token_ids: exactly one must be given; got {number} of them"
        )
    if draft_token_ids is None:
        target, draft = tensors.checked_rows(target_probs, draft_probs, normalise)
        return target, ((at, q, p) for at, (q, p) in in_parts(target, draft))
    target = tensors.as_tensor("target_probs", target_probs)
    tensors.check_probabilities("target_probs", target, normalise)
    ids = torch.as_tensor(draft_token_ids, device=target.device)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"draft_token_ids: must hold whole numbers; got dtype {ids.dtype}")
    vocab = target.shape[-1]
    # on a GPU a look at the ids would wait for the device
    if ids.numel() and not ids.is_cuda and not bool(((ids >= 0) & (ids < vocab)).all()):
        wrong = ids[(ids < 0) | (ids >= vocab)].flatten()[0].item()
        raise ValueError(f"draft_token_ids: must lie in [0, {vocab}); got {wrong}")
    try:
        shape = torch.broadcast_shapes(target.shape[:-1], ids.shape)
    except RuntimeError:
        raise ValueError(
            f"draft_token_ids: shape must broadcast with the rows' {tuple(target.shape[:-1])}; "
            f"got {tuple(ids.shape)}"
        ) from None
    target, ids = target.expand(*shape, vocab), ids.expand(shape).flatten().long()
    return target, ((at, q, one_hot(ids[at], q)) for at, (q,) in in_parts(target))
