"""Run tasks on any executor, a few batches at a time, until each has a result or an error.

A lost pool, worker or scheduler costs what was running. What ran when a worker died is tried
again alone, one task at a time, so that a task that kills its workers is found and the others
go on.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Future, wait

from .pools import Pool, Pools
from .task import Done, Task, failure, perform, release

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
Running = dict[Future[list[Done]], list[Task]]


def drive(
    tasks: Sequence[Task],
    pools: Pools,
    keep: Keep,
    *,
    idle: Callable[[int], None] = lambda slots: None,
) -> None:
    """Run every task and hand the lines of each batch to ``keep`` as it arrives.

    Parameters
    ----------
    tasks : each once.
    pools : opens an executor; again when that one is lost.
    keep : called with the lines of finished tasks, which it puts on the disk.
    idle : called now and then while nothing arrives, with the tasks that can run at once.

    Raises
    ------
    OSError
        The scheduler is gone, and no other answers at its address.
    RuntimeError
        Workers cannot take tasks at all, or are lost again and again.
    """
    sweep, losses = _Sweep(tasks, keep), 0
    while left := len(sweep.tasks):
        with pools() as pool:
            sweep.until_lost(pool, idle)
        losses = 0 if len(sweep.tasks) < left else losses + 1
        if losses >= LOSSES:
            raise RuntimeError(f"workers were lost {LOSSES} times before one task was finished")


class _Sweep:
    """The tasks that no worker has; ``deaths`` of workers by tasks that must run alone."""

    def __init__(self, tasks: Sequence[Task], keep: Keep) -> None:
        self.tasks, self.keep = deque(tasks), keep
        self.deaths: dict[str, int] = {}
        self.recent: deque[float] = deque(maxlen=RECENT)

    def until_lost(self, pool: Pool, idle: Callable[[int], None]) -> None:
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
        usual = max(statistics.median(self.recent), 1e-9) if self.recent else math.inf
        count = min(MOST_TASKS, 1 + int(BATCH_S / usual), len(self.tasks))
        found: list[Task] = []
        while len(found) < count and not self._alone(self.tasks):
            found.append(self.tasks.popleft())
        return found

    def _alone(self, tasks: Sequence[Task]) -> bool:
        return bool(tasks) and tasks[0].key in self.deaths

    def _hand_out(self, pool: Pool, running: Running) -> bool:
        """Fill the pool; return whether it still takes tasks."""
        executor, slots = pool
        most = AHEAD * max(slots(), 1)
        while len(running) < most and (batch := self.batch(running)):
            try:
                running[executor.submit(perform, batch, release())] = batch
            except BrokenExecutor:
                self._take_back(batch)
                return False
        return True

    def _settle(self, future: Future[list[Done]], batch: list[Task]) -> bool:
        """Take a future's results, or its tasks back; return whether the pool is usable."""
        try:
            found = future.result()
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
        self.recent.extend(seconds for _, _, seconds in found)
        self.keep([line for _, line, _ in found])
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
