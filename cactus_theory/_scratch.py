"""Memory that is reused from call to call, one workspace per thread.

A fresh temporary above a megabyte is mapped page by page at every call and unmapped after it;
at a vocabulary of 151,936 that costs more than the arithmetic. A *slot* is the name of one
temporary: asking for it again returns the same memory.
"""

import math
import threading

import torch
from torch import Tensor

# larger buffers are not kept: one large batch must not hold its memory for ever
MOST_KEPT = 1 << 26


class _Workspace(threading.local):
    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}


_kept = _Workspace()


def scratch(
    slot: str,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return an uninitialised contiguous tensor on this thread's memory for ``slot``.

    It is valid until this thread asks for the same slot (with this dtype and device) again,
    whatever shape it asks for: write into it with ``out=``, and never return it to a caller
    that may keep it. Name slots by the file that uses them, such as ``"edges.ratio"``. Tensors
    larger than ``MOST_KEPT`` bytes are allocated anew at every call.
    """
    count = math.prod(shape)
    if count * dtype.itemsize > MOST_KEPT:
        return torch.empty(shape, dtype=dtype, device=device)
    key = (slot, dtype, device if isinstance(device, torch.device) else torch.device(device))
    buffer = _kept.buffers.get(key)
    if buffer is None or len(buffer) < count:
        with torch.inference_mode(False):  # else it could not be written to outside that mode
            buffer = torch.empty(count, dtype=dtype, device=device)
        _kept.buffers[key] = buffer
    return buffer[:count].view(shape)


def forget() -> None:
    """Give back this thread's memory."""
    _kept.buffers.clear()
