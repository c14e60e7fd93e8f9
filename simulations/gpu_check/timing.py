"""How jobs are timed on a device: data out of the caches, in turn, captured where that works."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from cactus_theory.decoding.device.round import Repeated, never_waits

Row = dict[str, Any]
Work = Callable[[], Any]
# what is measured in one go: its name, and the rows it gives
Job = tuple[str, Callable[[], list[Row]]]
# bytes copied
COPIED, TINY_COPIED = 2**30, 2**23
SECONDS, TINY_SECONDS = 2.0, 0.1
# a buffer larger than any cache of the device is read before every timed call: what a write
# leaves behind would have to be written back while the call is timed
FLUSH_BYTES = 256 * 2**20
FEWEST, MOST = 3, 50
WARM_UPS = 3


@dataclass
class Bench:
    """What a part works with: the device, its copy bandwidth in GB/s, the tables before it."""

    device: torch.device
    tiny: bool = False  # the smallest sizes of everything, to rehearse the run
    seed: int = 0
    bandwidth: float = 1.0
    tables: dict[str, list[Row]] = field(default_factory=dict)


def copy_bandwidth(device: torch.device, tiny: bool) -> float:
    """Return GB/s of one large copy within the device, bytes read and bytes written counted."""
    count = TINY_COPIED if tiny else COPIED
    source = torch.zeros(count, dtype=torch.int8, device=device)
    sink = torch.empty_like(source)
    works: dict[str, Work] = {"copy": lambda: sink.copy_(source)}
    timing = interleaved(works, device, TINY_SECONDS if tiny else SECONDS)["copy"]
    return 2 * count / timing.microseconds / 1e3


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Timing:
    """Microseconds of calls: their median, tenths from both ends; how many, and if by a graph."""

    microseconds: float
    low: float
    high: float
    repeats: int
    graph: bool = False


def interleaved(
    jobs: Mapping[str, Work], device: torch.device, seconds: float, between: Work | None = None
) -> dict[str, Timing]:
    """Time jobs in turn: ``FEWEST`` rounds (a CPU: one), at most ``MOST`` in ``seconds`` a job.

    On CUDA the device's own clock counts (events), from the first kernel of a call to its last,
    host gaps between them included. The first calls pay for memory and compilation untimed.
    ``between`` runs after every round, and changes what the time depends on: random numbers.
    """
    cuda = device.type == "cuda"
    with torch.inference_mode():
        graphs = {name: _warmed(job, device) for name, job in jobs.items()}
        works = {name: graphs[name] or job for name, job in jobs.items()}
        clocks = {
            name: _by_events(work, device) if cuda else _by_clock(work)
            for name, work in works.items()
        }
        # a rehearsal measures once: a kernel that is interpreted takes a second
        rounds, fewest = 0, FEWEST if cuda else 1
        until = time.monotonic() + seconds * len(jobs)
        times: dict[str, list[float]] = {name: [] for name in jobs}
        while rounds < fewest or (rounds < MOST and time.monotonic() < until):
            for name, clock in clocks.items():
                times[name].append(clock())
            rounds += 1
            if between is not None:
                between()
    return {name: _timing(samples, graphs[name] is not None) for name, samples in times.items()}


def _timing(times: list[float], graph: bool) -> Timing:
    tenths = statistics.quantiles(times, n=10, method="inclusive") if len(times) > 1 else times
    return Timing(statistics.median(times), tenths[0], tenths[-1], len(times), graph)


def _warmed(job: Work, device: torch.device) -> Work | None:
    """Run a job for its first times; return the replay of its graph, None where it has none."""
    for _ in range(WARM_UPS if device.type == "cuda" else 1):
        job()
    return captured(job, device) if device.type == "cuda" else None


def _by_clock(job: Work) -> Callable[[], float]:
    def once() -> float:
        start = time.perf_counter()
        job()
        return 1e6 * (time.perf_counter() - start)

    return once


def _by_events(job: Work, device: torch.device) -> Callable[[], float]:
    flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.float32, device=device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def once() -> float:
        torch.amax(flush)  # also keeps the device busy while the call is being launched
        start.record()
        job()
        end.record()
        end.synchronize()
        return 1e3 * start.elapsed_time(end)

    return once


def captured(job: Work, device: torch.device) -> Work | None:
    """Return the replay of a CUDA graph of the job, None for a job that waits for the device.

    Such a job is not captured to see it fail: what a failed capture holds is never freed.
    """
    if not never_waits(job, device):
        return None
    graph = Repeated(lambda end: job(), device)
    graph.prepare(0)
    return lambda: graph(0)
