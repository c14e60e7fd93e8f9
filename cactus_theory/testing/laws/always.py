"""Properties that every policy must have, whatever it declares."""

from collections.abc import Iterator

import torch
from torch import Tensor

from cactus_theory.testing._property import EXACT, FINITE, ROUNDING, Bounds
from cactus_theory.testing.laws._behaviour import REAL, Behaviour, law, of_token, recovery_entry

# probabilities are compared with 0 and 1 to the last few roundings
PROBABILITY = 1e-12
# certain drafts that are tried for a row: all its tokens, or so many of a wide row
NARROW, MOST_CERTAIN = 12, 4


@law(hint="0/0, log 0, or an index that some row does not have", widest=REAL)
def answers(seen: Behaviour) -> Iterator[Bounds]:
    """Every call returns finite numbers of the right shape, in time."""
    most = FINITE
    yield Bounds(seen.phi, -most, most, "acceptance of token {0}", 0.0, seen.drafted)
    yield Bounds(seen.recovered, -most, most, recovery_entry(seen), 0.0, rows=seen.pairs[0])


@law(hint="the min(1, ·) is missing, or a difference may be negative", widest=REAL)
def acceptance_is_a_probability(seen: Behaviour) -> Iterator[Bounds]:
    """0 ≤ φ(n) ≤ 1 for every token n that can be drafted."""
    yield Bounds(seen.phi, 0, 1, "acceptance of token {0}", PROBABILITY, seen.drafted)


@law(hint="the recovery row is not divided by its sum, or its sum is 0", widest=REAL)
def recovery_is_a_distribution(seen: Behaviour) -> Iterator[Bounds]:
    """g(·|n) ≥ 0 and Σ g = 1 for every token n that can be drafted, rejected or not."""
    g, (row, token) = seen.recovered, seen.pairs
    yield Bounds(g, 0, 1, recovery_entry(seen), PROBABILITY, rows=row)
    about = of_token(token, "sum of the recovery row after token {n}")
    yield Bounds(g.sum(-1), 1, 1, about, EXACT, rows=row)


@law(
    hint="acceptance and recovery do not fit each other, or emitted() is not exact",
    widest=REAL,
)
def emitted_law_sums_to_one(seen: Behaviour) -> Iterator[Bounds]:
    """Σ out = 1 with out(x) = p φ(x) + Σ p_n (1 − φ(n)) g(x|n), and ``emitted`` returns it."""
    yield Bounds(seen.emitted.sum(-1), 1, 1, "sum of the emitted law")
    fast = seen.rule.emitted(seen.q.double(), seen.p.double())
    yield Bounds(fast, seen.emitted, seen.emitted, "emitted() at token {0}")


@law(hint="a sum, maximum or index runs over the batch instead of the last axis", steady=True)
def batch_equals_loop(seen: Behaviour) -> Iterator[Bounds]:
    """A row's answers do not depend on the other rows of the same call."""
    rows = len(seen.q)
    q, p = (torch.cat([row, row.roll(1, -1), row.flip(-1)]) for row in (seen.q, seen.p))
    together = seen.on(q, p)
    steady = seen.steady[:, None].expand(seen.q.shape)
    alone = seen.phi
    about = "acceptance of token {0} among other rows"
    yield Bounds(together.phi[:rows], alone, alone, about, EXACT, steady & seen.drafted)
    alone = seen.emitted
    about = "emitted probability of token {0} among other rows"
    yield Bounds(together.emitted[:rows], alone, alone, about, EXACT, steady)
    for row in range(min(rows, 3)):
        single = seen.rule.acceptance(seen.q[row], seen.p[row], seen.tokens[row])
        expected, judged = seen.phi[row : row + 1], (steady & seen.drafted)[row : row + 1]
        about = "acceptance of token {0} without a batch axis"
        own = torch.tensor([row])
        yield Bounds(single[None], expected, expected, about, EXACT, judged, own)


@law(hint="an index, or the first or last token, is treated specially", steady=True)
def names_of_tokens_do_not_matter(seen: Behaviour) -> Iterator[Bounds]:
    """Moving every token one place moves the answers along (rows with exact ties excluded)."""
    moved = seen.on(seen.q.roll(1, -1), seen.p.roll(1, -1))
    ordered = seen.q.sort(-1).values
    tied = ((ordered.diff(dim=-1) == 0) & (ordered[:, 1:] > 0)).any(-1)
    judged = (seen.steady & ~tied)[:, None].expand(seen.q.shape)
    found = moved.phi.roll(-1, -1)
    about = "acceptance of token {0} after moving all tokens"
    yield Bounds(found, seen.phi, seen.phi, about, _resummed(seen), judged & seen.drafted)
    found = moved.emitted.roll(-1, -1)
    about = "emitted probability of token {0} after moving all tokens"
    yield Bounds(found, seen.emitted, seen.emitted, about, EXACT, judged)


@law(hint="the number of tokens is used, or tokens with q = 0 are counted", steady=True)
def impossible_tokens_do_not_matter(seen: Behaviour) -> Iterator[Bounds]:
    """Adding tokens with q = p = 0 changes nothing, and they are never emitted."""
    q, p = (torch.nn.functional.pad(row, (1, 2)) for row in (seen.q, seen.p))
    wide = seen.on(q, p)
    steady = seen.steady[:, None].expand(seen.q.shape)
    about = "acceptance of token {0} after adding impossible tokens"
    judged = steady & seen.drafted
    yield Bounds(wide.phi[:, 1:-2], seen.phi, seen.phi, about, _resummed(seen), judged)
    about = "emitted probability of token {0} after adding impossible tokens"
    yield Bounds(wide.emitted[:, 1:-2], seen.emitted, seen.emitted, about, EXACT, steady)
    added = torch.cat([wide.emitted[:, :1], wide.emitted[:, -2:]], -1)
    yield Bounds(added, 0, 0, "emitted probability of an added impossible token", 0.0)


@law(hint="p=None must mean the row that is certain of n")
def certain_drafts(seen: Behaviour) -> Iterator[Bounds]:
    """p=None means a draft that is certain of n: the answers equal those for a one-hot row."""
    row, token = _some_tokens(seen)
    q = seen.q[row]
    hot = torch.nn.functional.one_hot(token, q.shape[-1]).to(q.dtype)
    expected = seen.rule.acceptance(q, hot, token[:, None])[:, 0]
    found = seen.rule.acceptance(q, None, token[:, None])[:, 0]
    about = of_token(token, "acceptance of token {n} with p=None")
    yield Bounds(found, expected, expected, about, rows=row)
    recovered = seen.rule.recovery(q, hot, token)
    found = seen.rule.recovery(q, None, token)
    refused = (expected < 1)[..., None].expand(recovered.shape)
    about = of_token(token, "recovery probability of token {0} after token {n} with p=None")
    yield Bounds(found, recovered, recovered, about, EXACT, refused, row)


def _some_tokens(seen: Behaviour) -> tuple[Tensor, Tensor]:
    """Return (row, token): every token of narrow rows, evenly spaced ones of wide rows."""
    rows, vocab = seen.q.shape
    step = 1 if vocab <= NARROW else vocab // MOST_CERTAIN
    tokens = torch.arange(0, vocab, step)
    row, token = torch.cartesian_prod(torch.arange(rows), tokens).T
    return row, token


def _resummed(seen: Behaviour) -> Tensor:
    """Return by how much φ may change when sums are taken in another order, relative to p φ."""
    return EXACT + ROUNDING / seen.p.clamp(min=ROUNDING)
