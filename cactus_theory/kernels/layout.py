"""The layout of logits and drafted tokens, padded or flat, checked by shapes alone."""

from dataclasses import dataclass

import torch
from torch import Tensor

LOGITS = (torch.float32, torch.bfloat16, torch.float16)
COUNTS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Layout:
    """The layout of each request's rows: padded to B, K and V, or one after another, ``flat``.

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
    """Return the layout of checked logits and ids; raise where their shapes do not match."""
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
    """Raise unless the logits have a dtype that kernels read and are contiguous along V."""
    if logits.dtype not in LOGITS:
        raise TypeError(f"{name}: must be float32, bfloat16 or float16; got {logits.dtype}")
    if not logits.ndim or not logits.shape[-1]:
        raise ValueError(f"{name}: needs at least one token; got shape {tuple(logits.shape)}")
    if logits.shape[-1] > 1 and logits.stride(-1) != 1:
        raise ValueError(f"{name}: stride must be 1 along V; got {logits.stride()}")


def check_per_request(
    batch: int, device: torch.device, dtypes: tuple[torch.dtype, ...], **tensors: Tensor
) -> None:
    """Raise unless the values are (B,), contiguous, of one of the dtypes and on the device."""
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
