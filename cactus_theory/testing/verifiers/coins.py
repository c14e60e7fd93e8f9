"""Properties of what a verifier does with coins: the verdict has the law that it states."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.testing._property import LAST_COIN, Bounds
from cactus_theory.testing.verifiers._enumeration import (
    Asked,
    Enumeration,
    named,
    row_by_row,
    some_paths,
    verifier_property,
)

# coins are tried this close to where a decision turns; a policy decides to about 1e-12
INSIDE = 1e-9
# which is that much of the coin of a drafted token of such a probability; paths with rarer ones
# count as much as they occur
FAINT = 1e-3
# what cells thinner than that, and rounding, may add to a probability
COUNTED = 1e-7
# the same for rows in single precision, which round to 6e-8
INSIDE_SINGLE, COUNTED_SINGLE = 1e-5, 1e-3
# outcomes are looked at if they are no rarer: a residual is a difference of masses, and on nearly
# equal rows that of a rarer one is rounded by more than what coins are tried beside
RARE = 1e-6
# patterns of acceptance coins with which the token after each count is drawn
PATTERNS = 3
# a coin this far above a threshold cannot be mistaken for it; fractions of 2^20 are exact
BESIDE, SHORT = 1e-11, 2.0**20


@dataclass(frozen=True)
class Cells:
    """Coins that stand for all others: (N, patterns, coins) and the mass (N, patterns) of each."""

    accept: Tensor
    mass: Tensor


def cells(edges: Float[Tensor, "N coins edges"], inside: float) -> Cells:
    """Return coins just inside both ends of each interval between edges, all combined.

    A decision that turns anywhere but at an edge weighs as much as half the interval. Intervals
    too thin to have an inside, between two roundings of one edge for example, have no mass.
    """
    ends = torch.zeros_like(edges[..., :1])
    cuts = torch.cat([ends, edges, ends + 1], -1).sort(-1).values
    low, high = cuts[..., :-1], cuts[..., 1:]
    step = torch.minimum((high - low) / 2, torch.tensor(inside))
    points = torch.cat([low + step, high - step], -1).clamp(0.0, LAST_COIN)
    width = high - low
    mass = torch.where(width > 4 * inside, width / 2, 0.0).repeat(1, 1, 2)
    every = combinations(points.shape[-1], points.shape[1])
    return Cells(combined(points, every), combined(mass, every).prod(-1))


def combinations(values: int, places: int) -> Int[Tensor, "all places"]:
    """Return every way to choose one of so many values at each place."""
    return torch.cartesian_prod(*[torch.arange(values)] * places).reshape(-1, places)


def combined(
    points: Float[Tensor, "N places values"], every: Int[Tensor, "all places"]
) -> Float[Tensor, "N all places"]:
    """Return the chosen value at each place."""
    return points[:, torch.arange(points.shape[1]), every]


@verifier_property(hint="a coin is compared with another value than the law says, or <= for <")
def coins_decide_as_stated(seen: Enumeration) -> Iterator[Bounds]:
    """Integrated over its coins, a verdict accepts each count as often as the law states.

    With coins just below and just above every value that the law implies, all combined; the
    alive ratios that a verdict reports are those of the law; so also on float32 rows.
    """
    asked = some_paths(seen)
    patterns = cells(_own(asked), INSIDE)
    half = torch.full(patterns.mass.shape, 0.5, dtype=torch.float64)
    verdict = asked.verify(patterns.accept, half)
    found = _shares(asked, verdict.num_accepted, patterns.mass)
    wrong = ((found - asked.stop).abs() > COUNTED).any(-1).nonzero()[:, 0][:EXTRA]
    if len(wrong):  # perhaps its coins are not one a token: try every value for every coin
        found[wrong] = _with_every_edge(asked.some(wrong))
    rare = (found < RARE) & (asked.stop < RARE)
    found, stop = torch.where(rare, asked.stop, found) * _worth(asked), asked.stop * _worth(asked)
    about = named(asked, lambda i: f"chance of {i[1]} accepted tokens, over all coins")
    yield Bounds(found, stop, stop, about, COUNTED, rows=asked.tree)
    if verdict.alive is not None:
        yield _alive(asked, verdict.alive, verdict.num_accepted)
    if seen.policy.declares.continuous:
        yield _in_single(asked)


def _worth(asked: Asked) -> Tensor:
    """Return how much each path counts, (N, 1): 1, or its probability where it is all but none."""
    drafted = asked.p.gather(-1, asked.ids[..., None])[..., 0]
    return torch.where((drafted >= FAINT).all(-1), 1.0, asked.weight)[:, None]


# paths that are tried with every value for every coin
EXTRA = 20


def _own(asked: Asked) -> Tensor:
    """Return for each coin the values that its own token's decision may turn at."""
    if asked.coins == asked.length:
        return asked.thresholds
    return _every(asked)


def _every(asked: Asked) -> Tensor:
    return asked.thresholds.flatten(1)[:, None].expand(-1, asked.coins, -1)


def _with_every_edge(asked: Asked) -> Tensor:
    patterns = cells(_every(asked), INSIDE)
    half = torch.full(patterns.mass.shape, 0.5, dtype=torch.float64)
    return _shares(asked, asked.verify(patterns.accept, half).num_accepted, patterns.mass)


def _shares(asked: Asked, counts: Tensor, mass: Tensor) -> Tensor:
    """Return the mass of the patterns that accept each count, (N, K + 1)."""
    counts = counts.reshape(mass.shape)
    return torch.zeros_like(asked.stop).scatter_add(-1, counts, mass)


def _alive(asked: Asked, alive: Tensor, counts: Tensor) -> Bounds:
    """Return that the alive ratios of charged rows are those of the law."""
    shape = (len(asked.ids), -1, asked.length)
    expected = asked.alive[:, None, :-1].expand(len(asked.ids), len(counts) // len(asked.ids), -1)
    charged = torch.arange(asked.length) <= counts.reshape(*shape[:2])[..., None]
    about = named(asked, lambda i: f"alive ratio of row {i[2]}")
    rows = asked.tree
    return Bounds(alive.reshape(shape), expected, expected, about, COUNTED, charged, rows)


def _in_single(asked: Asked) -> Bounds:
    first = torch.ones_like(asked.tree, dtype=torch.bool)
    first[1:] = asked.tree[1:] != asked.tree[:-1]
    asked = asked.some(first.nonzero()[:, 0])
    patterns = cells(_own(asked), INSIDE_SINGLE)
    half = torch.full(patterns.mass.shape, 0.5, dtype=torch.float64)
    verdict = asked.verify(patterns.accept, half, torch.float32)
    weight = asked.weight[:, None]
    found = weight * _shares(asked, verdict.num_accepted, patterns.mass)
    expected = weight * asked.stop
    about = named(asked, lambda i: f"chance of it and of {i[1]} accepted tokens, float32 rows")
    return Bounds(found, expected, expected, about, COUNTED_SINGLE, rows=asked.tree)


@verifier_property(hint="a draw that reads another row, or a coin that is used twice")
def draws_follow_the_stated_law(seen: Enumeration) -> Iterator[Bounds]:
    """The token after each accepted count is its stated law's quantile of the draw.

    Whatever the acceptance coins were, and just inside both ends of every token's share.
    """
    asked = some_paths(seen)
    patterns = cells(_own(asked), INSIDE)
    half = torch.full(patterns.mass.shape, 0.5, dtype=torch.float64)
    counts = asked.verify(patterns.accept, half).num_accepted.reshape(patterns.mass.shape)
    accept, met = _by_count(asked, counts, patterns)
    high = asked.last.cumsum(-1)
    low = high - asked.last
    step = torch.full_like(low, INSIDE)
    draw = torch.stack([low + step, high - step], -1).clamp(0.0, LAST_COIN)
    shape = (*met.shape, *draw.shape[2:])  # N, counts, patterns, V, 2
    verdict = asked.verify(
        accept[:, :, :, None, None].expand(*shape, asked.coins).flatten(1, -2),
        draw[:, :, None].expand(shape).flatten(1),
    )
    wanted = (asked.last > 4 * INSIDE) & (asked.weight[:, None] * asked.stop > RARE)[..., None]
    judged = (wanted[:, :, None] & met[..., None])[..., None].expand(shape)
    token = torch.arange(asked.last.shape[-1])[:, None].expand(shape)

    def tell(i: tuple[int, ...]) -> str:
        coins, own = accept[i[0], i[1], i[2]].tolist(), float(draw[i[0], i[1], i[3], i[4]])
        return f"token after {i[1]} accepted ones, coins {coins} and draw {own:.12g}"

    found = verdict.last.reshape(shape)
    yield Bounds(found, token, token, named(asked, tell), 0.0, judged, asked.tree)


def _by_count(asked: Asked, counts: Tensor, patterns: Cells) -> tuple[Tensor, Tensor]:
    """Return (N, K + 1, patterns, coins) coins that lead to each count, and whether they do."""
    source = torch.Generator().manual_seed(asked.seen.seed)
    lots = torch.rand(counts.shape, generator=source)
    most = min(PATTERNS, counts.shape[1])
    place = torch.arange(asked.length + 1)[:, None]
    lead = (counts[:, None] == place) & (patterns.mass > 0)[:, None]
    ranked = torch.where(lead, 1 + lots[:, None], 0.0).topk(most, -1)
    each = torch.arange(len(counts))[:, None, None]
    return patterns.accept[each, ranked.indices], ranked.values > 0


@verifier_property(hint="coin <= value, not coin < value; or a support that is not declared")
def impossible_tokens_are_never_emitted(seen: Enumeration) -> Iterator[Bounds]:
    """With coins of 0 and of the last float below 1, no token is emitted that h gives nothing.

    Except from the target's own row, which replaces a residual that rounding has emptied. If
    the policy declares support="target", none is emitted that the target gives nothing; nor by a
    verifier that looks ahead, whose h is not the policy's. What is accepted is what was drafted.
    """
    asked = some_paths(seen)
    ends = torch.tensor([0.0, LAST_COIN], dtype=torch.float64)[
        combinations(2, asked.coins + 1)
    ].expand(len(asked.ids), -1, -1)
    verdict = asked.verify(ends[..., :-1], ends[..., -1])
    shape = (len(asked.ids), ends.shape[1], asked.length + 1)
    output = verdict.output_token_ids.reshape(shape)
    counts = verdict.num_accepted.reshape(shape[:2])[..., None]
    emitted = torch.arange(shape[-1]) <= counts
    each, place = torch.arange(len(asked.ids))[:, None, None], torch.arange(shape[-1])
    h, q = (rows[each, place, output.clamp(min=0)] for rows in (asked.aims, asked.q))
    possible = (h > 0) | ((q > 0) & (place == counts))
    if seen.verifier.looks_ahead:
        possible |= q > 0
    if seen.policy.declares.support == "target":
        possible &= q > 0

    def tell(i: tuple[int, ...]) -> str:
        coins, token = ends[i[0], i[1]].tolist(), int(output[i])
        return f"coins and draw {coins}: whether token {token} at place {i[2]} is possible"

    yield Bounds(possible.double(), 1, 1, named(asked, tell), 0.0, emitted, asked.tree)
    drafted = asked.ids[:, None].expand(*shape[:2], -1)
    accepted = torch.arange(asked.length) < counts
    about = named(asked, lambda i: f"accepted token at place {i[2]}")
    yield Bounds(output[..., :-1], drafted, drafted, about, 0.0, accepted, asked.tree)


@verifier_property(hint="coin <= value instead of coin < value")
def a_coin_at_its_value_does_not_pass(seen: Enumeration) -> Iterator[Bounds]:
    """A coin equal to the value that it is compared with decides like one just above it.

    On rows of short binary fractions, where the value is computed exactly.
    """
    asked = some_paths(seen)
    exact = torch.tensor([kind == "fractions" for kind in seen.trees.kinds])[asked.tree]
    exact &= (asked.aims * SHORT == (asked.aims * SHORT).round()).flatten(1).all(-1)
    if asked.coins != asked.length or not bool(exact.any()):
        return
    asked = asked.some(exact.nonzero()[:, 0])
    value = asked.thresholds
    value = torch.where((value * SHORT == (value * SHORT).round()) & (value < 1), value, 0.0)
    at = combined(value, combinations(2, asked.length))
    above = at + BESIDE
    turns = asked.thresholds[:, None, :, :]
    between = ((turns > at[..., None]) & (turns <= 2 * BESIDE + at[..., None])).any(-1).any(-1)
    half = torch.full(at.shape[:2], 0.5, dtype=torch.float64)
    found, expected = (
        asked.verify(coins, half).num_accepted.reshape(half.shape) for coins in (at, above)
    )
    about = named(asked, lambda i: f"tokens accepted with coins {at[i[0], i[1]].tolist()}")
    yield Bounds(found, expected, expected, about, 0.0, ~between, asked.tree)


@verifier_property(row_by_row, hint="R/(R + 1 − P), where 1 is added first, is below 1 at P = 1")
def what_is_sure_is_accepted(seen: Enumeration) -> Iterator[Bounds]:
    """With all coins at the last float below 1, a path goes on where its alive ratio is 1.

    At least as far as P h of the last token there is above p, not just up to rounding.
    """
    asked = Asked(seen, *(seen.weight > 0).nonzero(as_tuple=True))
    rows = asked.aims[:, :-1], asked.p
    h, p = (own.gather(-1, asked.ids[..., None])[..., 0] for own in rows)
    ratio = asked.alive[:, :-1] * h / p
    clear = ((ratio - 1).abs() > COUNTED).cumprod(-1) == 1  # whatever rounding makes of them
    places = torch.arange(1, asked.length + 1)
    sure = torch.where(clear & (ratio > 1) & (asked.alive[:, 1:] == 1), places, 0).amax(-1)
    half = torch.full((len(sure), 1), 0.5, dtype=torch.float64)
    coins = torch.full((*half.shape, asked.coins), LAST_COIN, dtype=torch.float64)
    about = named(asked, lambda i: "accepted tokens, all coins at the last float below 1")
    yield Bounds(asked.verify(coins, half).num_accepted, sure, math.inf, about, rows=asked.tree)
