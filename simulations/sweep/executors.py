"""Where tasks run: one after the other in this process, or on the workers of a Dask cluster.

What a task comes to is handed over as soon as it is known. Dask runs the task of a worker that
died again, on another worker, and gives it up once ``allowed-failures`` more of them have died.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from .kinds import Outcome, perform
from .tasks import Task

# seconds within which a scheduler and a worker must answer
PATIENCE_S = 30
# code run by a worker as it starts: it leaves Ctrl-C to the command, which ends the worker
IGNORES_INTERRUPTS = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
Outcomes = Iterator[tuple[Task, Outcome]]


def serial(tasks: Sequence[Task], planned: Mapping[str, str | None]) -> Outcomes:
    for task in tasks:
        yield task, perform(task, planned)


@contextmanager
def cluster(workers: int | None, address: str | None) -> Iterator[Any]:
    """Open the client of a cluster: of so many processes of this machine, or at an address.

    Processes are fresh interpreters, of one thread, that end with this one. Raises
    ModuleNotFoundError without Dask, ValueError for an address of no known kind, OSError where no
    scheduler answers or none of its workers is there.
    """
    import distributed  # pip install 'dask[distributed]'

    with ExitStack() as stack:
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.CRITICAL)  # what the library's log lines tell is told in words
        place: Any = address
        if address is None:
            # what a task takes is not known: no worker is ended for its memory
            options = {"n_workers": workers, "threads_per_worker": 1, "memory_limit": 0}
            options |= {"dashboard_address": None, "silence_logs": logging.CRITICAL}
            options |= {"preload": IGNORES_INTERRUPTS}
            place = stack.enter_context(distributed.LocalCluster(**options))
        client = distributed.Client(place, timeout=PATIENCE_S, set_as_default=False)
        stack.enter_context(client).wait_for_workers(1, timeout=PATIENCE_S)
        yield client


def on_cluster(client: Any, tasks: Sequence[Task], planned: Mapping[str, str | None]) -> Outcomes:
    """Yield the outcomes of tasks as they finish; OSError once the scheduler is lost."""
    import distributed  # pip install 'dask[distributed]'

    # not pure: what another client computed of a task is not taken
    futures = client.map(perform, tasks, planned=planned, pure=False)
    by_key = {future.key: task for future, task in zip(futures, tasks, strict=True)}
    done = distributed.as_completed(
        futures, loop=client.loop, with_results=True, raise_errors=False
    )
    del futures  # what is finished is forgotten, here and on the workers
    for future, result in done:
        if future.status == "finished":
            yield by_key[future.key], result
        elif future.status == "error":  # a killed worker, or what it cannot even read
            yield by_key[future.key], {"error": " ".join(str(result[1]).split())}
        else:
            raise OSError("--scheduler: it is lost; the same command goes on from what is kept")
