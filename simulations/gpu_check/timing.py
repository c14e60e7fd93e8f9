"""Microseconds of jobs on a device: data out of the caches, in turn, captured where that works."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cactus_theory.decoding.device.capture import never_waits

# a buffer larger than any cache of the device is read before every timed call: what a write
# leaves behind would have to be written back while the call is timed
FLUSH_BYTES = 256 * 2**20
FEWEST, MOST = 3, 50
WARM_UPS = 3
Work = Callable[[], Any]


@dataclass(frozen=True)
class Timing:
    """Microseconds of calls: their median, tenths from both ends; how many, and if by a graph."""

    microseconds: float
    low: float
    high: float
    repeats: int
    graph: bool = False


def timed(job: Work, device: torch.device, seconds: float) -> Timing:
    """Time one job; see :func:`interleaved`."""
    return interleaved({"": job}, device, seconds)[""]


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
    return {name: _timing(own, graphs[name] is not None) for name, own in times.items()}


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
        started = time.perf_counter()
        job()
        return 1e6 * (time.perf_counter() - started)

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
    before, aside = torch.cuda.current_stream(), torch.cuda.Stream()
    aside.wait_stream(before)
    with torch.cuda.stream(aside):
        job()
    before.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        job()
    return graph.replay
