"""Where logits and drafted tokens lie, padded or flat, and the memory of a verification step.

Layouts are checked by shapes alone. The memory is small, and the same whatever the rows hold.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

LOGITS = (torch.float32, torch.bfloat16, torch.float16)
COUNTS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Layout:
    """Where the rows of each request lie: padded to B, K and V, or one after another, ``flat``.

    ``lengths`` (B,) are drafted tokens, or running counts if flat; None where −1 ends a draft.
    """

    batch: int
    width: int
    vocab: int
    lengths: Tensor | None
    flat: bool


def layout_of(
    target: Tensor,
    draft: Tensor | None,
    ids: Tensor,
    lengths: Tensor | None,
    ends: Tensor | None,
    width: int | None,
) -> Layout:
    """Return the layout of checked logits and ids; raise where they do not match."""
    check_logits("target_logits", target)
    if draft is not None:
        check_logits("draft_logits", draft)
    if ids.dtype != torch.int64:
        raise TypeError(f"draft_token_ids: must be int64; got {ids.dtype}")
    if ids.ndim and ids.shape[-1] > 1 and ids.stride(-1) != 1:
        raise ValueError(f"draft_token_ids: stride must be 1 along K; got {ids.stride()}")
    if ends is None:
        if width is not None:
            raise ValueError(f"width: must not be given without cu_num_draft_tokens; got {width}")
        return _padded(target, draft, ids, lengths)
    if lengths is not None:
        raise ValueError("lengths: must not be given with cu_num_draft_tokens, which has them")
    return _flat(target, draft, ids, ends, width)


def _padded(target: Tensor, draft: Tensor | None, ids: Tensor, lengths: Tensor | None) -> Layout:
    if ids.ndim != 2 or target.ndim != 3:
        raise ValueError(
            "draft_token_ids, target_logits: shapes must be (B, K) and (B, K + 1, V); "
            f"got {tuple(ids.shape)} and {tuple(target.shape)}"
        )
    (batch, width), vocab = ids.shape, target.shape[-1]
    _shaped("target_logits", target, (batch, width + 1, vocab))
    if draft is not None:
        _shaped("draft_logits", draft, (batch, width, vocab))
    if lengths is not None:
        check_per_request(batch, target.device, COUNTS, lengths=lengths)
    return Layout(batch, width, vocab, lengths, False)


def _flat(
    target: Tensor, draft: Tensor | None, ids: Tensor, ends: Tensor, width: int | None
) -> Layout:
    if width is None or width < 0:
        raise ValueError(f"width: must be the most tokens a request drafts, if flat; got {width}")
    if ends.ndim != 1:
        raise ValueError(f"cu_num_draft_tokens: shape must be (B,); got {tuple(ends.shape)}")
    check_per_request(len(ends), target.device, COUNTS, cu_num_draft_tokens=ends)
    tokens, vocab = ids.numel(), target.shape[-1]
    _shaped("draft_token_ids", ids, (tokens,))
    _shaped("target_logits", target, (tokens + len(ends), vocab))
    if draft is not None:
        _shaped("draft_logits", draft, (tokens, vocab))
    return Layout(len(ends), width, vocab, ends, True)


def check_logits(name: str, logits: Tensor) -> None:
    """Raise unless these are logits of a dtype that kernels read, contiguous along V."""
    if logits.dtype not in LOGITS:
        raise TypeError(f"{name}: must be float32, bfloat16 or float16; got {logits.dtype}")
    if not logits.ndim or not logits.shape[-1]:
        raise ValueError(f"{name}: needs at least one token; got shape {tuple(logits.shape)}")
    if logits.shape[-1] > 1 and logits.stride(-1) != 1:
        raise ValueError(f"{name}: stride must be 1 along V; got {logits.stride()}")


def check_per_request(
    batch: int, device: torch.device, dtypes: tuple[torch.dtype, ...], **tensors: Tensor
) -> None:
    """Raise unless these are (B,), contiguous, of one of the dtypes and on the device."""
    for name, value in tensors.items():
        _shaped(name, value, (batch,))
        if value.dtype not in dtypes:
            allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise ValueError(f"{name}: must be {allowed}; got {value.dtype}")
        if value.device != device:
            raise ValueError(f"{name}: must be on {device}; got {value.device}")
        if not value.is_contiguous():
            raise ValueError(f"{name}: must be contiguous; got strides {value.stride()}")


def checked_temperature(
    temperature: float | Tensor, batch: int, device: torch.device
) -> float | Tensor:
    """Return the temperature, one number or one per request; raise unless it is one."""
    if isinstance(temperature, Tensor):
        check_per_request(batch, device, (torch.float32,), temperature=temperature)
        return temperature
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature: must lie in [0, inf); got {temperature!r}")
    return float(temperature)


def _shaped(name: str, value: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(value.shape) != shape:
        raise ValueError(f"{name}: shape must be {shape}; got {tuple(value.shape)}")


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
