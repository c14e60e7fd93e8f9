"""Properties of verdicts: over all coins, they have the law that the verifier's ``law`` states."""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.testing.definition import LAST_COIN, Bounds
from cactus_theory.testing.verifiers._enumeration import (
    Enumeration,
    Paths,
    some_paths,
    verifier_property,
)
from cactus_theory.verify import Verdict

# distance of a tried coin from a value at which the decision changes; a policy decides to 1e-12
INSIDE = 1e-9
# least p of a drafted token at which an error of 1e-12 in mass is less than INSIDE in the coin;
# paths with rarer tokens count in proportion to their probability
FAINT = 1e-3
# tolerance of a probability: intervals too thin for a coin, and rounding
COUNTED = 1e-7
# INSIDE and COUNTED for float32 rows, whose entries are rounded by 6e-8
INSIDE_SINGLE, COUNTED_SINGLE = 1e-5, 1e-3
# least probability of a checked outcome: a residual is a difference of masses, and where q and p
# are nearly equal, the rounding error of a rarer residual exceeds INSIDE
RARE = 1e-6
# number of coin patterns with which the token after each accepted count is drawn
PATTERNS = 3
# distance of a coin above a threshold; denominator of coins that may equal a threshold exactly
BESIDE, SHORT = 1e-11, 2.0**20


def cells(edges: Float[Tensor, "N coins edges"], inside: float) -> tuple[Tensor, Tensor]:
    """Return coin patterns (N, patterns, coins) that stand for all coins, and their masses.

    ``edges`` are the values at which the stated law changes a decision. A coin is tried at the
    distance ``inside`` from both ends of each interval between edges, with half the interval's
    mass; all combinations are tried. So if a decision changes anywhere else, half an interval's
    mass is wrong, which is found. Intervals too thin for such coins, as between two roundings of
    one edge, get no mass.
    """
    ends = torch.zeros_like(edges[..., :1])
    cuts = torch.cat([ends, edges, ends + 1], -1).sort(-1).values
    low, high = cuts[..., :-1], cuts[..., 1:]
    step = torch.minimum((high - low) / 2, torch.tensor(inside))
    points = torch.cat([low + step, high - step], -1).clamp(0.0, LAST_COIN)
    mass = torch.where(high - low > 4 * inside, (high - low) / 2, 0.0).repeat(1, 1, 2)
    choices = combinations(points.shape[-1], points.shape[1])
    return combined(points, choices), combined(mass, choices).prod(-1)


def combinations(values: int, places: int) -> Int[Tensor, "all places"]:
    """Return every combination of ``places`` indices, each from 0 to values − 1, as rows."""
    return torch.cartesian_prod(*[torch.arange(values)] * places).reshape(-1, places)


def combined(
    points: Float[Tensor, "N places values"], choices: Int[Tensor, "all places"]
) -> Float[Tensor, "N all places"]:
    """Return ``points[n, i, choices[c, i]]`` for every n, every row c of ``choices``, every i."""
    return points[:, torch.arange(points.shape[1]), choices]


@verifier_property(hint="a coin is compared with another value than the law says, or <= for <")
def coins_decide_as_stated(seen: Enumeration) -> Iterator[Bounds]:
    """Integrated over its coins, a verdict accepts each count as often as the law states.

    All combinations of coins just below and just above the values at which the law changes a
    decision are tried. The alive ratios that a verdict reports are those of the law. Float32 rows
    give the same counts.
    """
    paths = some_paths(seen)
    # how often each count is accepted; rare counts are left out, and faint paths weigh less
    verdict, shares = _over_coins(paths, INSIDE)
    rare = (shares < RARE) & (paths.stop < RARE)
    # the weight of a path with a token below FAINT is the path's probability
    drafted = paths.p.gather(-1, paths.ids[..., None])[..., 0]
    weights = torch.where((drafted >= FAINT).all(-1), 1.0, paths.weight)[:, None]
    shares, stop = torch.where(rare, paths.stop, shares) * weights, paths.stop * weights
    about = paths.about(lambda i: f"chance of {i[1]} accepted tokens, over all coins")
    yield Bounds(shares, stop, stop, about, COUNTED, rows=paths.tree)
    if verdict.alive is not None:  # the alive ratios of charged nodes
        alive = verdict.alive.reshape(len(paths.ids), -1, paths.length)
        counts = verdict.num_accepted.reshape(alive.shape[:2])
        expected = paths.alive[:, None, :-1].expand(alive.shape)
        charged = torch.arange(paths.length) <= counts[..., None]
        about = paths.about(lambda i: f"alive ratio of row {i[2]}")
        yield Bounds(alive, expected, expected, about, COUNTED, charged, paths.tree)
    if seen.policy.declares.continuous:  # float32 rows, on one path of each tree
        first = torch.ones_like(paths.tree, dtype=torch.bool)
        first[1:] = paths.tree[1:] != paths.tree[:-1]
        paths = paths.part(first.nonzero()[:, 0])
        weight = paths.weight[:, None]
        found = weight * _over_coins(paths, INSIDE_SINGLE, torch.float32)[1]
        about = paths.about(lambda i: f"chance of it and of {i[1]} accepted tokens, float32 rows")
        expected = weight * paths.stop
        yield Bounds(found, expected, expected, about, COUNTED_SINGLE, rows=paths.tree)


def _edges(paths: Paths) -> Tensor:
    """Return, for each coin, the values at which the stated law changes a decision.

    If each token has one coin, a coin has the values of its token, otherwise those of all tokens.
    """
    if paths.coins == paths.length:
        return paths.thresholds
    return paths.thresholds.flatten(1)[:, None].expand(-1, paths.coins, -1)


def _over_coins(
    paths: Paths, inside: float, dtype: torch.dtype = torch.float64
) -> tuple[Verdict, Tensor]:
    """Verify with all coins of :func:`cells`; return verdicts, and Pr(i tokens accepted) by i."""
    accept, mass = cells(_edges(paths), inside)
    verdict = paths.verify(accept, dtype=dtype)
    counts = verdict.num_accepted.reshape(mass.shape)
    return verdict, torch.zeros_like(paths.stop).scatter_add(-1, counts, mass)


@verifier_property(hint="a draw that reads another row, or a coin that is used twice")
def draws_follow_the_stated_law(seen: Enumeration) -> Iterator[Bounds]:
    """The token after each accepted count is its stated law's quantile of the draw.

    This holds for all acceptance coins; draws are just inside both ends of the interval of [0, 1)
    that the law gives to each token.
    """
    paths = some_paths(seen)
    patterns, mass = cells(_edges(paths), INSIDE)
    counts = paths.verify(patterns).num_accepted.reshape(mass.shape)
    # by lot, PATTERNS coin patterns that lead to each count, fewer where ``occurs`` is false
    source = torch.Generator().manual_seed(seen.seed)
    lots = torch.rand(counts.shape, generator=source)
    lead = (counts[:, None] == torch.arange(paths.length + 1)[:, None]) & (mass > 0)[:, None]
    ranked = torch.where(lead, 1 + lots[:, None], 0.0).topk(min(PATTERNS, mass.shape[1]), -1)
    accept = patterns[torch.arange(len(patterns))[:, None, None], ranked.indices]
    occurs = ranked.values > 0
    # with each of them, draws near both ends of every token's share [low, high)
    high = paths.last.cumsum(-1)
    low = high - paths.last
    step = torch.full_like(low, INSIDE)
    draw = torch.stack([low + step, high - step], -1).clamp(0.0, LAST_COIN)
    shape = (*occurs.shape, *draw.shape[2:])  # N, counts, patterns, V, 2
    verdict = paths.verify(
        accept[:, :, :, None, None].expand(*shape, paths.coins).flatten(1, -2),
        draw[:, :, None].expand(shape).flatten(1),
    )
    likely = (paths.last > 4 * INSIDE) & (paths.weight[:, None] * paths.stop > RARE)[..., None]
    judged = (likely[:, :, None] & occurs[..., None])[..., None].expand(shape)
    token = torch.arange(paths.last.shape[-1])[:, None].expand(shape)

    def describe(i: tuple[int, ...]) -> str:
        coins, coin = accept[i[0], i[1], i[2]].tolist(), float(draw[i[0], i[1], i[3], i[4]])
        return f"token after {i[1]} accepted ones, coins {coins} and draw {coin:.12g}"

    tokens = verdict.last.reshape(shape)
    yield Bounds(tokens, token, token, paths.about(describe), 0.0, judged, paths.tree)


@verifier_property(hint="coin <= value, not coin < value; or a support that is not declared")
def impossible_tokens_are_never_emitted(seen: Enumeration) -> Iterator[Bounds]:
    """No token with h = 0 is emitted, even with coins of 0 and of the last float below 1.

    The exception is a token drawn from q in place of a residual that rounding has emptied. If the
    policy declares support="target", no token with q = 0 is emitted. Accepted tokens are those
    that were drafted.
    """
    paths = some_paths(seen)
    extremes = torch.tensor([0.0, LAST_COIN], dtype=torch.float64)
    # all patterns of extreme acceptance coins, and of an extreme draw at the end
    ends = extremes[combinations(2, paths.coins + 1)].expand(len(paths.ids), -1, -1)
    verdict = paths.verify(ends[..., :-1], ends[..., -1])
    shape = (len(paths.ids), ends.shape[1], paths.length + 1)
    output = verdict.output_token_ids.reshape(shape)
    counts = verdict.num_accepted.reshape(shape[:2])[..., None]
    emitted = torch.arange(shape[-1]) <= counts
    each, place = torch.arange(len(paths.ids))[:, None, None], torch.arange(shape[-1])
    h, q = (rows[each, place, output.clamp(min=0)] for rows in (paths.aims, paths.q))
    possible = (h > 0) | ((q > 0) & (place == counts))  # or drawn from q: see the docstring
    if seen.policy.declares.support == "target":
        possible &= q > 0

    def describe(i: tuple[int, ...]) -> str:
        coins, token = ends[i[0], i[1]].tolist(), int(output[i])
        return f"coins and draw {coins}: whether token {token} at place {i[2]} is possible"

    yield Bounds(possible.double(), 1, 1, paths.about(describe), 0.0, emitted, paths.tree)
    # accepted tokens are the drafted ones
    drafted = paths.ids[:, None].expand(*shape[:2], -1)
    accepted = torch.arange(paths.length) < counts
    about = paths.about(lambda i: f"accepted token at place {i[2]}")
    yield Bounds(output[..., :-1], drafted, drafted, about, 0.0, accepted, paths.tree)


@verifier_property(hint="coin <= value instead of coin < value")
def a_coin_at_its_value_does_not_pass(seen: Enumeration) -> Iterator[Bounds]:
    """A coin equal to the value that it is compared with decides like a coin just above it.

    The rows are short binary fractions, so that the value is computed exactly.
    """
    paths = some_paths(seen)
    exact = torch.tensor([kind == "fractions" for kind in seen.trees.kinds])[paths.tree]
    exact &= (paths.aims * SHORT == (paths.aims * SHORT).round()).flatten(1).all(-1)
    if paths.coins != paths.length or not bool(exact.any()):
        return
    paths = paths.part(exact.nonzero()[:, 0])
    value = paths.thresholds
    # a value that is no short fraction may be rounded, and no coin is 1: coin 0 is tried instead
    value = torch.where((value * SHORT == (value * SHORT).round()) & (value < 1), value, 0.0)
    at = combined(value, combinations(2, paths.length))
    above = at + BESIDE
    # patterns are not judged if another threshold lies between a coin and the coin above it
    others = paths.thresholds[:, None, :, :]
    between = ((others > at[..., None]) & (others <= 2 * BESIDE + at[..., None])).any(-1).any(-1)
    counts, expected = (
        paths.verify(coins).num_accepted.reshape(at.shape[:2]) for coins in (at, above)
    )
    about = paths.about(lambda i: f"tokens accepted with coins {at[i[0], i[1]].tolist()}")
    yield Bounds(counts, expected, expected, about, 0.0, ~between, paths.tree)


@verifier_property(hint="R/(R + 1 − P), where 1 is added first, is below 1 at P = 1")
def what_is_sure_is_accepted(seen: Enumeration) -> Iterator[Bounds]:
    """With all coins at the last float below 1, a path goes on where its alive ratio is 1.

    The path is accepted at least up to the last token that has P h clearly above p and an alive
    ratio of 1 after it.
    """
    paths = Paths(seen, *(seen.weight > 0).nonzero(as_tuple=True))
    rows = paths.aims[:, :-1], paths.p
    h, p = (part.gather(-1, paths.ids[..., None])[..., 0] for part in rows)
    ratio = paths.alive[:, :-1] * h / p
    # the ratios P h/p up to here are not so near 1 that rounding decides whether P is 1
    clear = ((ratio - 1).abs() > COUNTED).cumprod(-1) == 1
    places = torch.arange(1, paths.length + 1)
    least = torch.where(clear & (ratio > 1) & (paths.alive[:, 1:] == 1), places, 0).amax(-1)
    coins = torch.full((len(least), 1, paths.coins), LAST_COIN, dtype=torch.float64)
    about = paths.about(lambda i: "accepted tokens, all coins at the last float below 1")
    yield Bounds(paths.verify(coins).num_accepted, least, math.inf, about, rows=paths.tree)
