"""The property of seeded draws: verdicts occur as often as the stated law says."""

from collections.abc import Iterator

import torch
from torch import Tensor

from cactus_theory.testing.laws._law import Bounds
from cactus_theory.testing.verifiers._coins import Asked, named, some_paths
from cactus_theory.testing.verifiers._enumeration import Enumeration
from cactus_theory.testing.verifiers._property import verifier_property
from cactus_theory.verify._tensors import verify_tensors

# trees that are drawn for, chance that a correct verifier fails on one of them, and draws
DRAWN, FALSE_ALARM, DRAWS = (1, 14, 18), 1e-6, 2000
# outcomes expected less often than this must not occur; others below LEAST are put together
NEVER, LEAST = 1e-6, 5


@verifier_property(hint="coins that are not uniform, or used twice")
def frequencies_follow_the_stated_law(seen: Enumeration) -> Iterator[Bounds]:
    """Counts and tokens drawn with a generator occur together as often as the law states.

    χ² over 2,000 seeded draws on the least certain draft of three trees; a correct verifier
    fails with probability 1e-6 on each.
    """
    asked = some_paths(seen)
    for number in DRAWN:
        if number in seen.trees.numbers and asked.coins == asked.length:
            own = (asked.tree == seen.trees.numbers.index(number)).nonzero()[:, 0]
            joint = asked.stop[own][..., None] * asked.last[own]
            least = own[joint.square().sum((-1, -2)).argmin()][None]
            chance = _chance(asked.some(least))
            about = named(asked.some(least), lambda i: "chance of frequencies at least as odd")
            yield Bounds(chance[None], FALSE_ALARM, None, about, 0.0, rows=asked.tree[least])


def _chance(asked: Asked) -> Tensor:
    """Return the probability that χ² of (count, token) is at least what is drawn."""
    generator = torch.Generator().manual_seed(asked.seen.seed)
    q, p, ids = (part.expand(DRAWS, *part.shape[1:]) for part in (asked.q, asked.p, asked.ids))
    seen = asked.seen
    verdict = verify_tensors(seen.verifier, seen.policy, q, p, ids, generator, None, False)
    vocab = asked.q.shape[-1]
    expected = (asked.stop[..., None] * asked.last).flatten() * DRAWS
    found = (verdict.num_accepted * vocab + verdict.last).bincount(minlength=len(expected))
    common = expected > LEAST
    # rare outcomes are put together so that every cell is expected to be filled
    cells_found = torch.cat([found[common].double(), found[~common].sum()[None].double()])
    cells_due = torch.cat([expected[common], expected[~common].sum()[None]])
    filled = cells_due > NEVER
    if bool((cells_found[~filled] > 0).any()):
        return torch.zeros((), dtype=torch.float64)
    odd = ((cells_found - cells_due) ** 2 / cells_due.clamp(min=NEVER))[filled].sum()
    freedom = max(int(filled.sum()) - 1, 1)
    return torch.special.gammaincc(torch.tensor(freedom / 2).double(), odd / 2)
