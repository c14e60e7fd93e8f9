"""Memory of a verification step: small, and the same whatever the rows hold."""

from functools import cached_property

import torch
from torch import Tensor

# tokens that a program takes of a row, by the vocabulary up to which it does; a multiple of 512,
# the tokens that share counters of noise
PART_BY_VOCABULARY = ((512, 512), (1024, 1024), (16384, 2048), (65536, 4096))
LONGEST_PART = 8192


class Workspace:
    """What the kernels of one step write: two numbers a row and part, and a few a request.

    A workspace may be used again for the same sizes, by one step at a time. With one, and
    ``out``, a step allocates nothing.

    Parameters
    ----------
    batch : requests.
    width : the most drafted tokens of a request, K.
    vocab : entries of a row, V.

    Attributes
    ----------
    alive : (B K,) float64; after a block, the ratio P with which each drafted token's row was
        reached.

    Examples
    --------
    >>> Workspace(batch=2, width=4, vocab=1000, device="cpu").sizes
    (2, 4, 1000)
    """

    def __init__(
        self, batch: int, width: int, vocab: int, device: torch.device | str = "cuda"
    ) -> None:
        self.batch, self.width, self.vocab = batch, width, vocab
        self.device = torch.device(device)
        self.part = part_for(vocab)
        self.parts = -(-vocab // self.part)
        self.rows = batch * width
        for name, (dtype, shape) in self._plan().items():
            size = 1
            for length in shape:
                size *= length
            setattr(self, name, torch.zeros(max(size, 1), dtype=dtype, device=self.device))

    accepted: Tensor
    alive: Tensor
    whole_keys: Tensor
    whole_tokens: Tensor

    def _plan(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        rows, parts, batch = self.rows, self.parts, self.batch
        single, double, index = torch.float32, torch.float64, torch.int32
        return {
            "part_max": (single, (2, rows, parts)), "part_sum": (single, (2, rows, parts)),
            "part_arg": (index, (2, rows, parts)),
            "peaks": (single, (2, rows)), "weights": (single, (2, rows)),
            "chances": (double, (2, rows)), "verdicts": (index, (rows,)),
            "accepted": (index, (batch,)), "scales": (double, (batch,)),
            "sums": (single, (2, 2, rows, parts)), "edges": (double, (2, 3, rows)),
            "flags": (index, (2, rows)),
            "alive": (double, (rows,)), "row_scales": (double, (rows,)),
            "closed": (double, (rows,)), "ends": (double, (batch,)), "sure": (index, (batch,)),
            "lefts": (single, (rows, parts)),
            "left_keys": (single, (batch, parts)), "left_tokens": (index, (batch, parts)),
            "whole_keys": (double, (batch, parts)), "whole_tokens": (index, (batch, parts)),
        }  # fmt: skip

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Return everything by name."""
        return {name: getattr(self, name) for name in self._plan()}

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return (batch, width, vocab)."""
        return self.batch, self.width, self.vocab


def part_for(vocab: int) -> int:
    """Return how many tokens of a row one program takes; it depends on the vocabulary alone."""
    for most, part in PART_BY_VOCABULARY:
        if vocab <= most:
            return part
    return LONGEST_PART
