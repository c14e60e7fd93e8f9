"""Run tasks on any executor, a few batches at a time, until each has a result or an error.

A pool is this process, a pool of processes or a Dask cluster: a ``concurrent.futures.Executor``,
and how many tasks run on it at once, now. A lost pool, worker or scheduler costs what was
running. What ran when a worker died is tried again alone, one task at a time, so that a task
that kills its workers is found and the others go on.
"""

from __future__ import annotations

import importlib
import logging
import math
import multiprocessing
import os
import pickle
import signal
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    wait,
)
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Any

from .kinds import Done, perform, release
from .tasks import Task, failure

# seconds between two questions to a scheduler about its workers
ASK_EVERY_S = 1.0
# an executor and its slots; 0 while there are no workers
Pool = tuple[Executor, Callable[[], int]]
Pools = Callable[[], AbstractContextManager[Pool]]


class InProcess(Executor):
    """Runs each call when it is submitted."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


@contextmanager
def in_process() -> Iterator[Pool]:
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
    """Open the executor of a Dask cluster, whose scheduler must answer in ``patience`` seconds."""
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

        def unpacked(content: bytes) -> Any:  # local, so that it is sent itself, not its name
            import pickle

            fn, args, kwargs = pickle.loads(content)
            return fn(*args, **kwargs)

        return self.pool.submit(unpacked, pickle.dumps((fn, args, kwargs)))


# what a batch is to take: handing one out costs milliseconds
BATCH_S = 0.2
MOST_TASKS = 1000  # of a batch
# batches handed out for each one that runs, so that no worker waits for the next
AHEAD = 2
# workers that a task may kill alone before it counts as failed
DEATHS = 2
# times that a pool is opened again without one finished task
LOSSES = 5
# recent tasks that say how long the next ones take
RECENT = 32
LOOK_S = 1.0
Keep = Callable[[list[str]], None]
Idle = Callable[[int], None]
Running = dict[Future[list[Done]], list[Task]]


def drive(
    tasks: Sequence[Task], pools: Pools, keep: Keep, *, idle: Idle = lambda slots: None
) -> None:
    """Run every task and hand the lines of each batch to ``keep``, which puts them on the disk.

    ``pools`` opens an executor, again when that one is lost. ``idle`` is called now and then while
    nothing arrives, with the tasks that can run at once. Raises OSError where the scheduler is gone
    and no other answers at its address, RuntimeError where workers cannot take tasks at all, or are
    lost again and again.
    """
    sweep, losses = _Sweep(tasks, keep), 0
    while remaining := len(sweep.tasks):
        with pools() as pool:
            sweep.until_lost(pool, idle)
        losses = 0 if len(sweep.tasks) < remaining else losses + 1
        if losses >= LOSSES:
            raise RuntimeError(f"workers were lost {LOSSES} times before one task was finished")


class _Sweep:
    """The tasks that no worker has; ``deaths`` of workers by tasks that must run alone."""

    def __init__(self, tasks: Sequence[Task], keep: Keep) -> None:
        self.tasks, self.keep = deque(tasks), keep
        self.deaths: dict[str, int] = {}
        self.recent: deque[float] = deque(maxlen=RECENT)

    def until_lost(self, pool: Pool, idle: Idle) -> None:
        """Work until all is done, or until the pool is lost."""
        running: Running = {}
        usable = True
        while usable and (self.tasks or running):
            usable = self._hand_out(pool, running)
            arrived = wait(running, timeout=LOOK_S, return_when=FIRST_COMPLETED).done
            if not arrived and usable:
                idle(pool[1]())
            for future in arrived:
                usable &= self._settle(future, running.pop(future))
        for future in wait(running, timeout=LOOK_S).done:  # the pool is lost, not what it finished
            self._settle(future, running.pop(future))
        for future, batch in running.items():
            future.cancel()
            self._take_back(batch)

    def batch(self, running: Running) -> list[Task]:
        """Return what to hand out next, nothing where that must wait for what runs."""
        if any(self._alone(batch) for batch in running.values()):
            return []
        if self._alone(self.tasks):
            return [] if running else [self.tasks.popleft()]
        seconds = max(statistics.median(self.recent), 1e-9) if self.recent else math.inf
        count = min(MOST_TASKS, 1 + int(BATCH_S / seconds), len(self.tasks))
        tasks: list[Task] = []
        while len(tasks) < count and not self._alone(self.tasks):
            tasks.append(self.tasks.popleft())
        return tasks

    def _alone(self, tasks: Sequence[Task]) -> bool:
        return bool(tasks) and tasks[0].key in self.deaths

    def _hand_out(self, pool: Pool, running: Running) -> bool:
        """Fill the pool; return whether it still takes tasks."""
        executor, slots = pool
        limit = AHEAD * max(slots(), 1)
        while len(running) < limit and (batch := self.batch(running)):
            try:
                running[executor.submit(perform, batch, release())] = batch
            except BrokenExecutor:
                self._take_back(batch)
                return False
        return True

    def _settle(self, future: Future[list[Done]], batch: list[Task]) -> bool:
        """Take a future's results, or its tasks back; return whether the pool is usable."""
        try:
            results = future.result()
        except CancelledError:  # the scheduler is lost
            self._take_back(batch)
            return False
        except Exception as error:
            usable = not isinstance(error, BrokenExecutor)
            if usable and type(error).__name__ != "KilledWorker":  # the name: Dask may be missing
                raise RuntimeError(
                    f"a worker cannot take tasks; {type(error).__name__}: {error}"
                ) from error
            self._suspect(batch)
            return usable
        self.recent.extend(seconds for _, _, seconds in results)
        self.keep([line for _, line, _ in results])
        return True

    def _suspect(self, batch: list[Task]) -> None:
        """Have what ran when a worker died run alone, unless it has killed enough of them."""
        for task in batch:
            self.deaths[task.key] = self.deaths.get(task.key, -1) + 1
        if self.deaths[batch[0].key] < DEATHS:
            self._take_back(batch)
        else:
            self.keep([failure(batch[0], f"its worker died, {DEATHS} times when it ran alone")])

    def _take_back(self, batch: list[Task]) -> None:
        self.tasks.extendleft(reversed(batch))
