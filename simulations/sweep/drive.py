"""Hand out tasks in batches, a few at a time, until every one has a result or an error.

A lost pool, worker or scheduler costs what was running. What ran when a worker died is tried
again alone, one task at a time, so that a task that kills its workers is found and the others
go on.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Future, wait
from dataclasses import dataclass

from .places import Place, executor
from .task import Task
from .work import Done, failure, perform, release

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


@dataclass(frozen=True)
class Batch:
    """Tasks that are handed out together; ``alone`` when nothing else may run beside them."""

    tasks: tuple[Task, ...]
    alone: bool = False


class Queue:
    """The tasks that no worker has yet, and those that may have killed one."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.waiting, self.suspects = deque(tasks), deque[Task]()
        self.finished = 0
        self._deaths: Counter[str] = Counter()
        self._recent: deque[float] = deque(maxlen=RECENT)

    def __bool__(self) -> bool:
        return bool(self.waiting or self.suspects)

    @property
    def size(self) -> int:
        """Return how many tasks make a batch of :data:`BATCH_S`; 1 while that is not known."""
        if not self._recent:
            return 1
        return min(MOST_TASKS, 1 + int(BATCH_S / max(statistics.median(self._recent), 1e-9)))

    def take(self, idle: bool) -> Batch | None:
        """Return what to hand out next, None if that must wait until nothing runs."""
        if self.suspects:
            return Batch((self.suspects.popleft(),), alone=True) if idle else None
        count = min(self.size, len(self.waiting))
        return Batch(tuple(self.waiting.popleft() for _ in range(count))) if count else None

    def done(self, found: Sequence[Done]) -> list[str]:
        """Record a finished batch and return its lines."""
        self.finished += len(found)
        self._recent.extend(seconds for _, _, seconds in found)
        return [line for _, line, _ in found]

    def again(self, batch: Batch) -> None:
        """Take back what was lost by no fault of its own."""
        (self.suspects if batch.alone else self.waiting).extendleft(reversed(batch.tasks))

    def suspect(self, batch: Batch) -> list[str]:
        """Take back what ran when a worker died; return the line of a task that kills them."""
        if batch.alone:
            (own,) = batch.tasks
            self._deaths[own.key] += 1
            if self._deaths[own.key] >= DEATHS:
                self.finished += 1
                return [failure(own, f"its worker died, {DEATHS} times when it ran alone")]
        self.suspects.extend(batch.tasks)
        return []


def drive(
    tasks: Sequence[Task],
    where: str,
    keep: Keep,
    *,
    patience: float = 30.0,
    idle: Callable[[int], None] = lambda slots: None,
) -> None:
    """Run every task and hand the lines of each batch to ``keep`` as it arrives.

    Parameters
    ----------
    tasks : each once.
    where : as :func:`simulations.sweep.places.executor` takes it.
    keep : called with the lines of finished tasks, which it puts on the disk.
    patience : seconds to wait for a scheduler to answer.
    idle : called now and then while nothing arrives, with the tasks that can run at once.

    Raises
    ------
    OSError
        The scheduler is gone, and no other answers at its address.
    RuntimeError
        Workers cannot take tasks at all, or are lost again and again.
    """
    queue, losses = Queue(tasks), 0
    while queue:
        before = queue.finished
        with executor(where, patience) as place:
            _until_lost(queue, place, keep, idle)
        losses = 0 if queue.finished > before else losses + 1
        if losses >= LOSSES:
            raise RuntimeError(f"workers were lost {LOSSES} times before one task was finished")


def _until_lost(queue: Queue, place: Place, keep: Keep, idle: Callable[[int], None]) -> None:
    """Work until all is done, or until the pool is."""
    running: dict[Future[list[Done]], Batch] = {}
    usable = True
    while usable and (queue or running):
        usable = _hand_out(queue, place, running)
        arrived = wait(running, timeout=LOOK_S, return_when=FIRST_COMPLETED).done
        if not arrived and usable:
            idle(place.slots())
        for future in arrived:
            usable &= _settle(future, running.pop(future), queue, keep)
    for future in wait(running, timeout=LOOK_S).done:  # the pool is lost, not what it finished
        _settle(future, running.pop(future), queue, keep)
    for future, batch in running.items():
        future.cancel()
        queue.again(batch)


def _hand_out(queue: Queue, place: Place, running: dict[Future[list[Done]], Batch]) -> bool:
    """Fill the pool; return whether it still takes tasks."""
    most = AHEAD * max(place.slots(), 1)
    while len(running) < most and (batch := queue.take(idle=not running)) is not None:
        try:
            running[place.pool.submit(perform, batch.tasks, release())] = batch
        except BrokenExecutor:
            queue.again(batch)
            return False
        if batch.alone:
            break
    return True


def _settle(future: Future[list[Done]], batch: Batch, queue: Queue, keep: Keep) -> bool:
    """Take a finished future's results, or its tasks back; return whether the pool is usable."""
    try:
        found = future.result()
    except CancelledError:  # the scheduler is lost
        queue.again(batch)
        return False
    except Exception as error:
        usable = not isinstance(error, BrokenExecutor)
        if usable and type(error).__name__ != "KilledWorker":  # the name: Dask may be missing
            raise RuntimeError(
                f"a worker cannot take tasks; {type(error).__name__}: {error}"
            ) from error
        if lines := queue.suspect(batch):
            keep(lines)
        return usable
    keep(queue.done(found))
    return True
