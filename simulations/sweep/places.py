"""Where tasks run: in this process, in a pool of processes, on a Dask cluster."""

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
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

IN_PROCESS = "in-process"
# so many processes: "processes:4"
PROCESSES = "processes"
# seconds between two questions to a scheduler about its workers
ASK_EVERY_S = 5.0


@dataclass(frozen=True)
class Place:
    """An executor, and how many tasks it runs at once.

    Attributes
    ----------
    pool : any ``concurrent.futures.Executor``.
    slots : how many tasks run at once, now; 0 while there are no workers.
    """

    pool: Executor
    slots: Callable[[], int]


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
def executor(where: str, patience: float = 30.0) -> Iterator[Place]:
    """Open the executor that ``where`` names.

    Parameters
    ----------
    where : ``in-process``, ``processes:N``, or the address of a Dask scheduler.
    patience : seconds to wait for a scheduler to answer.

    Raises
    ------
    ValueError, OSError
        Not one of these; no scheduler answers.
    ModuleNotFoundError
        distributed is not installed.
    """
    name, _, count = where.partition(":")
    if where == IN_PROCESS:
        yield Place(InProcess(), lambda: 1)
    elif name == PROCESSES:
        with _processes(int(count)) as place:
            yield place
    else:
        with _cluster(where, patience) as place:
            yield place


@contextmanager
def _processes(count: int) -> Iterator[Place]:
    """Open a pool of fresh interpreters: a fork would copy the locks of torch's threads."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=_begin)
    try:
        yield Place(pool, lambda: count)
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
def _cluster(address: str, patience: float) -> Iterator[Place]:
    library = _distributed()
    with _quiet("distributed"):
        client = _connected(library, address, patience)
        try:
            yield Place(_Packed(client), _Threads(client))
        finally:
            client.close(timeout=patience)


def _distributed() -> Any:
    try:
        return importlib.import_module("distributed")
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "--scheduler: distributed is not installed: pip install 'dask[distributed]'",
            name="distributed",
        ) from None


def _connected(library: Any, address: str, patience: float) -> Any:
    try:
        return library.Client(address, timeout=patience, set_as_default=False)
    except ValueError as error:  # an address of no known kind
        raise ValueError(f"--scheduler: {error}") from None
    except (OSError, TimeoutError, library.comm.core.CommClosedError):
        raise OSError(
            f"--scheduler: {address} must answer within {patience:g} s; it does not"
        ) from None


class _Packed(Executor):
    """Sends calls that only workers unpack: a scheduler needs no checkout."""

    def __init__(self, client: Any) -> None:
        # not pure: a task that is sent again is computed again
        self.pool = client.get_executor(pure=False)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Return the future of a call on some worker."""
        return self.pool.submit(_unpacking(), pickle.dumps((fn, args, kwargs)))


def _unpacking() -> Callable[[bytes], Any]:
    def unpacked(content: bytes) -> Any:  # local, so that it is sent itself, not its name
        import pickle

        fn, args, kwargs = pickle.loads(content)
        return fn(*args, **kwargs)

    return unpacked


class _Threads:
    """How many threads the cluster's workers have, asked for now and then."""

    def __init__(self, client: Any) -> None:
        self.client, self.known, self.asked = client, 0, -ASK_EVERY_S

    def __call__(self) -> int:
        if time.monotonic() - self.asked >= ASK_EVERY_S or not self.known:
            self.asked = time.monotonic()
            try:
                self.known = sum(self.client.nthreads().values())
            except Exception:  # a lost scheduler shows itself in the futures
                self.known = 0
        return self.known


@contextmanager
def _quiet(library: str) -> Iterator[None]:
    """Keep a library's log lines off the terminal: what they tell is told in words."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith(library)]
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}
    try:
        for logger in levels:
            logger.setLevel(logging.CRITICAL + 1)
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
