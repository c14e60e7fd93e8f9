"""Properties that every policy must have, whatever the policy declares.

φ(n) is the probability that a drafted token n is accepted, g(·|n) the residual distribution after
its rejection. Some properties run the verifier ``chain`` with chosen coins (uniform random
numbers), and compare its decisions with φ and g.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cactus_theory.divergences import read_divergence
from cactus_theory.policies import Policy
from cactus_theory.testing.definition import EXACT, FINITE, LAST_COIN, ROUNDING, Bounds
from cactus_theory.testing.properties.behaviour import (
    REAL,
    Behaviour,
    at_knob,
    of_token,
    policy_property,
    residual_entry,
)
from cactus_theory.verify import verify_chain
from cactus_theory.verify.chain import Chain
from cactus_theory.verify.node import nodes_of_rows

# tolerance with which a probability is compared with 0 and 1
PROBABILITY = 1e-12


@policy_property(hint="0/0, log 0, or an index that some row does not have", widest=REAL)
def answers(seen: Behaviour) -> Iterator[Bounds]:
    """Every call returns finite numbers of the right shape within the time limit."""
    most = FINITE
    yield Bounds(seen.phi, -most, most, "acceptance of token {0}", 0.0, seen.drafted)
    yield Bounds(seen.recovered, -most, most, residual_entry(seen), 0.0, rows=seen.pairs[0])


@policy_property(hint="the min(1, ·) is missing, or a difference may be negative", widest=REAL)
def acceptance_is_a_probability(seen: Behaviour) -> Iterator[Bounds]:
    """0 ≤ φ(n) ≤ 1 for every token n that can be drafted."""
    yield Bounds(seen.phi, 0, 1, "acceptance of token {0}", PROBABILITY, seen.drafted)


@policy_property(hint="the residual row is not divided by its sum, or its sum is 0", widest=REAL)
def residual_is_a_distribution(seen: Behaviour) -> Iterator[Bounds]:
    """g(·|n) ≥ 0 and Σ g = 1 for every token n that can be drafted, rejected or not."""
    g, (row, token) = seen.recovered, seen.pairs
    yield Bounds(g, 0, 1, residual_entry(seen), PROBABILITY, rows=row)
    about = of_token(token, "sum of the residual row after token {n}")
    yield Bounds(g.sum(-1), 1, 1, about, EXACT, rows=row)


@policy_property(
    hint="acceptance and residual do not fit each other, or emitted() is not exact",
    widest=REAL,
)
def emitted_law_sums_to_one(seen: Behaviour) -> Iterator[Bounds]:
    """Σ out = 1 with out(x) = p φ(x) + Σ p_n (1 − φ(n)) g(x|n), and ``emitted`` returns it."""
    yield Bounds(seen.emitted.sum(-1), 1, 1, "sum of the emitted law")
    fast = seen.policy.emitted(seen.q.double(), seen.p.double())
    yield Bounds(fast, seen.emitted, seen.emitted, "emitted() at token {0}")


@policy_property(
    hint="a sum, maximum or index runs over the batch instead of the last axis", steady=True
)
def batch_equals_loop(seen: Behaviour) -> Iterator[Bounds]:
    """φ and the emitted law of a row do not depend on the other rows of the same call."""
    rows = len(seen.q)
    q, p = (torch.cat([row, row.roll(1, -1), row.flip(-1)]) for row in (seen.q, seen.p))
    together = seen.on(q, p)
    numbers = together.phi[:rows], together.emitted[:rows]
    yield from _unmoved(seen, *numbers, "among other rows", seen.steady)
    for row in range(min(rows, 3)):
        single = seen.policy.acceptance(seen.q[row], seen.p[row], seen.tokens[row])
        part = slice(row, row + 1)
        expected, judged = seen.phi[part], seen.steady[part, None] & seen.drafted[part]
        about = "acceptance of token {0} without a batch axis"
        only = torch.tensor([row])
        yield Bounds(single[None], expected, expected, about, EXACT, judged, only)


def _unmoved(
    seen: Behaviour, phi: Tensor, emitted: Tensor, when: str, rows: Tensor, allowed: Any = EXACT
) -> Iterator[Bounds]:
    """Yield bounds: ``phi`` and ``emitted`` equal those of ``seen`` where ``rows`` (R,) is True."""
    judged = rows[:, None].expand(seen.q.shape)
    about = f"acceptance of token {{0}} {when}"
    yield Bounds(phi, seen.phi, seen.phi, about, allowed, judged & seen.drafted)
    about = f"emitted probability of token {{0}} {when}"
    yield Bounds(emitted, seen.emitted, seen.emitted, about, EXACT, judged)


def _names_no_tokens(policy: Policy) -> bool:
    """Return whether the policy treats all token ids alike."""
    return not (policy.declares.floored or policy.declares.held)


@policy_property(
    _names_no_tokens, hint="an index, or the first or last token, is treated specially", steady=True
)
def names_of_tokens_do_not_matter(seen: Behaviour) -> Iterator[Bounds]:
    """Permuting the tokens permutes φ and the emitted law alike (rows with exact ties excluded).

    The tokens are moved by one place, and by a drawn permutation, which also separates neighbours.
    """
    ordered = seen.q.sort(-1).values
    # among tokens of equal q a rule may choose by their ids
    tied = ((ordered.diff(dim=-1) == 0) & (ordered[:, 1:] > 0)).any(-1)
    places = torch.arange(seen.width)
    drawn = torch.randperm(seen.width, generator=torch.Generator().manual_seed(seen.width))
    for order in (places.roll(1), drawn):
        moved, back = seen.on(seen.q[:, order], seen.p[:, order]), order.argsort()
        numbers, judged = (moved.phi[:, back], moved.emitted[:, back]), seen.steady & ~tied
        yield from _unmoved(seen, *numbers, "after moving all tokens", judged, _resummed(seen))


@policy_property(
    _names_no_tokens,
    hint="the number of tokens is used, or tokens with q = 0 are counted",
    steady=True,
)
def impossible_tokens_do_not_matter(seen: Behaviour) -> Iterator[Bounds]:
    """Adding tokens with q = p = 0 changes nothing, and the added tokens are never emitted."""
    q, p = (torch.nn.functional.pad(row, (1, 2)) for row in (seen.q, seen.p))
    wide = seen.on(q, p)
    numbers, when = (wide.phi[:, 1:-2], wide.emitted[:, 1:-2]), "after adding impossible tokens"
    yield from _unmoved(seen, *numbers, when, seen.steady, _resummed(seen))
    added = torch.cat([wide.emitted[:, :1], wide.emitted[:, -2:]], -1)
    yield Bounds(added, 0, 0, "emitted probability of an added impossible token", 0.0)


def _resummed(seen: Behaviour) -> Tensor:
    """Return the tolerance of φ after sums in another order: a rounding error of p φ, over p."""
    return EXACT + ROUNDING / seen.p.clamp(min=ROUNDING)


# least g(x|n) of a recovered token x that is checked: rounding errors may miss a narrower share
BORDER = 1e-9
# most rows, and most drafted tokens in these rows, whose coins are enumerated
MOST_ROWS, MOST_PAIRS = 10, 40
COINS = 4
# most draws in a wide row, and most entries of target rows verified at once
MOST_DRAWS, ENTRIES = 16, 2**18
# distance of a coin from φ at which rounding cannot change the decision; by how much rounding of a
# row may change a token's mass p φ; denominator of the coins that may equal φ exactly
APART, MOVED, SHORT = 1e-12, 1e-15, 2.0**20


def _coins_at(phi: Tensor, apart: Tensor) -> Tensor:
    """Return four coins for each drafted token: 0, just below φ, equal to φ, just above φ."""
    # a verifier may round φ differently, except for short binary fractions: otherwise use coin 0
    short = (phi * SHORT == (phi * SHORT).round())[:, 0]
    at = torch.where(short, phi[:, 0], 0.0)
    coins = [torch.zeros_like(at), phi[:, 1] - apart, at, phi[:, 3] + apart]
    return torch.stack(coins, 1).nan_to_num(0.0).clamp(0, LAST_COIN)


@policy_property(
    hint="coin <= φ instead of coin < φ, or draws read from another row", at_other_knobs=False
)
def coins_decide_as_declared(seen: Behaviour) -> Iterator[Bounds]:
    """A drafted token is accepted iff its coin < φ; a rejected one is replaced by g's quantile.

    The acceptance coins that are tried are 0, just below φ, φ itself and just above φ. The draws of
    replacements are the middles of the intervals of [0, 1) that g gives to tokens (at most 31).
    """
    rows, vocab = min(MOST_ROWS, len(seen.q)), seen.q.shape[-1]
    row, n = seen.drafted[:rows].nonzero().T
    # ids of the tokens to recover; for each there is a draw in the middle of its share
    aims = torch.arange(0, vocab, max(1, vocab // MOST_DRAWS))
    most = max(1, min(MOST_PAIRS, ENTRIES // (2 * vocab * COINS * len(aims))))
    chosen = torch.arange(len(n))
    if most < MOST_PAIRS:  # wide rows: a few drafted tokens, spread over all of them
        chosen = torch.arange(0, len(n), max(1, len(n) // most))
    row, n = row[chosen[:most]], n[chosen[:most]]
    shape = (len(n), COINS, len(aims))
    each, ids = (x[:, None, None].expand(shape).reshape(-1, 1) for x in (row, n))
    target = torch.stack([seen.q[:rows]] * 2, 1)[each[:, 0]]
    draft = seen.p[each]
    # φ is computed with the verifier's shapes, so that both values agree to the last bit
    phi = seen.policy.acceptance(target[:, :1], draft, ids[..., None]).reshape(shape)
    apart = (MOVED / seen.p[row, n]).clamp(APART, 1.0)[:, None, None]
    coin = _coins_at(phi.double(), apart[:, 0])
    g = seen.recovered_at(row, n)
    middle = (g.cumsum(-1) - g / 2).clamp(0, LAST_COIN)
    draw = middle[:, aims][:, None, :].expand(shape)
    coins = coin.reshape(-1, 1), draw.reshape(-1)
    verdict = verify_chain(seen.policy, target, draft, ids, coins=coins, validate=False)
    accepted = coin < phi
    # judged where no rounding error can change the coin's decision, nor the recovered token. Where
    # φ is 1 minus a rounding error, a verifier may compute 1
    sharp = ((coin - phi).abs() >= apart / 2) | (coin == phi) | (phi == 0)
    sharp &= ~((phi < 1) & (phi > 1 - apart))
    clear = sharp & (accepted | (g > BORDER)[:, aims][:, None, :].expand(shape))

    def about(index: tuple[int, ...]) -> str:
        pair, c, d = index
        return (
            f"token emitted after drafting {int(n[pair])} (φ = {float(phi[index])!r}) "
            f"with coin {float(coin[pair, c, d])!r} and draw {float(draw[pair, c, d]):.6g}"
        )

    emitted = verdict.output_token_ids[:, 0].reshape(shape)
    expected = torch.where(accepted, n[:, None, None], aims.expand(shape))
    yield Bounds(emitted, expected, expected, about, 0.0, clear, row)


# extreme values at which a knob is tried, where its range allows them, and the number of rows
FAR, FEW = (1e-300, 1e-20, 1e-8, 1e-3, 1e20, 1e300), 2


def _far_knobs(policy: Policy) -> list[tuple[float, Policy]]:
    """Return (value, policy) at extreme knob values; empty for users' rules and integer knobs."""
    whole = isinstance(getattr(policy, policy.knob or "", None), int)
    if whole or getattr(policy, "source", None) is not None:
        return []
    return [(value, far) for value in FAR if (far := at_knob(policy, value)) is not None]


@policy_property(
    lambda policy: bool(_far_knobs(policy)),
    hint="an edge or a root loses its digits at a far knob, in the written law or in a verifier's",
    at_other_knobs=False,
    widest=6,
)
def far_knobs_have_one_law(seen: Behaviour) -> Iterator[Bounds]:
    """The law stated, drawn and charged is one row at knobs from 1e-300 to 1e300.

    ``emitted`` states the law, a chain draws from it with its coins, and the meter charges it.
    """
    q, p = seen.q[:FEW], seen.p[:FEW]
    divergence = read_divergence(getattr(seen.policy, "divergence", "kl"))
    for value, policy in _far_knobs(seen.policy):
        far, nodes = seen.on(q, p, policy=policy), nodes_of_rows(Chain(), policy, q, p)
        due = divergence.value(policy.emitted(q, p), q)  # what the meter has to charge
        charged = due.new_tensor([node.charge(divergence).spent for node in nodes])
        bounds = Bounds(charged, due, due, "divergence that is charged", EXACT * (1 + due))
        for one in (*emitted_law_sums_to_one(far), bounds, *coins_decide_as_declared(far)):
            where = f" at {policy.knob}={value:g}"  # added to the names of all entries
            yield replace(one, about=lambda i, one=one, where=where: one.describe(i)[0] + where)
