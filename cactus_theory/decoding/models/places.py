"""The cache slots and positions of fed tokens, and the slots they attend to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cactus_theory.decoding.models.cache import RaggedCache


@dataclass(frozen=True)
class Sight:
    """What the fed tokens of a batch attend to.

    Attributes
    ----------
    positions : (B, new), how many cached tokens and fed ancestors precede each fed token.
    key_positions : (B, end), the position of what lies in each slot; None where it is the slot.
    hidden : (B, new, end), the slots each fed token must not attend to.
    """

    positions: Int[Tensor, "batch new"]
    key_positions: Int[Tensor, "batch end"] | None
    hidden: Bool[Tensor, "batch new end"]

    def within(self, window: int | None) -> Bool[Tensor, "batch new end"]:
        """Return ``hidden`` together with what lies ``window`` or more positions back."""
        end = self.hidden.shape[-1]
        if window is None or window >= end:
            return self.hidden
        keys = self.key_positions
        if keys is None:
            keys = torch.arange(end, device=self.hidden.device)[None]
        return self.hidden | (self.positions[..., None] - keys[:, None] >= window)


@dataclass(frozen=True)
class Places:
    """The slots of a batch's fed tokens in a memory (B, capacity + 1, …).

    Attributes
    ----------
    rows : the rows that take part.
    start, end : slots shown before and after the fed tokens are written.
    place : index of the fed tokens in the memory; padding goes to the spare place.
    sight : None if every row is equally long and feeds a chain: slot and position of its fed
        token j are then both ``start + j``, and it attends to every slot up to its own.
    """

    rows: slice
    start: int
    end: int
    place: Any
    sight: Sight | None = None


def block(rows: slice, start: int, new: int) -> Places:
    """Return the places of ``new`` tokens a row after ``start`` cached ones, a chain each."""
    return Places(rows, start, start + new, (rows, slice(start, start + new)))


def places(
    cache: RaggedCache,
    new: int,
    counts: Sequence[int],
    parents: Int[Tensor, "batch new"] | None,
    device: torch.device,
) -> Places:
    """Return the places of ``new`` tokens fed to each row, of which ``counts[b]`` are its own."""
    lengths, rows = cache.lengths, slice(0, cache.batch)
    even = min(lengths) == max(lengths) and lengths[0] + new <= cache.capacity
    if parents is None and even:
        return block(rows, lengths[0], new)
    starts = torch.tensor(lengths, device=device)[:, None]
    slots = chain = starts + torch.arange(new, device=device)
    own = torch.tensor(list(counts), device=device)[:, None]
    real = None
    if min(counts) < new:  # padding stands where its row's last token does, a valid position
        real = torch.arange(new, device=device) < own
        chain = torch.minimum(chain, (starts + own - 1).clamp_(min=0))
        slots = torch.where(real, slots, cache.capacity)
    end = max(max(map(int.__add__, lengths, counts)), 1)
    if parents is None:
        sight = Sight(chain, None, torch.arange(end, device=device) > chain[..., None])
    else:
        sight = _tree(parents.to(device), starts, slots, chain, real, end)
    index = torch.arange(cache.batch, device=device)[:, None], slots
    return Places(rows, max(end - new, 0), end, index, sight)


def additive(hidden: Bool[Tensor, "*some end"], like: Tensor) -> Float[Tensor, "*some end"]:
    """Return what is added to the scores: the least finite number where hidden, else 0."""
    mask = torch.zeros(hidden.shape, dtype=like.dtype, device=hidden.device)
    return mask.masked_fill_(hidden, torch.finfo(like.dtype).min)


def _tree(
    parents: Int[Tensor, "batch new"],
    starts: Int[Tensor, "batch 1"],
    slots: Int[Tensor, "batch new"],
    chain: Int[Tensor, "batch new"],
    real: Bool[Tensor, "batch new"] | None,
    end: int,
) -> Sight:
    """Return what nodes of trees attend to: the cached prefix, their ancestors, themselves."""
    batch, new = slots.shape
    if real is not None:
        parents = torch.where(real, parents, -1)
    ancestors = _ancestors(parents)
    depth = starts + ancestors.sum(-1) - 1
    positions = depth if real is None else torch.where(real, depth, chain)
    at = slots.clamp(max=end)  # one column more takes the padding
    slot = torch.arange(end + 1, device=parents.device)
    hidden = (slot >= starts[..., None]).repeat(1, new, 1)
    hidden.scatter_(2, at[:, None].expand(-1, new, -1), ~ancestors)
    if real is not None:
        hidden[..., 0] &= real  # padding must attend to something
    keys = slot.repeat(batch, 1).scatter_(1, at, positions)
    return Sight(positions, keys[:, :end], hidden[..., :end])


def _ancestors(parents: Int[Tensor, "batch new"]) -> Bool[Tensor, "batch new new"]:
    """Return which fed tokens lie on each one's path to the cached text, itself included.

    Squares (identity + parenthood) until paths of every length are in, but for the first tokens
    of a prompt, each of which follows the one before it.
    """
    new, place = parents.shape[1], torch.arange(parents.shape[1], device=parents.device)
    chain = int((parents == place - 1).all(0).long().cumprod(0).sum())
    up = parents[:, chain:, None] == place[chain:]
    reach = up.float() + torch.eye(new - chain, device=parents.device)
    for _ in range((new - chain - 1).bit_length()):
        reach = (reach @ reach).clamp_(max=1.0)
    found = (place <= place[:, None]).repeat(len(parents), 1, 1)
    found[:, chain:, chain:] = reach > 0
    below = (parents[:, chain:, None] < chain) & (place[:chain] <= parents[:, chain:, None])
    found[:, chain:, :chain] = (reach @ below.float()) > 0
    return found
