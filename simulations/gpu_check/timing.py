"""Microseconds of a job on a device: its data out of the caches, captured where that works."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# a buffer larger than any cache of the device is overwritten before every timed call
FLUSH_BYTES = 256 * 2**20
FEWEST, MOST = 3, 50
WARM_UPS = 3
Work = Callable[[], Any]


@dataclass(frozen=True)
class Timing:
    """Median microseconds, of how many calls, and whether they replayed a CUDA graph."""

    microseconds: float
    repeats: int
    graph: bool = False


def timed(job: Work, device: torch.device, seconds: float, *, capture: bool = True) -> Timing:
    """Time a job: ``FEWEST`` calls (a CPU: one), more while ``seconds`` last, at most ``MOST``.

    On CUDA the device's own clock counts (events), from the first kernel of a call to its last,
    host gaps between them included. The first calls pay for memory and compilation untimed.
    """
    with torch.inference_mode():
        for _ in range(WARM_UPS if device.type == "cuda" else 1):
            job()
        replay = captured(job) if capture and device.type == "cuda" else None
        if device.type != "cuda":  # a rehearsal: a kernel that is interpreted takes a second
            return Timing(*_median(_by_clock(job), seconds, fewest=1))
        once = _by_events(replay or job, device)
        return Timing(*_median(once, seconds, FEWEST), graph=replay is not None)


def _median(once: Callable[[], float], seconds: float, fewest: int) -> tuple[float, int]:
    until, times = time.monotonic() + seconds, []
    while len(times) < fewest or (len(times) < MOST and time.monotonic() < until):
        times.append(once())
    return statistics.median(times), len(times)


def _by_clock(job: Work) -> Callable[[], float]:
    def once() -> float:
        started = time.perf_counter()
        job()
        return 1e6 * (time.perf_counter() - started)

    return once


def _by_events(job: Work, device: torch.device) -> Callable[[], float]:
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def once() -> float:
        flush.zero_()  # also keeps the device busy while the call is being launched
        start.record()
        job()
        end.record()
        end.synchronize()
        return 1e3 * start.elapsed_time(end)

    return once


def captured(job: Work) -> Work | None:
    """Return the replay of a CUDA graph of the job, None for a job that cannot be captured."""
    before = torch.cuda.current_stream()
    aside = torch.cuda.Stream()
    aside.wait_stream(before)
    with torch.cuda.stream(aside):
        job()
    before.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            job()
        return graph.replay
    except RuntimeError:  # a job that reads on the host
        torch.cuda.set_stream(before)  # a failed capture leaves its own stream behind
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize()
        return None
