"""What a verification step must emit, from the float64 closed forms and the kernels' numbers.

Kernels work in float32. A coin may lie within rounding of its probability, or of the sum of the
weights up to a token; then both answers are right. Here every choice of a kernel is held against
the interval in which its float32 numbers may lie, so that a request is excluded only where rounding
explains the difference.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import cactus_theory as ct
from cactus_theory.base.tensors import normalised
from cactus_theory.kernels import LogitsVerdict, random_numbers
from cactus_theory.optimum.batch_edges import edges
from cactus_theory.policies import Entrywise
from cactus_theory.policies.band import Band
from cactus_theory.policies.policy import one_hot
from cactus_theory.verify import Assignment, Draft
from cactus_theory.verify.draw import pick
from cactus_theory.verify.on_device import Blocks

# a sum of float32 probabilities over up to 151,936 tokens, relative to 1
SUMMED = 2e-6
# one float32 probability: the exponent x is rounded, which costs |x| 2^-24, and exp has 2 ulp
ROUNDED = 2.5e-7
# seeds a request chooses from: the nearest of 64 coins is a percent from its border
CANDIDATES = 64


@dataclass(frozen=True)
class Rows:
    """Float64 rows of B requests: q (B, K + 1, V), p (B, K, V) or None, ids and counts (B,)."""

    q: Tensor
    p: Tensor | None
    ids: Tensor
    lengths: Tensor

    def at(self, place: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the q, p and drafted token of one place a request."""
        batch = torch.arange(len(place), device=place.device)
        draft_place = place.clamp(max=self.ids.shape[1] - 1)
        q, n = self.q[batch, place], self.ids[batch, draft_place]
        return q, one_hot(n, q) if self.p is None else self.p[batch, draft_place], n


def rows_of(target: Tensor, draft: Tensor | None, ids: Tensor, temperature: float = 1.0) -> Rows:
    """Return softmax(l/T) in float64, and the drafted tokens with their counts."""
    ended = torch.where(ids < 0, torch.arange(ids.shape[1], device=ids.device), ids.shape[1])
    q = (target.double() / temperature).softmax(-1)
    p = None if draft is None else (draft.double() / temperature).softmax(-1)
    return Rows(q, p, ids.clamp(min=0), ended.amin(-1))


@dataclass(frozen=True)
class Expected:
    """What the closed forms say; ``scales`` are s of the residual (s q − p)₊ after i tokens."""

    counts: Tensor  # (B,) accepted tokens
    borders: Tensor  # (B, K), what each coin is compared with
    doubtful: Tensor  # (B, K + 1), whether rounding may decide the coin that would end the path
    scales: Tensor  # (B, K + 1)
    unsure: Tensor  # (B, K + 1), how far the scales may be off (relative)


def compare(
    rule: ct.Policy,
    verifier: str,
    rows: Rows,
    seeds: Tensor,
    positions: Tensor,
    verdict: LogitsVerdict,
) -> dict[str, int]:
    """Return how many requests of a kernel there are, are excluded, and mismatch."""
    expected = closed_form(rule, verifier, rows, seeds, positions)
    counts, output = verdict.num_accepted, verdict.output_token_ids
    last_tokens = output.gather(1, counts[:, None])
    well_formed = (output == _output(rows, counts, last_tokens)).all(-1) & (last_tokens[:, 0] >= 0)
    place = _first_difference(verifier, expected.counts, counts)
    doubtful = expected.doubtful.gather(1, place[:, None])[:, 0]
    weights, errors = _weights(rows, expected, counts)
    coins = last_coins(seeds, positions)
    same_count = counts == expected.counts
    matches = well_formed & same_count & (pick(weights, coins) == last_tokens[:, 0])
    may_fall = _within(weights, errors, rows.at(counts)[0], coins, last_tokens.clamp(min=0))
    excused = ~matches & well_formed & (same_count | doubtful) & may_fall
    return {
        "rows": len(seeds),
        "excluded": int(excused.sum()),
        "mismatches": int((~excused & ~matches).sum()),
    }


def emitted(
    rule: ct.Policy, verifier: str, rows: Rows, seeds: Tensor, positions: Tensor
) -> LogitsVerdict:
    """Return what the closed forms emit by the kernels' random numbers."""
    expected = closed_form(rule, verifier, rows, seeds, positions)
    weights, _ = _weights(rows, expected, expected.counts)
    last = pick(weights, last_coins(seeds, positions))[:, None]
    return LogitsVerdict(_output(rows, expected.counts, last), expected.counts)


def last_coins(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return the coin of each request's token after those accepted."""
    zero = torch.zeros_like(seeds)[:, None]
    return random_numbers.coins(seeds, positions, zero, random_numbers.DRAW)[:, 0]


def closed_form(
    rule: ct.Policy, verifier: str, rows: Rows, seeds: Tensor, positions: Tensor
) -> Expected:
    """Return what the closed forms say about each request."""
    place = torch.arange(rows.ids.shape[1], device=seeds.device).expand(len(seeds), -1)
    coins = random_numbers.coins(seeds, positions, place, random_numbers.ACCEPT)
    return (_chain if verifier == "chain" else _block)(rule, rows, coins)


def sharp_seeds(
    rule: ct.Policy, verifier: str, rows: Rows, positions: Tensor, generator: torch.Generator
) -> Tensor:
    """Return for each request the one of CANDIDATES seeds whose coins come nearest to a border."""
    batch, width = rows.ids.shape
    shape = (CANDIDATES, batch)
    seeds = torch.randint(2**62, shape, generator=generator, device=generator.device)
    place = torch.arange(width, device=seeds.device).expand(CANDIDATES * batch, -1)
    repeated = positions.repeat(CANDIDATES)
    coins = random_numbers.coins(seeds.flatten(), repeated, place, random_numbers.ACCEPT).view(
        *shape, width
    )
    borders = closed_form(rule, verifier, rows, seeds[0], positions).borders
    undecided = (borders > 0) & (borders < 1)
    distance = torch.where(undecided, (coins - borders).abs(), 1.0).amin(-1)
    return seeds.gather(0, distance.argmin(0, keepdim=True))[0]


def _output(rows: Rows, counts: Tensor, last: Tensor) -> Tensor:
    """Return the accepted tokens, the last one (B, 1), and −1 after it."""
    place = torch.arange(rows.ids.shape[1] + 1, device=counts.device)
    drafted = torch.nn.functional.pad(rows.ids, (0, 1))
    accepted = torch.where(place < counts[:, None], drafted, -1)
    return accepted.scatter(1, counts[:, None], last)


def _first_difference(verifier: str, expected: Tensor, counts: Tensor) -> Tensor:
    """Return the place whose coin was decided differently."""
    if verifier == "chain":
        return torch.minimum(expected, counts)
    return torch.maximum(expected, counts)


def _weights(rows: Rows, expected: Expected, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights of the token after those accepted, and how far each may be off."""
    refused = (counts < rows.lengths)[:, None]
    q, p, n = rows.at(counts)
    scale, unsure = (part.gather(1, counts[:, None]) for part in (expected.scales, expected.unsure))
    own = ROUNDED * (1 - torch.log(q.clamp(min=1e-300))) * q
    if rows.p is None:
        left = q.scatter(1, n[:, None], 0.0)
        error = torch.where(left > 0, own, 0.0)
    else:
        left = scale * q - p
        error = own * scale + unsure * scale * q
        error = error + ROUNDED * (1 - torch.log(p.clamp(min=1e-300))) * p
    error = torch.where(q > 0, error, 0.0)
    return torch.where(refused, left.clamp(min=0), q), torch.where(refused, error, own)


def _within(weights: Tensor, errors: Tensor, q: Tensor, coins: Tensor, token: Tensor) -> Tensor:
    """Return whether rounding may have made the coin fall on a token (B, 1)."""
    total, off = weights.sum(-1, keepdim=True), errors.sum(-1, keepdim=True)
    slack = 2 * off + SUMMED * total
    own, error = weights.gather(1, token), errors.gather(1, token)
    end = weights.cumsum(-1).gather(1, token)
    at = coins[:, None] * total
    near = (own + error > 0) & (end - own - slack <= at) & (at <= end + slack)
    # where rounding may leave nothing, the whole row may be drawn from
    nothing = ((weights - errors).clamp(min=0).sum(-1, keepdim=True) == 0) & (
        q.gather(1, token) > 0
    )
    return (near | nothing)[:, 0]


def _chain(rule: ct.Policy, rows: Rows, coins: Tensor) -> Expected:
    width = rows.ids.shape[1]
    q = rows.q[:, :width]
    place = torch.arange(width, device=q.device)
    p = one_hot(rows.ids, q) if rows.p is None else rows.p
    phi = rule.acceptance(q, p, rows.ids[..., None])[..., 0]
    accepted = (coins < phi) & (place < rows.lengths[:, None])
    lower, unsure = _scales(rule, q, rows)
    doubtful = (coins - phi).abs() <= unsure * phi
    counts = accepted.long().cumprod(-1).sum(-1)
    return Expected(counts, phi, _padded(doubtful), _padded(lower), _padded(unsure))


def _scales(rule: ct.Policy, q: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Return s after a rejection at each place, and how far it may be off."""
    unsure = torch.full_like(q[..., 0], 2 * SUMMED)
    if rows.p is None:
        return torch.ones_like(unsure), unsure
    if isinstance(rule, Band):
        return _band_scales(rule, q, rows.p)
    assert isinstance(rule, Entrywise)
    q_n, p_n = (row.gather(-1, rows.ids[..., None])[..., 0] for row in (q, rows.p))
    q_n, p_n = q_n.flatten(), p_n.flatten()
    scales = rule.scale(q_n, rule.ceiling(q_n, p_n)).view_as(unsure)
    # s = (1 − γ)/(1 − q_n): a γ near 1 is off by more, relative to s
    return scales, unsure + 2 * SUMMED / scales.clamp(min=SUMMED)


def _band_scales(rule: Band, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Return a, and how far the band's edges may be off: E is off by SUMMED, x E′ is its slope."""
    flat = (rows.double().flatten(0, -2) for rows in (q, p))
    kind = ct.divergence(rule.divergence)
    ends = edges(*map(normalised, flat), kind, "price", rule.price)
    lower, upper = (end.reshape(*q.shape[:-1], 1) for end in ends)
    upper = torch.where(upper < torch.inf, upper, 0.0)  # h = p: nothing is rejected
    slope = torch.where(lower * q > p, lower * q, 0.0).sum(-1)
    slope = slope + torch.where(p > upper * q, upper * q, 0.0).sum(-1)
    return lower[..., 0], 2 * SUMMED + SUMMED / slope.clamp(min=SUMMED)


def _block(rule: ct.Policy, rows: Rows, coins: Tensor) -> Expected:
    width = rows.ids.shape[1]
    walk = Blocks(Assignment((rule,)), rows.q, Draft(rows.ids, rows.lengths, rows.p))
    node = torch.arange(1, width + 1, device=coins.device)
    passed = (coins < walk.value[:, 1:]) & (node <= rows.lengths[:, None])
    lower, unsure = _scales(rule, rows.q[:, :width], rows)
    spread = _padded(unsure.cumsum(-1)).roll(1, -1) + unsure.amax(-1, keepdim=True)
    residual_mass = torch.where(walk.alive < 1, walk.last.sum(-1), 0.0)
    normaliser = (residual_mass + 1 - walk.alive).clamp(min=SUMMED)
    final = torch.arange(width + 1, device=coins.device) == rows.lengths[:, None]
    bound = torch.where(final, spread, 2 * spread / normaliser)
    near = (coins - walk.value[:, 1:]).abs() <= bound[:, 1:]
    doubtful = torch.cat([torch.zeros_like(near[:, :1]), near], -1)
    scales = _padded(lower) * walk.alive
    counts = torch.where(passed, node, 0).amax(-1)
    return Expected(counts, walk.value[:, 1:], doubtful, scales, spread)


def _padded(places: Tensor) -> Tensor:
    return torch.nn.functional.pad(places, (0, 1))
