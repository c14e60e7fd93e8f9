"""Draw the rows on which policies are checked, grouped by V so that checks run in batches."""

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

# one pair in ONE_IN is wide; pair i takes V from the range WIDTHS[ORDER[i]], up to seven pairs
ONE_IN = 20
WIDTHS = ((257, 512), (50, 64), (16, 49), (65, 256))
ORDER = (0, 1, 2, 3, 1, 2, 3)
# V of the widest pair: from the range SMALL among two pairs or more, and VOCABULARY in one more
# pair among THOROUGH or more
SMALL, THOROUGH, VOCABULARY = (1_000, 1_400), 10_000, 32_000
# least entry of a wide row: float32 still holds it; narrow rows have smaller entries
LEAST = 1e-30
# above DENSE tokens a draft keeps its likeliest TOP only: g(·|n) takes O(V) for each drafted token
DENSE, TOP = 64, 16


@lru_cache(maxsize=4)
def examples(count: int, start: int = 0) -> tuple[Group, ...]:
    """Return ``count`` pairs of float64 rows as (target, draft) batches (R, V) of rising V.

    Most pairs have few tokens. If ``count`` is at least 2, one pair has 1,000 to 1,400 tokens; one
    pair in 20, up to seven pairs, has 16 to 512; from 10,000 pairs on, one has 32,000. A draft row
    over more than 64 tokens gives mass to 16 of them. Equal ``count`` and seed ``start`` give equal
    rows within one program. In another program rows may differ: Hypothesis draws them, and also
    tries constants that it finds in the modules that are loaded (not in installed packages).
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
        collect = given(strategies.any_pairs())(lambda pair: drawn.append(pair))
        seed(start)(drawing(collect))()

    while len(drawn) < missing:  # Hypothesis may draw fewer pairs than it is asked for
        # inside a test under @given, Hypothesis draws nothing else in the test's thread
        with ThreadPoolExecutor(1) as other:
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
    """Return the pairs of many tokens among the pairs of :func:`examples`; ``start`` is a seed."""
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
    """Return a wide pair whose draft proposes some tokens too often and some too rarely (p < q)."""
    while True:
        q, p = wide_pair(vocab, random)
        if bool(((q > p) & (p > 0)).any()):
            return q, p


def wide_pair(vocab: int, random: np.random.Generator) -> Group:
    """Return rows (target, draft), each (V,): q is a power law with or without zeros, p ∝ q^a.

    The exponent a is drawn. In half of the pairs on average, p also gives mass to tokens that are
    rare in q. Over more than 64 tokens the draft keeps its likeliest 16 only.
    """
    q = (1.0 + random.permutation(vocab)) ** -random.uniform(0.5, 3.0)
    q *= random.uniform(size=vocab) < random.choice((2 / 3, 1.0))  # a third are 0, or none
    q[q < LEAST] = 0.0
    q[int(random.integers(vocab))] += 1e-3  # or all could be 0
    q /= q.sum()
    p = np.where(q > 0, q, 1.0) ** random.uniform(0.4, 1.6) * (q > 0)
    if random.integers(2):
        p += (q < np.median(q) + 1e-9) / vocab
    if vocab > DENSE:
        p[np.argsort(-p, kind="stable")[TOP:]] = 0.0
    return torch.from_numpy(q), torch.from_numpy(p / p.sum())
