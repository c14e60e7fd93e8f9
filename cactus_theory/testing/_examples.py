"""A pool of rows drawn once from the strategies, grouped by vocabulary for batched checks."""

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from cactus_theory.base import arguments as check

check.optional_module("hypothesis", "testing")
from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: E402

from cactus_theory.testing import strategies  # noqa: E402

Group = tuple[Tensor, Tensor]

# one pair in ONE_IN is wide, with V from these ranges in the order given, each entry used once
ONE_IN = 20
WIDTHS = ((257, 512), (50, 64), (16, 49), (65, 256))
ORDER = (0, 1, 2, 3, 1, 2, 3)
# widths of one pair among two or more, and of one more among THOROUGH or more
SMALL, THOROUGH, VOCABULARY = (1_000, 1_400), 10_000, 32_000
# least entry of a wide row, so that float32 holds it; narrow rows test deeper tails
LEAST = 1e-30
# V above which a draft is cut to its top: enumeration takes O(V) for a drafted token
DENSE, TOP = 64, 16


@lru_cache(maxsize=4)
def examples(count: int, start: int = 0) -> tuple[Group, ...]:
    """Return ``count`` pairs of float64 rows as (target, draft) batches (R, V), V rising.

    Most have few tokens; of two and more pairs one has 1,000 or more (with a draft of 16), up
    to seven have 16 to 512, and from 10,000 pairs on one has 32,000 (with a draft of 16). The
    same ``count`` and ``start`` give the same rows in the same program: Hypothesis also draws
    constants of the modules that are loaded (not those of installed packages).
    """
    wide = _wide(count, start)
    drawn, missing = list[Group](), count - len(wide)

    def draw() -> None:
        drawing = settings(
            max_examples=missing - len(drawn),
            phases=[Phase.generate],
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
        )
        seed(start)(drawing(given(strategies.any_pairs())(lambda pair: drawn.append(pair))))()

    while len(drawn) < missing:
        with ThreadPoolExecutor(1) as other:  # a running test's own thread may draw nothing
            other.submit(draw).result()
        start += 1
    groups: dict[int, list[Group]] = {}
    for pair in (*drawn[:missing], *wide):
        groups.setdefault(len(pair[0]), []).append(pair)
    return tuple(
        tuple(torch.stack(rows) for rows in zip(*groups[vocab], strict=True))  # type: ignore[misc]
        for vocab in sorted(groups)
    )


def _wide(count: int, start: int) -> list[Group]:
    """Return the wide pairs among ``count``: the widest range first."""
    random = np.random.default_rng([start, count])
    widths = [int(random.integers(low, high + 1)) for low, high in WIDTHS]
    pairs = [wide_pair(widths[place], random) for place in ORDER[: count // ONE_IN]]
    if count > 1:
        vocab = int(random.integers(SMALL[0], SMALL[1] + 1))
        pairs.append(_on_both_sides(vocab, random))
    if count >= THOROUGH:
        pairs.append(wide_pair(VOCABULARY, random))
    return pairs


def _on_both_sides(vocab: int, random: np.random.Generator) -> Group:
    """Return a wide pair whose draft proposes some tokens too often and some too rarely."""
    while True:
        q, p = wide_pair(vocab, random)
        if bool(((q > p) & (p > 0)).any()):
            return q, p


def wide_pair(vocab: int, random: np.random.Generator) -> Group:
    """Return (target, draft), rows (V,): a power law with zeros or none, and p ∝ q^a.

    In every second pair half of p is on tokens that are rare in q. Beyond 64 tokens the draft is
    cut to its likeliest 16.
    """
    q = (1.0 + random.permutation(vocab)) ** -random.uniform(0.5, 3.0)
    q *= random.uniform(size=vocab) < random.choice((2 / 3, 1.0))
    q[q < LEAST] = 0.0
    q[int(random.integers(vocab))] += 1e-3
    q /= q.sum()
    p = np.where(q > 0, q, 1.0) ** random.uniform(0.4, 1.6) * (q > 0)
    if random.integers(2):
        p += (q < np.median(q) + 1e-9) / vocab
    if vocab > DENSE:
        p[np.argsort(-p, kind="stable")[TOP:]] = 0.0
    return torch.from_numpy(q), torch.from_numpy(p / p.sum())
