"""A ragged cache: keys and values of a batch in memory allocated once, with a length per row.

Every layer has room for ``capacity`` positions per row at an address that never changes. Entries
after a row's length are never read, and the next forward pass overwrites them, so that a rollback
is one assignment. A fed token has a slot (its index in the memory), a position, and a set of slots
that it attends to.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

ATTENTION_LAYERS = ("full_attention", "sliding_attention")
LAYER_COUNTS = ("num_hidden_layers", "decoder_layers", "num_decoder_layers")
# one integer for each fed token of each row
Fed = Int[Tensor, "batch new"]


class RaggedCache:
    """Keys and values of every layer, (B, capacity + 1, heads, width) each.

    The slot after the last position takes the states of padding. ``lengths`` are the numbers of
    cached positions of each row; only methods of the cache change them. ``hidden`` has hidden
    states (B, capacity + 1, hidden) for each layer that a drafter reads; they are rolled back and
    moved with the keys. Tensors are None until the first states arrive, which give the shape.
    """

    def __init__(self, layers: int, batch: int, capacity: int) -> None:
        self.batch, self.capacity = batch, capacity
        self.lengths = [0] * batch
        self.keys: list[Tensor | None] = [None] * layers
        self.values: list[Tensor | None] = [None] * layers
        self.hidden: dict[int, Tensor | None] = {}

    def take(
        self, layer: int, heads: int, widths: tuple[int, int], like: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the memory of a layer's keys and values, allocated at the first call.

        The memory starts as zeros: masked positions enter sums with weight 0, and 0 · NaN is NaN.
        """
        keys, values = self.keys[layer], self.values[layer]
        if keys is None or values is None:
            room = (self.batch, self.capacity + 1, heads)
            keys = self.keys[layer] = like.new_zeros(*room, widths[0])
            values = self.values[layer] = like.new_zeros(*room, widths[1])
        return keys, values

    def record(self, layer: int, at: Any, states: Float[Tensor, "batch new hidden"]) -> None:
        """Write hidden states of fed tokens at the slots of the tokens' keys."""
        memory = self.hidden[layer]
        if memory is None:
            room = self.batch, self.capacity + 1, states.shape[-1]
            memory = self.hidden[layer] = states.new_zeros(room)
        memory[at] = states

    def extend(self, counts: Sequence[int]) -> None:
        """Add ``counts[b]`` fed tokens to the length of row b, after their states were written."""
        self.lengths[:] = map(int.__add__, self.lengths, counts)

    def rollback(self, row: int, length: int) -> None:
        """Keep the first ``length`` positions of a row; nothing is copied."""
        if not 0 <= length <= self.lengths[row]:
            raise ValueError(f"length: must lie in [0, {self.lengths[row]}]; got {length}")
        self.lengths[row] = length

    def select(self, row: int, length: int, path: Sequence[int]) -> None:
        """Keep the first ``length`` positions of a row, and ``length + i`` for each i in ``path``.

        Use after feeding a tree at ``length``: ``path`` are ascending indices among the fed tokens,
        along a path from a root down. States move to be contiguous; a path 0, 1, 2, … copies
        nothing.
        """
        cached = self.lengths[row]
        if not 0 <= length <= cached:
            raise ValueError(f"length: must lie in [0, {cached}]; got {length}")
        steps = list(path)
        if steps != sorted(set(steps)) or any(not 0 <= i < cached - length for i in steps):
            raise ValueError(f"path: must ascend within [0, {cached - length}); got {steps}")
        # the first tokens of the path that already stand where they belong
        unmoved = next((place for place, i in enumerate(steps) if i != place), len(steps))
        self.lengths[row] = length + len(steps)
        moved = [length + i for i in steps[unmoved:]]
        slots = slice(length + unmoved, self.lengths[row])
        for states in (*self.keys, *self.values, *self.hidden.values()):
            if moved and states is not None:
                states[row, slots] = states[row, torch.tensor(moved, device=states.device)]

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order; a row that changes its place is copied.

        ``rows[place] >= place`` must hold, so that no row is overwritten before it is copied.
        """
        self.keys[:] = [self._kept(states, rows) for states in self.keys]
        self.values[:] = [self._kept(states, rows) for states in self.values]
        self.hidden = {layer: self._kept(states, rows) for layer, states in self.hidden.items()}
        self.lengths[:] = [self.lengths[row] for row in rows]
        self.batch = len(rows)

    def _kept(self, states: Tensor | None, rows: Sequence[int]) -> Tensor | None:
        if states is None:
            return None
        for place, row in enumerate(rows):
            if place != row:
                states[place, : self.lengths[row]] = states[row, : self.lengths[row]]
        return states[: len(rows)]


def allocate(model: Any, batch: int, capacity: int) -> RaggedCache:
    """Return a cache for a causal LM, with (B, capacity) positions.

    Raises ValueError for layers other than full or sliding-window attention, as the state of other
    layers cannot be rolled back.
    """
    config = text_config(model)
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in ATTENTION_LAYERS:
            raise ValueError(
                f"model: every layer must be one of {', '.join(ATTENTION_LAYERS)}; "
                f"got {kind!r} in {type(model).__name__}"
            )
    counts = [getattr(config, name, None) for name in LAYER_COUNTS]
    layers = max((count for count in counts if isinstance(count, int)), default=0)
    if not layers:
        raise ValueError(
            f"model: its configuration must say num_hidden_layers; got none in "
            f"{type(model).__name__}"
        )
    return RaggedCache(layers, batch, capacity)


def text_config(model: Any) -> Any:
    """Return the part of a model's configuration that describes its text decoder."""
    config = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


@dataclass(frozen=True)
class Sight:
    """Positions and attention mask of the fed tokens of a batch."""

    positions: Fed  # number of cached tokens and fed ancestors before each fed token
    key_positions: Int[Tensor, "batch end"] | None  # of each slot; None if equal to the slot
    hidden: Bool[Tensor, "batch new end"]  # the slots that a fed token must not attend to

    def within(self, window: int | None) -> Bool[Tensor, "batch new end"]:
        """Return the mask ``hidden``, with keys ``window`` or more positions back hidden, too."""
        end = self.hidden.shape[-1]
        if window is None or window >= end:
            return self.hidden
        keys = self.key_positions
        if keys is None:
            keys = torch.arange(end, device=self.hidden.device)[None]
        return self.hidden | (self.positions[..., None] - keys[:, None] >= window)


@dataclass(frozen=True)
class Slots:
    """The slots of a batch's fed tokens in a memory (B, capacity + 1, …).

    ``start`` and ``end`` are the numbers of slots that attention reads before and after the fed
    tokens are written. ``index`` is the tokens' index in the memory; padding goes to the last
    slot. ``sight`` is None if every row is equally long and feeds a chain. Then slot and position
    of fed token j are both ``start + j``, and the token attends to every slot up to ``start + j``.
    """

    start: int
    end: int
    index: Any
    sight: Sight | None = None


def block(start: int, new: int) -> Slots:
    """Return the slots of a chain of ``new`` tokens per row after ``start`` cached tokens."""
    return Slots(start, start + new, (slice(None), slice(start, start + new)))


def slots_of(
    cache: RaggedCache, new: int, counts: Sequence[int], parents: Fed | None, device: torch.device
) -> Slots:
    """Return the slots of ``new`` fed entries per row: ``counts[b]`` tokens, then padding."""
    lengths = cache.lengths
    # equally long rows, and room for all entries without the spare slot
    even = min(lengths) == max(lengths) and lengths[0] + new <= cache.capacity
    if parents is None and even:
        return block(lengths[0], new)
    starts = torch.tensor(lengths, device=device)[:, None]
    slots = chain = starts + torch.arange(new, device=device)  # ``chain``: a chain's positions
    fed = torch.tensor(list(counts), device=device)[:, None]
    real = None  # which entries are tokens, not padding; None without padding
    if min(counts) < new:  # padding gets the position of the row's last token, a valid position
        real = torch.arange(new, device=device) < fed
        chain = torch.minimum(chain, (starts + fed - 1).clamp_(min=0))
        slots = torch.where(real, slots, cache.capacity)
    end = max(max(map(int.__add__, lengths, counts)), 1)
    if parents is None:
        sight = Sight(chain, None, torch.arange(end, device=device) > chain[..., None])
    else:
        sight = _tree(parents.to(device), starts, slots, chain, real, end)
    index = torch.arange(cache.batch, device=device)[:, None], slots
    return Slots(max(end - new, 0), end, index, sight)


def additive(hidden: Bool[Tensor, "*some end"], like: Tensor) -> Float[Tensor, "*some end"]:
    """Return the mask to add to attention scores: the least finite number where hidden, else 0."""
    mask = torch.zeros(hidden.shape, dtype=like.dtype, device=hidden.device)
    return mask.masked_fill_(hidden, torch.finfo(like.dtype).min)


def _tree(
    parents: Fed,
    starts: Int[Tensor, "batch 1"],
    slots: Fed,
    chain: Fed,
    real: Bool[Tensor, "batch new"] | None,
    end: int,
) -> Sight:
    """Return positions, and a mask by which tree nodes attend to cache, ancestors and themselves.

    ``starts`` are the numbers of cached tokens, ``slots`` the slots of the fed tokens. ``real`` is
    False at padding, which gets the positions ``chain``; None without padding.
    """
    batch, new = slots.shape
    if real is not None:
        parents = torch.where(real, parents, -1)
    ancestors = _ancestors(parents)
    depth = starts + ancestors.sum(-1) - 1
    positions = depth if real is None else torch.where(real, depth, chain)
    at = slots.clamp(max=end)  # an additional column takes the padding
    slot = torch.arange(end + 1, device=parents.device)
    # all slots after the prefix are hidden, but for the ancestors among the fed tokens
    hidden = (slot >= starts[..., None]).repeat(1, new, 1)
    hidden.scatter_(2, at[:, None].expand(-1, new, -1), ~ancestors)
    if real is not None:
        hidden[..., 0] &= real  # padding must attend to something
    keys = slot.repeat(batch, 1).scatter_(1, at, positions)
    return Sight(positions, keys[:, :end], hidden[..., :end])


def _ancestors(parents: Fed) -> Bool[Tensor, "batch new new"]:
    """Return the mask of each fed token's ancestors among the fed tokens, itself included.

    Algorithm: the matrix with 1 at (token, token) and (token, parent) connects paths of length ≤ 1,
    and each squaring doubles the length, so that ⌈log₂ n⌉ squarings connect all n tokens to their
    ancestors. The first tokens of a prompt form a chain in all rows; their triangular mask is
    written directly, to keep the matrix small.
    """
    new, place = parents.shape[1], torch.arange(parents.shape[1], device=parents.device)
    chain = int((parents == place - 1).all(0).long().cumprod(0).sum())
    is_parent = parents[:, chain:, None] == place[chain:]
    itself = torch.eye(new - chain, dtype=torch.float32, device=parents.device)
    connected = is_parent.float() + itself
    for _ in range((new - chain - 1).bit_length()):
        connected = (connected @ connected).clamp_(max=1.0)
    ancestors = (place <= place[:, None]).repeat(len(parents), 1, 1)
    ancestors[:, chain:, chain:] = connected > 0
    # of a token whose parent stands in the chain: the parent and all tokens before it
    in_chain = (parents[:, chain:, None] < chain) & (place[:chain] <= parents[:, chain:, None])
    ancestors[:, chain:, :chain] = (connected @ in_chain.float()) > 0
    return ancestors
