"""Memory that is reused from call to call, by one user at a time.

A fresh temporary above a megabyte is mapped page by page at every call and unmapped after it;
at a vocabulary of 151,936 that costs more than the arithmetic. A *slot* is the name of one
temporary: asking for it again returns the same memory, unless somebody still holds it. A signal
handler, a generator or a callback that solves in the middle of a solve gets memory of its own.
"""

import math
import threading
import weakref

import torch
from torch import Tensor

# bytes of the largest buffer that is kept: one large batch must not hold its memory for ever
MOST_KEPT = 1 << 26
# entries of a law whose memory is kept; allocating fewer is faster than looking for them
LEAST_OF_LAWS, MOST_OF_LAWS = 1 << 13, 1 << 18
# buffers that a slot keeps: one, and one for each user in the middle of another's work
MOST_BUFFERS = 4


class _Buffer:
    """Bytes for one user at a time: ``lease`` is alive while any tensor or array is on them."""

    def __init__(self, size: int) -> None:
        with torch.inference_mode(False):
            self.bytes = torch.empty(size, dtype=torch.uint8, device="cpu").numpy().data
        self.lease = weakref.ref(self.bytes[:0])  # dead: nobody holds the buffer

    def lend(self, count: int, dtype: torch.dtype) -> Tensor:
        lease = self.bytes[: count * dtype.itemsize]
        self.lease = weakref.ref(lease)
        return torch.frombuffer(lease, dtype=dtype, count=count)


class _Workspace(threading.local):
    def __init__(self) -> None:
        self.buffers: dict[str, list[_Buffer]] = {}


_kept = _Workspace()


def scratch(
    slot: str,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return an uninitialised contiguous tensor on this thread's memory for ``slot``.

    It belongs to whoever asked until the tensor and all views of it are gone; then the next one
    to ask for the slot gets the memory, whatever shape or dtype it asks for. Name slots by the
    file that uses them, such as ``"edges.ratio"``. Tensors larger than ``MOST_KEPT`` bytes, and
    those of a device, whose allocator keeps memory itself, are allocated at every call.
    """
    count = math.prod(shape)
    size = count * dtype.itemsize
    if not 0 < size <= MOST_KEPT or torch.device(device).type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    buffers = _kept.buffers.setdefault(slot, [])
    for place, buffer in enumerate(buffers):
        if buffer.lease() is None:
            if len(buffer.bytes) < size:
                buffers[place] = buffer = _Buffer(size)
            return buffer.lend(count, dtype).view(shape)
    if len(buffers) == MOST_BUFFERS:
        return torch.empty(shape, dtype=dtype, device="cpu")
    buffers.append(_Buffer(size))
    return buffers[-1].lend(count, dtype).view(shape)


def passing(like: Tensor) -> Tensor:
    """Return memory for a temporary that is gone before a call returns, the next user's after it.

    So it is near the core still, where memory of each one's own would not be.
    """
    return scratch("passing", tuple(like.shape), like.dtype, like.device)


def law_like(rows: Tensor) -> Tensor:
    """Return memory for rows that a caller may keep: that of a law that was let go of."""
    if LEAST_OF_LAWS <= rows.numel() <= MOST_OF_LAWS:
        return scratch("law", tuple(rows.shape), rows.dtype, rows.device)
    return torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)


def forget() -> None:
    """Give back this thread's memory."""
    _kept.buffers.clear()
