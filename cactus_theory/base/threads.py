"""Run torch's row-by-row work on one thread.

PyTorch divides every operation on more than 32,768 entries among a pool of threads, and waits for
the last of them. If another process uses a core, this wait takes a hundred times the arithmetic,
and rows are handled in many small operations.
"""

import ctypes
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


def _library() -> Any:
    """Return PyTorch's shared library, through which OpenMP is set; None if it is not found."""
    for file in sorted((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*")):
        try:
            library = ctypes.CDLL(str(file))
            library.omp_set_num_threads  # noqa: B018  (raises AttributeError if missing)
            return library
        except (OSError, AttributeError):
            continue
    return None


_LIBRARY = _library()
_SET_MKL = getattr(_LIBRARY, "MKL_Set_Num_Threads_Local", int)  # without MKL, without effect


@contextmanager
def one_thread() -> Generator[None]:
    """Let PyTorch compute on the calling thread alone, as a ``with`` block or a decorator.

    OpenMP and MKL keep a number of threads for each thread that calls them. Only the number of the
    calling thread changes, and only until the end of the block.
    """
    before = torch.get_num_threads()  # the first call in a thread sets that thread's number
    if _LIBRARY is None or before == 1:
        yield
        return
    _LIBRARY.omp_set_num_threads(1)
    mkl = _SET_MKL(1)
    try:
        yield
    finally:
        _LIBRARY.omp_set_num_threads(before)
        _SET_MKL(mkl)
