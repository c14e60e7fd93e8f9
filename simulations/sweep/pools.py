"""Where tasks run: in this process, in a pool of processes, on a Dask cluster.

Each opens a ``concurrent.futures.Executor``, and says how many tasks run on it at once, now.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Any

# seconds between two questions to a scheduler about its workers
ASK_EVERY_S = 1.0
# an executor and its slots; 0 while there are no workers
Pool = tuple[Executor, Callable[[], int]]
Pools = Callable[[], AbstractContextManager[Pool]]


class InProcess(Executor):
    """Runs each call when it is submitted."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Return a finished future."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


@contextmanager
def in_process() -> Iterator[Pool]:
    """Open an executor without workers."""
    yield InProcess(), lambda: 1


@contextmanager
def processes(count: int) -> Iterator[Pool]:
    """Open a pool of fresh interpreters: a fork would copy the locks of torch's threads."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=_begin)
    try:
        yield pool, lambda: count
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _begin() -> None:
    """Prepare a process of the pool: it leaves ^C to its parent, and does not outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow, daemon=True).start()


def _follow() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def cluster(address: str, patience: float) -> Iterator[Pool]:
    """Open the executor of a Dask cluster.

    Parameters
    ----------
    address : of its scheduler.
    patience : seconds to wait for it to answer.

    Raises
    ------
    ValueError, OSError
        Not an address; no scheduler answers.
    ModuleNotFoundError
        distributed is not installed.
    """
    try:
        library: Any = importlib.import_module("distributed")
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "--scheduler: distributed is not installed: pip install 'dask[distributed]'",
            name="distributed",
        ) from None
    logs = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # what the library's log lines tell is told in words
    try:
        client = _connected(library, address, patience)
        try:
            # not pure: a task that is sent again is computed again
            yield _Packed(client.get_executor(pure=False)), _slots(client)
        finally:
            client.close(timeout=patience)
    finally:
        logging.disable(logs)


def _connected(library: Any, address: str, patience: float) -> Any:
    try:
        return library.Client(address, timeout=patience, set_as_default=False)
    except ValueError as error:  # an address of no known kind
        raise ValueError(f"--scheduler: {error}") from None
    except (OSError, TimeoutError, library.comm.core.CommClosedError):
        raise OSError(
            f"--scheduler: {address} must answer within {patience:g} s; it does not"
        ) from None


def _slots(client: Any) -> Callable[[], int]:
    """Return what says how many threads the cluster's workers have, asked for now and then."""

    @lru_cache(maxsize=1)
    def threads(period: float) -> int:
        try:
            return sum(client.nthreads().values())
        except Exception:  # a lost scheduler shows itself in the futures
            return 0

    return lambda: threads(time.monotonic() // ASK_EVERY_S)


class _Packed(Executor):
    """Sends calls that only workers unpack: a scheduler needs no checkout."""

    def __init__(self, pool: Executor) -> None:
        self.pool = pool

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Return the future of a call on some worker."""

        def unpacked(content: bytes) -> Any:  # local, so that it is sent itself, not its name
            import pickle

            fn, args, kwargs = pickle.loads(content)
            return fn(*args, **kwargs)

        return self.pool.submit(unpacked, pickle.dumps((fn, args, kwargs)))
