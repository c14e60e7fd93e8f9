"""The door for trees: parents and flags on tensors, checked."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

Flags = Bool[Tensor, "batch K"]


@dataclass(frozen=True)
class Declared:
    """What trees of drafted tokens declare beside their ids.

    Attributes
    ----------
    used : (B, K) flags, False beyond a row's tokens, as the others are.
    parents : (B, K) int64, as of a ``Draft``.
    sampled, certain : (B, K) flags, as of a ``Draft``.
    """

    used: Flags
    parents: Int[Tensor, "batch K"]
    sampled: Flags
    certain: Flags | None

    def depths(self) -> Int[Tensor, "batch"]:
        """Return how many tokens the longest path of each row has."""
        found = []
        for parents, used in zip(self.parents.tolist(), self.used.tolist(), strict=True):
            own = [0]
            for parent, on in zip(parents, used, strict=True):
                own.append(own[parent + 1] + 1 if on else 0)
            found.append(max(own))
        return self.parents.new_tensor(found)

    def sampling(self) -> Flags:
        """Return (B, K), at which nodes a token was sampled."""
        found = torch.zeros_like(torch.nn.functional.pad(self.sampled, (1, 0)))
        node = torch.where(self.sampled, self.parents + 1, found.shape[1] - 1)
        return found.scatter(1, node, True)[:, :-1]


def declared(
    ids: Any, parents: Any, draft_probs: Any, sampled: Any, certain: Any, validate: bool
) -> Declared:
    """Return what trees declare; ``sampled`` is all tokens if there are rows, else none.

    Raises
    ------
    ValueError
        Shapes that do not match, a parent that is no earlier token, equal siblings, two sampled
        ones, sampled tokens without rows.
    TypeError
        Parents that are not int64, flags that are not bool.
    """
    if sampled is None:
        sampled = torch.full_like(ids, draft_probs is not None, dtype=torch.bool)
    if validate:
        _check("parents", parents, ids, torch.int64)
        _check("sampled", sampled, ids, torch.bool)
        if certain is not None:
            _check("certain", certain, ids, torch.bool)
    used = ids >= 0
    certain = None if certain is None else certain & used
    found = Declared(used, torch.where(used, parents, -1), sampled & used, certain)
    if validate:
        _check_family(found, ids, draft_probs)
    return found


def _check(name: str, values: Any, ids: Tensor, dtype: torch.dtype) -> None:
    if not isinstance(values, Tensor) or values.dtype != dtype:
        kind = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise TypeError(f"{name}: must be a tensor of {dtype}; got {kind}")
    if values.shape != ids.shape:
        raise ValueError(f"{name}: shape must be {tuple(ids.shape)}; got {tuple(values.shape)}")


def _check_family(tree: Declared, ids: Tensor, draft_probs: Any) -> None:
    place = torch.arange(ids.shape[1], device=ids.device)
    if bool(((tree.parents < -1) | (tree.parents >= place)).any()):
        raise ValueError(
            f"parents: each must be −1 or an earlier token; got {tree.parents.tolist()}"
        )
    if draft_probs is None and bool(tree.sampled.any()):
        raise ValueError("draft_probs: sampled tokens need the rows they were drawn from; got None")
    siblings = (tree.parents[:, :, None] == tree.parents[:, None]) & (place[:, None] < place)
    siblings = siblings & tree.used[:, None]
    for name, wrong in (
        ("draft_token_ids: siblings must be different tokens", ids[:, :, None] == ids[:, None]),
        (
            "sampled: at most one token may be sampled after a node",
            tree.sampled[:, :, None] & tree.sampled[:, None],
        ),
    ):
        if bool((siblings & wrong).any()):
            row, one, other = (siblings & wrong).nonzero()[0].tolist()
            raise ValueError(f"{name}; got tokens {one} and {other} of row {row}")
