"""Batches, back-pressure, and what is lost with a worker, on executors made for the purpose."""

import json
import math
import threading
import time
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from contextlib import nullcontext

import pytest

from simulations.sweep import drive as module
from simulations.sweep.drive import AHEAD, BATCH_S, DEATHS, LOSSES, InProcess, drive
from simulations.sweep.kinds import perform, release
from simulations.sweep.tasks import Task, record

TASKS = [Task("markov", f"policy {number}", {"number": number}) for number in range(40)]


class KilledWorker(Exception):
    """What Dask raises when a task has taken its workers with it; known by its name."""


def done(tasks, release, seconds):
    return [(task.key, record(task.key, rows=[dict(task.case)]), seconds) for task in tasks]


class Fails(InProcess):
    """An executor whose calls raise what a function of their tasks returns, if anything."""

    def __init__(self, reason):
        self.reason, self.batches = reason, []

    def submit(self, fn, /, tasks, *rest):
        self.batches.append(tasks)
        reason = self.reason(tasks)

        def call():
            if reason is not None:
                raise reason
            return fn(tasks, *rest)

        return super().submit(call)


@pytest.fixture
def run(monkeypatch):
    """Return a function that drives TASKS through pools and returns the task numbers kept."""

    def run(pools, slots=1, tasks=TASKS, seconds=0.01):
        pools = iter(pools)
        opened, kept = [], []

        def pool():
            opened.append(next(pools))
            return nullcontext((opened[-1], lambda: slots))

        monkeypatch.setattr(module, "perform", lambda *given: done(*given, seconds))
        drive(tasks, pool, lambda lines: kept.extend(map(json.loads, lines)))
        return kept, opened

    return run


def numbers(kept):
    return sorted(record["rows"][0]["number"] for record in kept if "rows" in record)


def every(kept):
    return numbers(kept) == list(range(len(TASKS)))


def is_deadly(tasks):
    return any(task.case["number"] == 7 for task in tasks)


def test_batches_last_long_enough(run):
    kept, (pool,) = run([Fails(lambda tasks: None)])
    sizes = [len(batch) for batch in pool.batches]
    assert every(kept) and sizes[:AHEAD] == [1] * AHEAD  # nothing is known of their time yet
    assert all(size * 0.01 >= BATCH_S for size in sizes[AHEAD:-1]) and max(sizes) < 40


@pytest.mark.parametrize("seconds", [0.0, 1e-7, 0.05, 0.21, 30.0])
def test_a_batch_is_as_large_as_it_must_be(run, seconds):
    tasks = [Task("markov", f"policy {number}", {"number": number}) for number in range(1100)]
    kept, (pool,) = run([Fails(lambda tasks: None)], tasks=tasks, seconds=seconds)
    *full, last = map(len, pool.batches[AHEAD:])
    size = min(1000, int(BATCH_S / max(seconds, 1e-9)) + 1)
    assert set(full) == {size} and last <= size and len(kept) == len(tasks)
    assert size == 1000 or size * seconds >= BATCH_S >= 0.1
    assert size == 1 or (size - 1) * seconds <= BATCH_S


def test_few_batches_are_out_at_once(run):
    class Counted(ThreadPoolExecutor):
        out = most = 0

        def submit(self, fn, /, *args):
            with lock:
                self.out += 1
            self.most = max(self.most, self.out)
            future = super().submit(slowly, fn, *args)
            future.add_done_callback(lambda _: self.left())
            return future

        def left(self):
            with lock:
                self.out -= 1

    def slowly(fn, *args):
        time.sleep(0.003)
        return fn(*args)

    lock = threading.Lock()
    with Counted(8) as pool:
        kept, _ = run([pool], slots=3, seconds=1.0)
    assert every(kept) and pool.most == 3 * AHEAD


def test_results_are_kept_before_more_is_handed_out(monkeypatch):
    log = []

    class Logged(InProcess):
        def submit(self, fn, /, tasks, *rest):
            log.append("out")
            return super().submit(fn, tasks, *rest)

    monkeypatch.setattr(module, "perform", lambda *given: done(*given, 1.0))
    pool = Logged(), lambda: 1
    drive(TASKS, lambda: nullcontext(pool), lambda lines: log.append("kept"))
    out = 0
    for step in log:
        out += 1 if step == "out" else -1
        assert 0 <= out <= AHEAD


def test_a_pool_whose_worker_dies_once_is_opened_again(run):
    dead = Fails(lambda tasks: BrokenExecutor() if len(dead.batches) > 4 else None)
    kept, opened = run([dead, Fails(lambda tasks: None)], slots=2)
    assert every(kept) and len(opened) == 2


def test_what_a_lost_pool_still_finishes_is_kept(run):
    sent = []

    class Breaks(Executor):
        def submit(self, fn, /, tasks, *rest):
            future: Future = Future()
            sent.extend(tasks)
            if len(sent) == 1:
                future.set_exception(BrokenExecutor())
            else:
                threading.Timer(0.1, lambda: future.set_result(fn(tasks, *rest))).start()
            return future

    kept, opened = run([Breaks(), InProcess()], tasks=TASKS[:2])
    assert len(kept) == len(opened) == len(sent) == 2


def test_a_pool_that_refuses_tasks_is_opened_again(run):
    class Refuses(Executor):
        def submit(self, fn, /, *args, **kwargs):
            raise BrokenExecutor

    kept, opened = run([Refuses(), Fails(lambda tasks: None)])
    assert every(kept) and len(opened) == 2


def test_a_task_that_kills_workers_is_found_and_the_others_go_on(run):
    pools = [Fails(lambda tasks: BrokenExecutor() if is_deadly(tasks) else None) for _ in range(9)]
    kept, opened = run(pools, slots=2)
    assert numbers(kept) == [number for number in range(40) if number != 7]
    (failed,) = [record for record in kept if "error" in record]
    assert failed["task"] == TASKS[7].key and "its worker died" in failed["error"]
    assert 1 + DEATHS <= len(opened) <= 1 + DEATHS + 1  # another if something was left to do
    alone = [batch for pool in opened[1:] for batch in pool.batches if is_deadly(batch)]
    assert [len(batch) for batch in alone] == [1] * DEATHS


def test_nothing_runs_beside_a_task_that_is_tried_alone(run, monkeypatch):
    monkeypatch.setattr(module, "LOOK_S", 0.001)
    out, beside = [], []

    class Watched(ThreadPoolExecutor):
        def submit(self, fn, /, tasks, *rest):
            out.append(tasks)

            def call():
                if is_deadly(tasks):
                    time.sleep(0.02)
                    beside.append(out[-1] is not tasks)
                    raise KilledWorker
                return fn(tasks, *rest)

            return super().submit(call)

    with Watched(4) as pool:
        kept, _ = run([pool], slots=2, seconds=1.0)
    assert len(kept) == 40 and sum("error" in record for record in kept) == 1
    assert beside == [True] + [False] * DEATHS


def test_a_killed_worker_of_a_cluster_does_not_close_it(run):
    pool = Fails(lambda tasks: KilledWorker() if is_deadly(tasks) else None)
    kept, opened = run([pool], slots=2)
    assert len(opened) == 1 and len(kept) == 40
    assert sum("error" in record for record in kept) == 1


def test_a_lost_scheduler_costs_no_task(run):
    class Lost(InProcess):
        count = 0

        def submit(self, fn, /, *args, **kwargs):
            self.count += 1
            if self.count < 4:
                return super().submit(fn, *args, **kwargs)
            future: Future = Future()
            future.cancel()
            future.set_running_or_notify_cancel()
            return future

    kept, opened = run((Lost() for _ in TASKS), slots=2, seconds=1.0)
    assert every(kept) and len(opened) == math.ceil(len(TASKS) / 3)


def test_workers_that_die_without_end_stop_the_sweep(run):
    pools = [Fails(lambda tasks: BrokenExecutor()) for _ in range(99)]
    tasks = TASKS[:1]
    kept, opened = run(pools, tasks=tasks)  # a single task: it is at fault
    assert [record.keys() for record in kept] == [{"task", "error"}]

    class Refuses(Executor):
        def submit(self, fn, /, *args, **kwargs):
            raise BrokenExecutor

    with pytest.raises(RuntimeError, match=f"lost {LOSSES} times before one task was finished"):
        run([Refuses() for _ in range(LOSSES)])


def test_a_worker_that_cannot_take_tasks_stops_the_sweep(run):
    reason = ModuleNotFoundError("No module named 'simulations'")
    with pytest.raises(RuntimeError, match="a worker cannot take tasks; ModuleNotFoundError: No"):
        run([Fails(lambda tasks: reason)])


def test_a_worker_of_other_code_refuses(monkeypatch):
    here = release()
    for name in here:
        with pytest.raises(RuntimeError, match=f"must have the same {name} as the command"):
            perform([], here | {name: "other"})
    assert perform([], here) == []
