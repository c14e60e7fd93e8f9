"""A pool of rows drawn once from the strategies, grouped by vocabulary for batched checks."""

from functools import lru_cache

import torch
from torch import Tensor

from cactus_theory import _arguments as check

check.optional_module("hypothesis", "testing")
from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: E402

from cactus_theory.testing import strategies  # noqa: E402

Group = tuple[Tensor, Tensor]


@lru_cache(maxsize=4)
def examples(count: int, start: int = 0) -> tuple[Group, ...]:
    """Return ``count`` pairs of float64 rows as (target, draft) batches (R, V), V rising.

    The same ``count`` and ``start`` give the same rows.
    """
    drawn: dict[int, list[Group]] = {}
    missing = count

    def keep(pair: Group) -> None:
        nonlocal missing
        if missing > 0:
            missing -= 1
            drawn.setdefault(len(pair[0]), []).append(pair)

    while missing > 0:
        drawing = settings(
            max_examples=missing,
            phases=[Phase.generate],
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
        )
        seed(start)(drawing(given(strategies.any_pairs())(keep)))()
        start += 1
    return tuple(
        tuple(torch.stack(rows) for rows in zip(*drawn[vocab], strict=True))  # type: ignore[misc]
        for vocab in sorted(drawn)
    )
