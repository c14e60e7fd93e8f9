r"""Lossy verification of deterministic drafts as a bias on the logit of each drafted token.

A deterministic draft of the token d (greedy, n-gram) is judged by the row that is q with d
raised to :math:`h_d` and the rest in proportion: the optimum under every divergence, and what
every policy with a ceiling emits. So h is the softmax of the same logits with one of them moved,

.. math:: l_d' = l_d + T \ln r, \qquad r = \frac{h_d}{1 - h_d} \cdot \frac{1 - q_d}{q_d},

with q the row at temperature T, and an engine that verifies losslessly against the biased logits
emits h. For the band r is b/a: at a KL price λ it is :math:`e^{1/λ}` whatever the row holds. The
best law of a whole block at KL price λ has :math:`\ln r_i = \ln z_{i+1}`, with
:math:`z_i = e^{1/λ}(1 - q_i + q_i z_{i+1})` and :math:`e^{1/λ}` after the last drafted token.

The bias belongs to logits before they are divided by T. Cutting h afterwards (top-p, min-p,
top-k) cuts elsewhere than cutting q, so that the law would be another one. At T = 0 a share of
the row means nothing, and a policy changes nothing there.

:func:`truncate_` cuts logits before a policy acts, in vLLM's order: min-p, top-k, top-p.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cactus_theory.policies import Policy
from cactus_theory.policies._base_classes import Entrywise
from cactus_theory.policies.band import Band
from cactus_theory.policies.raised import Speculative

# log-odds of the drafted token at h_d = 1, by dtype: the others' mass is 0 in that dtype
MOST_ODDS = {torch.float32: 110.0, torch.float64: 760.0}
# largest constant ln r: it outweighs every difference of logits, and stays finite
MOST_UNIT = 1e4


@dataclass(frozen=True)
class Lifts:
    """The biases that policies add to the logits of drafted tokens, as ln r."""

    policies: Sequence[Policy]
    units: Float[Tensor, "m"]  # ln r of each policy where it is a constant, else 0; float64
    ahead: Bool[Tensor, "m"]  # whether ln r is ln z of the following row
    looking: frozenset[int]  # numbers of the policies that look ahead
    solved: frozenset[int]  # numbers of the policies without a constant


def lifts_of(
    policies: Sequence[Policy], device: torch.device | str = "cpu", *, whole: bool = False
) -> Lifts:
    """Return policies as biases; ``whole``: of whole blocks, along which a KL price looks ahead.

    ValueError for a policy whose row for a deterministic draft is not q with the drafted token
    raised by its entry alone.
    """
    for policy in policies:
        check_policy(policy)
    units = [_unit(policy) for policy in policies]
    ahead = [whole and policy.look_ahead is not None for policy in policies]
    constants = torch.tensor([unit or 0.0 for unit in units], dtype=torch.float64, device="cpu")
    return Lifts(
        policies,
        constants.to(device),
        torch.tensor(ahead, device="cpu").to(device),
        frozenset(number for number, is_ahead in enumerate(ahead) if is_ahead),
        frozenset(number for number, unit in enumerate(units) if unit is None),
    )


def check_policy(policy: Policy) -> None:
    """Raise ValueError unless the policy is a bias; see :func:`lifts_of`."""
    if not isinstance(policy, Entrywise | Band) or getattr(policy, "boxed", False):
        raise ValueError(
            "policy: must judge a deterministic draft by the drafted token's probability alone "
            "(band without head, floor and hold, cactus, cactus_exact, lenience, "
            f"mixture, speculative); got {policy.spec}"
        )


def is_lossless(policy: Policy) -> bool:
    """Return whether the bias of the policy is 0 everywhere."""
    return _unit(policy) == 0


def drafted_bias(
    lifts: Lifts,
    logits: Float[Tensor, "rows vocab"],
    drafted: Int[Tensor, "rows"],
    temperature: Float[Tensor, "rows"],
    *,
    choice: Int[Tensor, "rows"] | None = None,
    present: Collection[int] | None = None,
    width: int,
) -> Float[Tensor, "rows"]:
    """Return the bias to add to the logit of each row's drafted token, float64.

    Requests lie one after another, a row for each drafted token and one for the bonus token, and
    draft ``width`` tokens at most. ``logits`` are raw; −∞ excludes a token, which is never raised
    (a mixture emits such tokens, too, but not here). ``drafted`` is the token that is tested at
    each row, negative at bonus rows and where a draft ends before it; ``choice`` the number of each
    row's policy (None: the first one), and ``present`` the numbers that occur (None: any). Rows at
    temperature 0 get no bias.

    Nothing is read on the host unless a policy has no constant ln r: those are solved on rows of
    two tokens, the drafted one and the others. With constants alone the rows are not read, but for
    the drafted entries.
    """
    place = drafted.clamp(min=0).long()[:, None]
    drafted_logits = logits.gather(-1, place)[:, 0]
    sampled = temperature > 0
    heat = torch.where(sampled, temperature, 1.0).double()
    choice = torch.zeros_like(place[:, 0]) if choice is None else choice.long()
    power = lifts.units[choice]
    numbers = range(len(lifts.policies)) if present is None else present
    looking, solved = lifts.looking.intersection(numbers), lifts.solved.intersection(numbers)
    if looking or solved:
        entry, others = log_entries(logits, place, heat)
        if looking:
            later = _ahead(entry, others, power, drafted, width)
            power = torch.where(lifts.ahead[choice], later, power)
        for number in solved:
            own = solved_power(lifts.policies[number], entry, others, drafted_logits)
            power = torch.where(choice == number, own, power)
    bias, raised = heat * power, sampled & (drafted >= 0) & drafted_logits.isfinite()
    return torch.where(raised & bias.isfinite(), bias, 0.0)


def log_entries(
    logits: Float[Tensor, "rows vocab"], place: Int[Tensor, "rows 1"], heat: Float[Tensor, "rows"]
) -> tuple[Float[Tensor, "rows"], Float[Tensor, "rows"]]:
    """Return ln q and ln(1 − q) of one token a row at temperature ``heat``, float64.

    The sums are those of the dtype of the logits; neither cancels where q is near 0 or 1.
    """
    rows = logits / heat.to(logits.dtype)[:, None]
    entries = rows.gather(-1, place)[:, 0].double()
    others = rows.scatter_(-1, place, -torch.inf).logsumexp(-1).double()
    total = torch.logaddexp(entries, others)
    return entries - total, others - total


def solved_power(
    policy: Policy,
    entry: Float[Tensor, "rows"],
    others: Float[Tensor, "rows"],
    like: Tensor,
) -> Float[Tensor, "rows"]:
    """Return ln r of a policy from ln q and ln(1 − q) of the drafted token, 0 where r = 0/0.

    The other tokens keep their proportions, so that they count as one.
    """
    open_ = entry.isfinite() & others.isfinite()
    pairs = torch.stack([torch.where(open_, part, -math.log(2)) for part in (entry, others)], -1)
    rows = pairs.exp()
    deterministic = torch.zeros_like(rows)
    deterministic[:, 0] = 1.0
    law = policy.emitted(rows, deterministic)
    odds = law[:, 0].log() - law[:, 1].clamp(min=0.0).log()
    most = MOST_ODDS[like.dtype]
    return torch.where(open_, odds.clamp(-most, most) - (pairs[:, 0] - pairs[:, 1]), 0.0)


def _ahead(
    entry: Float[Tensor, "rows"],
    others: Float[Tensor, "rows"],
    unit: Float[Tensor, "rows"],
    drafted: Int[Tensor, "rows"],
    width: int,
) -> Float[Tensor, "rows"]:
    """Return ln z of the row after each: from the last drafted token back, all requests at once.

    A row with a drafted token is followed by a row of the same request.
    """
    follows = unit
    for _ in range(width - 1):
        worth = unit + torch.logaddexp(others, entry + follows)
        worth = torch.where((drafted >= 0) & worth.isfinite(), worth, unit)
        follows = torch.cat([worth[1:], unit[-1:]])
    return follows


def _unit(policy: Policy) -> float | None:
    """Return ln r of a policy, of the last token for one that looks ahead; None if it varies."""
    if isinstance(policy, Speculative):
        return 0.0
    if isinstance(policy, Band) and policy.price is not None and policy.divergence == "kl":
        return min(1 / policy.price, MOST_UNIT) if policy.price > 0 else MOST_UNIT
    return None


class Cut(NamedTuple):
    """A truncation of q before the policy acts; these values leave it whole."""

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


def truncate_(
    logits: Float[Tensor, "rows vocab"],
    temperature: Float[Tensor, "rows"],
    *,
    min_p: Float[Tensor, "rows"],
    top_k: Int[Tensor, "rows"],
    top_p: Float[Tensor, "rows"],
) -> Float[Tensor, "rows vocab"]:
    """Set logits outside each row's set to −inf, in place; nothing is read on the host.

    The set is that of softmax(l/T): what is at least ``min_p`` times the largest, of these the
    ``top_k`` likeliest with ties (0: all), of these the likeliest whose mass first reaches
    ``top_p``. Rows at temperature 0 are left as they are.
    """
    sampled = temperature > 0
    heat = torch.where(sampled, temperature, 1.0).to(logits.dtype)[:, None]
    rows, order = (logits / heat).sort(-1)
    count = rows.shape[-1]
    least = rows[:, -1:] + min_p.to(rows.dtype)[:, None].log()
    first = torch.where(top_k > 0, count - top_k, 0).clamp(0, count - 1)[:, None]
    cut = (rows < least) | (rows < rows.gather(-1, first))
    mass = rows.masked_fill(cut, -torch.inf).softmax(-1).cumsum(-1)
    tail = (mass <= 1 - top_p.to(rows.dtype)[:, None]) & (top_p < 1)[:, None]
    tail[:, -1] = False
    cut = (cut | tail) & sampled[:, None]
    return logits.masked_fill_(torch.zeros_like(cut).scatter_(-1, order, cut), -torch.inf)
