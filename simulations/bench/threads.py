"""Time what is done row by row by the number of torch's threads, idle and beside busy processes.

``default`` is the number that torch chooses. ``times_best`` compares a number's median with the
best one's, of the same job under the same load: ``loaded`` is another process on every core.
"""

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

import cactus_theory as ct
from cactus_theory.base import arguments as check
from cactus_theory.decoding._meter import Meter

from .theory import DELTA, clocked, pair_of_rows

VOCABULARIES = (2_048, 32_000, 151_936)
# torch's number of threads before a command has chosen one
DEFAULT = torch.get_num_threads()
SPECS = ("band:price=1", "band:delta=0.1", "cactus:delta=0.1")
WIDTH = 4
# seconds of calls that are timed together: other processes get a core for milliseconds
SECONDS = 0.06
HEADS = {
    "load": "load", "job": "job", "vocabulary": "V", "threads": "threads", "milliseconds": "ms",
    "times_best": "× best",
}  # fmt: skip


def measure(what: str, threads: Sequence[str], repeats: int) -> Iterator[dict[str, Any]]:
    """Yield one dictionary per load, vocabulary, job of ``verify`` or ``theory``, and number."""
    counts = {name: DEFAULT if name == "default" else check.threads(name) for name in threads}
    for load in ("idle", "loaded"):
        busy = [sys.executable, "-c", "while True: pass"]
        others = [subprocess.Popen(busy) for _ in range((os.cpu_count() or 1) * (load == "loaded"))]
        gc.disable()  # every second call would be that much slower
        try:
            for vocab in VOCABULARIES:
                for name, job in JOBS[what](vocab):
                    calls = _calls(job)
                    runs = {
                        given: partial(_on, count, job, calls) for given, count in counts.items()
                    }
                    times, _ = clocked(runs, repeats)
                    best = min(each["milliseconds"] for each in times.values())
                    for given, each in times.items():
                        shown = {"load": load, "job": name, "vocabulary": vocab, "threads": given}
                        own = {statistic: value / calls for statistic, value in each.items()}
                        yield shown | own | {"times_best": each["milliseconds"] / best}
        finally:
            gc.enable()
            for other in others:
                other.kill()
                other.wait()


def _calls(job: Callable[[], Any]) -> int:
    """Return the number of calls of a job that take SECONDS."""
    job()
    started = time.perf_counter()
    job()
    return max(1, round(SECONDS / (time.perf_counter() - started)))


def _on(threads: int, job: Callable[[], Any], calls: int) -> None:
    torch.set_num_threads(threads)
    for _ in range(calls):
        job()


def _verifications(vocab: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    q, p = (rows.float()[None] for rows in pair_of_rows(WIDTH + 1, vocab))
    p, ids, room = p[:, :WIDTH], torch.zeros(1, WIDTH, dtype=torch.int64), torch.full((1, 1), 0.5)
    tree = ids + torch.arange(WIDTH), torch.tensor([[-1, -1, 0, 2]])
    coins, draws = room.expand(1, WIDTH), room.expand(1, WIDTH + 1)
    for rule in map(ct.policy, SPECS):
        shared = {"coins": (coins, draws[:, 0]), "validate": False}
        yield f"verify_chain {rule.spec}", partial(ct.verify_chain, rule, q, p, ids, **shared)
        yield f"verify_block {rule.spec}", partial(ct.verify_block, rule, q, p, ids, **shared)
        shared = {"coins": (coins, draws[:, :3]), "validate": False}
        yield f"verify_tree {rule.spec}", partial(ct.verify_tree, rule, q, None, *tree, **shared)
        yield f"meter {rule.spec}", partial(metered, rule, q[0, :WIDTH], p[0])


def metered(policy: ct.Policy, q: torch.Tensor, p: torch.Tensor) -> None:
    """Charge rows as a decode does."""
    meter = Meter((policy,))
    with torch.inference_mode():
        meter.add(q, p, None)
        meter.sums()


def _closed_forms(vocab: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    q, p = pair_of_rows(1, vocab)
    for rule in map(ct.policy, SPECS):
        yield f"emitted_law {rule.spec}", partial(ct.emitted_law, rule, q, p)
    yield f"audit {rule.spec}", partial(ct.audit, rule, q, p)
    yield "optimal_acceptance kl", partial(ct.optimal_acceptance, q, p, delta=DELTA)
    yield "frontier kl", partial(ct.frontier, q, p)
    yield "selection_law", partial(ct.selection_law, q, p, k=4)


JOBS = {"verify": _verifications, "theory": _closed_forms}
