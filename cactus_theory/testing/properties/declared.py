"""Properties that a policy must have because of a declaration, or because of its class."""

from collections.abc import Iterator

import torch
from torch import Tensor

from cactus_theory.divergences import read_divergence
from cactus_theory.emitted import raised_alone, raised_to
from cactus_theory.optimum import optimal_acceptance
from cactus_theory.policies import Entrywise, FixedTarget, PerProposal, Policy, SharedResidual
from cactus_theory.policies.tilt import tilt_of
from cactus_theory.testing.definition import EXACT, LAST_COIN, ROUNDING, Bounds
from cactus_theory.testing.properties.behaviour import (
    BETWEEN,
    REAL,
    Behaviour,
    at_knob,
    knob_ladder,
    of_token,
    policy_property,
    residual_entry,
)
from cactus_theory.verify import verify_chain

# tolerance on float32 rows: float32 has 7 digits, of which a policy may lose three
NARROW = 1e-4
# share of the way to 1 by which h_n is raised: at a per-proposal optimum that breaks the budget
STEP = 1e-6
# most tokens of a row that is also checked at drawn values of the knob, to save time
NARROW_ROW = 5


def _has_lossless_value(policy: Policy) -> bool:
    """Return whether the policy declares a value at which it is lossless, in the knob's range."""
    lossless = policy.declares.strict
    return lossless is not None and at_knob(policy, lossless) is not None


@policy_property(
    lambda policy: policy.declares.direction != 0 and len(knob_ladder(policy)) > 1,
    hint="direction is +1 if acceptance grows with the knob on all rows, -1 if it falls on all; a "
    "knob that does both is not monotone: declare none",
    at_other_knobs=False,
)
def acceptance_follows_the_knob(seen: Behaviour) -> Iterator[Bounds]:
    """Σ p φ never falls as the knob moves in the declared ``direction``."""
    ladder = knob_ladder(seen.policy, BETWEEN if seen.q.shape[-1] <= NARROW_ROW else 0)
    values = [value for value, _ in ladder]
    shares = [seen.on(seen.q, seen.p, policy=rung).accepted.sum(-1) for _, rung in ladder]
    direction = seen.policy.declares.direction
    word = "gain" if direction > 0 else "loss"
    gains = direction * torch.stack(shares, -1).diff(dim=-1)

    def about(index: tuple[int, ...]) -> str:
        low, high = values[index[1]], values[index[1] + 1]
        text = f"{word} of acceptance from {seen.policy.knob}={low:g} to {high:g}"
        if (gains[index[0]] > EXACT).any():
            text += " (other steps have one: the knob is not monotone)"
        return text

    yield Bounds(gains, 0, None, about)


@policy_property(
    _has_lossless_value,
    hint="the knob is not used, or strict is not its lossless value",
    at_other_knobs=False,
)
def strict_point_is_lossless(seen: Behaviour) -> Iterator[Bounds]:
    """With the knob at its lossless value, declared as ``strict``, the emitted law is q."""
    lossless = seen.policy.declares.strict
    assert lossless is not None
    exact = seen.on(seen.q, seen.p, policy=at_knob(seen.policy, lossless))
    about = f"emitted probability of token {{0}} at {seen.policy.knob}={lossless:g}"
    yield Bounds(exact.emitted, seen.q, seen.q, about)


def _may_spend_nothing(policy: Policy) -> bool:
    """Return whether the policy declares a budget of 0 for the emitted law."""
    budget = policy.declares.budget
    return budget is not None and budget.scope == "emitted" and budget.amount == 0


def _claims_a_row(policy: Policy) -> bool:
    """Return whether h is a known row at the knob's present value or at its lossless value."""
    return (
        isinstance(policy, FixedTarget) or _has_lossless_value(policy) or _may_spend_nothing(policy)
    )


@policy_property(
    _claims_a_row,
    hint="the residual is not what the emitted row h leaves: it must be (h − p)₊ over its sum, "
    "not q, and not the residual of another row",
)
def residual_is_what_the_row_leaves(seen: Behaviour) -> Iterator[Bounds]:
    """Where p φ = min(p, h) for all tokens, recovered tokens follow (h − p)₊ over its sum.

    For a ``FixedTarget`` h is the row that its method ``target`` returns. For any other policy h
    is q, and the property is tested only where the policy is lossless: under a budget of 0, or at
    the knob's value that the policy declares as ``strict``.
    """
    policy, h, where = seen.policy, seen.q, ""
    if isinstance(policy, FixedTarget):
        h = policy.target(seen.q, seen.p)
    elif not _may_spend_nothing(policy):
        lossless = policy.declares.strict
        if lossless is None or seen.knobs:  # the lossless policy is the same at other knobs
            return
        policy, where = at_knob(policy, lossless), f" at {policy.knob}={lossless:g}"
    exact = seen if policy is seen.policy else seen.on(seen.q, seen.p, policy=policy)
    as_for_h = (exact.accepted - torch.minimum(h, seen.p)).abs() <= EXACT
    judged = as_for_h.all(-1) & ((h.sum(-1) - 1).abs() <= EXACT)
    recovered, residual = exact.emitted - exact.accepted, (h - seen.p).clamp(min=0.0)
    about = f"mass of token {{0}} after rejections{where}, beside its residual (h − p)₊"
    judged = judged[:, None].expand(h.shape)
    # accepted and emitted masses each have an error of EXACT
    yield Bounds(recovered, residual, residual, about, 2 * EXACT, judged)


@policy_property(
    lambda policy: bool(policy.declares.floored or policy.declares.held),
    hint="the boxes of these tokens do not enter the residual, or the edges were solved without",
)
def named_tokens_keep_their_chance(seen: Behaviour) -> Iterator[Bounds]:
    """Held tokens are emitted with probability q, floored tokens with probability at least q."""
    declares = seen.policy.declares
    for ids, most in ((declares.floored, None), (declares.held, seen.q)):
        at = torch.zeros(seen.q.shape, dtype=torch.bool)
        at[:, [token for token in ids if token < seen.width]] = True
        yield Bounds(seen.emitted, seen.q, most, "emitted probability of token {0}", EXACT, at)


@policy_property(
    lambda policy: policy.declares.budget is not None,
    hint="the formula is an approximation, or the budget bounds each proposal and not the "
    "emitted law",
    widest=REAL,
)
def budget_holds(seen: Behaviour) -> Iterator[Bounds]:
    """The divergence is within the declared budget, for the emitted law or every proposal's row."""
    budget = seen.policy.declares.budget
    assert budget is not None
    kind, most = read_divergence(budget.divergence), budget.amount
    allowed = budget.rounding
    if budget.scope == "emitted":
        # without this step towards q, rounding errors of a lossless policy break a budget of 0
        away = seen.emitted - seen.q
        sure = away.sign() * (away.abs() - ROUNDING).clamp(min=0.0)
        # an exact 0 is no rounding error of a q above ROUNDING, if the policy's row has it, too:
        # ``emitted`` adds up p(1 − φ), which is rounded to 0 where φ is 1 less 1e-38
        never = (seen.emitted == 0) & (seen.q > ROUNDING)
        if bool(never.any()):
            never &= seen.policy.emitted(seen.q, seen.p) == 0
        sure = torch.where(never, away, sure)
        spent = kind.value(seen.q + sure, seen.q)
        yield Bounds(spent, None, most, budget.bounds(False), allowed)
        return
    spent = raised_alone(kind, raised_to(seen.policy, seen.q, seen.accepted), seen.q)
    about = budget.bounds(isinstance(seen.policy, PerProposal), "token {0}")
    yield Bounds(spent, None, most, about, allowed, seen.drafted)


@policy_property(
    lambda policy: policy.declares.between,
    hint="the emitted law leaves the interval of p and q: do not declare between=True",
    widest=REAL,
)
def stays_between(seen: Behaviour) -> Iterator[Bounds]:
    """Emitted probabilities lie between p and q (tested if the policy declares ``between``)."""
    low, high = torch.minimum(seen.p, seen.q), torch.maximum(seen.p, seen.q)
    yield Bounds(seen.emitted, low, high, "emitted probability of token {0}")


@policy_property(
    lambda policy: policy.declares.at_least_speculative,
    hint="some token is accepted less often than by min(1, q/p)",
    widest=REAL,
)
def never_slower_than_speculative(seen: Behaviour) -> Iterator[Bounds]:
    """p φ ≥ min(p, q) for every token (tested if the policy declares ``at_least_speculative``).

    The property is about every token, not only about the sum over tokens.
    """
    least = torch.minimum(seen.p, seen.q)
    yield Bounds(seen.accepted.sum(-1), least.sum(-1), None, "acceptance")
    yield Bounds(seen.accepted, least, None, "accepted mass of token {0}")


@policy_property(
    hint="a difference of nearly equal numbers, or a threshold, in float32", steady=True
)
def float32_agrees(seen: Behaviour) -> Iterator[Bounds]:
    """Rows in float32 give the accepted masses and emitted law of float64 rows, to 1e-4.

    Policies with jumps (``continuous=False``) are judged only on rows that are not near a jump.
    """
    q, p = seen.q.float(), seen.p.float()
    single, wide = seen.on(q, p), seen.on(q.double(), p.double())
    judged = wide.steady[:, None].expand(seen.q.shape)
    about = "accepted mass of token {0} in float32"
    yield Bounds(single.accepted, wide.accepted, wide.accepted, about, NARROW, judged)
    about = "emitted probability of token {0} in float32"
    yield Bounds(single.emitted, wide.emitted, wide.emitted, about, NARROW, judged)


@policy_property(
    lambda policy: policy.declares.support == "target",
    hint="the residual row ignores q, or something is added to q; declare support='free' if the "
    "draft may emit what the target cannot",
    widest=REAL,
)
def no_token_without_target_mass(seen: Behaviour) -> Iterator[Bounds]:
    """A token with q = 0 is never emitted (tested if the policy declares ``support="target"``).

    The coins that are tried include the ends 0 and 1 − 2⁻⁵³.
    """
    absent = seen.q == 0
    # by the stated φ and g
    about = "acceptance of token {0}, which has q = 0"
    yield Bounds(seen.phi, 0, 0, about, 0.0, absent & seen.drafted)
    row, n = seen.pairs
    refused = (seen.rejected[row, n] > 0)[:, None] & absent[row]
    about = residual_entry(seen, ", which has q = 0")
    yield Bounds(seen.recovered, 0, 0, about, 0.0, refused, row)
    # by a verifier, for each drafted token with the four pairs of extreme coins
    edges = torch.tensor([0.0, LAST_COIN], dtype=torch.float64)
    coin, draw = (c.repeat(len(n)) for c in torch.cartesian_prod(edges, edges).T)
    row, n = row.repeat_interleave(4), n.repeat_interleave(4)
    target = seen.q[row][:, None, :].expand(-1, 2, -1)
    coins = (coin[:, None], draw)
    verdict = verify_chain(seen.policy, target, seen.p[row][:, None, :], n[:, None], coins=coins)
    token = verdict.output_token_ids[:, 0]
    # ids outside the vocabulary are a mistake of the verifier; other properties find them
    wrong = absent[row, token.clamp(0, seen.q.shape[-1] - 1)].double()
    emitted = torch.zeros_like(seen.q).index_put((row, n), wrong, accumulate=True)
    about = "impossible tokens emitted by extreme coins after drafting token {0}"
    yield Bounds(emitted, 0, 0, about, 0.0)


@policy_property(
    lambda policy: policy.declares.optimal and policy.declares.budget is not None,
    hint="some of the budget is left over, or optimal=True is not meant",
)
def nothing_accepts_more(seen: Behaviour) -> Iterator[Bounds]:
    """No policy within the same budget accepts more (tested if the policy declares ``optimal``).

    A dual bound proves this. If the budget is per proposal, the check is that raising h_n of any
    drafted token n a little would exceed the budget.
    """
    budget = seen.policy.declares.budget
    assert budget is not None
    if budget.scope == "emitted":
        best = optimal_acceptance(seen.q, seen.p, divergence=budget.divergence, delta=budget.amount)
        yield Bounds(seen.accepted.sum(-1), best.acceptance - best.gap, None, "acceptance")
        return
    raised = torch.maximum(seen.accepted, seen.q)  # the least h_n ≥ q_n that accepts n so often
    # 1/q, the largest possible ratio h/q, has to be finite
    judged = seen.drafted & (seen.phi < 1) & (1 / seen.q).isfinite() & (raised < 1 - EXACT)
    more = raised_alone(read_divergence(budget.divergence), raised + STEP * (1 - raised), seen.q)
    about = f"{budget.divergence} of accepting token {{0}} slightly more often"
    yield Bounds(more, budget.amount, None, about, budget.rounding, judged)


@policy_property(
    lambda policy: isinstance(policy, Entrywise) and not tilt_of(policy),
    hint="φ reads more of the rows than q_n and p_n: the class must not be Entrywise",
)
def reads_only_drafted_entries(seen: Behaviour) -> Iterator[Bounds]:
    """φ(n) depends on q_n and p_n alone (tested for ``Entrywise`` policies without a tilt).

    In the check, the mass of all other tokens is spread evenly over them, or put on one of them.
    """
    row, token = seen.pairs
    expected = seen.phi[row, token]
    for how, moved in (("spread evenly", _evenly), ("on one token", _on_one)):
        q, p = (moved(rows[row], token) for rows in (seen.q, seen.p))
        phi = seen.policy.acceptance(q, p, token[:, None])[:, 0]
        about = of_token(token, f"acceptance of token {{n}} with all other mass {how}")
        yield Bounds(phi, expected, expected, about, EXACT, rows=row)


@policy_property(
    lambda policy: type(policy).bounds is not Policy.bounds and not tilt_of(policy),
    hint="some φ(n) is outside of the class's bounds, which a verifier asks before it reads a row",
    widest=REAL,
)
def accepts_within_its_bounds(seen: Behaviour) -> Iterator[Bounds]:
    """φ(n) is within the policy's ``bounds``, which read q_n and p_n alone."""
    least, most = seen.policy.bounds(seen.q, seen.p)
    yield Bounds(
        seen.phi, least.clamp(max=1.0), most, "acceptance of token {0}", EXACT, seen.drafted
    )


@policy_property(
    lambda policy: isinstance(policy, SharedResidual | FixedTarget),
    hint="g depends on the rejected token: the class must not be SharedResidual",
)
def recovers_alike(seen: Behaviour) -> Iterator[Bounds]:
    """g(·|n) is equal for all n that may be rejected (for ``SharedResidual``, ``FixedTarget``)."""
    row, token = (part[seen.rejected[seen.pairs] > 0] for part in seen.pairs)
    if not len(row):
        return
    first = torch.searchsorted(row, row)  # the first rejectable token of the same row, as rows rise
    g = seen.recovered_at(row, token)

    def about(index: tuple[int, ...]) -> str:
        after, other = int(token[index[0]]), int(token[first[index[0]]])
        return f"residual probability of token {index[1]} after token {after}, as after {other}"

    yield Bounds(g, g[first], g[first], about, EXACT, rows=row)


def _evenly(rows: Tensor, token: Tensor) -> Tensor:
    """Return rows with each row's ``token`` as before, and all other mass spread evenly."""
    entry = rows.gather(-1, token[:, None])
    share = (1 - entry) / max(1, rows.shape[-1] - 1)
    return share.expand(rows.shape).scatter(-1, token[:, None], entry)


def _on_one(rows: Tensor, token: Tensor) -> Tensor:
    """Return rows in which ``token`` keeps its probability, and the next id has all the rest."""
    entry = rows.gather(-1, token[:, None])
    other = (token[:, None] + 1) % rows.shape[-1]
    return torch.zeros_like(rows).scatter(-1, other, 1 - entry).scatter(-1, token[:, None], entry)
