"""The machine: what it is, how fast it copies and multiplies, what a launch costs.

And how jobs are timed on it: data out of the caches, in turn, captured where that works.
"""

from __future__ import annotations

import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cactus_theory.decoding.device.round import Repeated, never_waits

from ..common.results import package_version
from .sections import Bench, Job, Message, Row, in_turn

# bytes copied, and the side of the square matrices multiplied
COPIED, TINY_COPIED = 2**30, 2**23
SIDE, TINY_SIDE = 8192, 128
SECONDS = 2.0
PACKAGES = ("torch", "triton", "transformers", "numpy")
# quantity that nvidia-smi knows: its unit
DRIVER = {
    "driver_version": "",
    "clocks.sm": "MHz",
    "clocks.mem": "MHz",
    "clocks.max.sm": "MHz",
    "power.limit": "W",
}
BANDWIDTH = "copy bandwidth"
LAUNCHES = 200
# a buffer larger than any cache of the device is read before every timed call: what a write
# leaves behind would have to be written back while the call is timed
FLUSH_BYTES = 256 * 2**20
FEWEST, MOST = 3, 50
WARM_UPS = 3
Work = Callable[[], Any]


def rows(bench: Bench) -> Iterator[Message]:
    """Yield quantity, value, unit."""
    jobs: list[Job] = [
        ("names and versions", lambda: _named(bench.device)),
        (BANDWIDTH, lambda: [_fact(BANDWIDTH, copy_bandwidth(bench), "GB/s")]),
        ("matmul", lambda: [_fact("matmul, bfloat16", _teraflops(bench), "TFLOP/s")]),
        ("launch", lambda: _launches(bench.device)),
    ]
    yield from in_turn(jobs, bench.budget)


def bandwidth(bench: Bench) -> float:
    """Return the copy bandwidth, GB/s: as measured before, or measured now."""
    for row in bench.tables.get("device", ()):
        if row["quantity"] == BANDWIDTH:
            return row["value"]
    return copy_bandwidth(bench)


def copy_bandwidth(bench: Bench) -> float:
    """Return GB/s of one large copy within the device, bytes read and bytes written counted."""
    count = TINY_COPIED if bench.tiny else COPIED
    source = torch.zeros(count, dtype=torch.int8, device=bench.device)
    sink = torch.empty_like(source)
    timing = timed(lambda: sink.copy_(source), bench.device, SECONDS if not bench.tiny else 0.1)
    return 2 * count / timing.microseconds / 1e3


def _teraflops(bench: Bench) -> float:
    side = TINY_SIDE if bench.tiny else SIDE
    a, b = (torch.randn(side, side, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    timing = timed(lambda: a @ b, bench.device, SECONDS if not bench.tiny else 0.1)
    return 2 * side**3 / timing.microseconds / 1e6


def _launches(device: torch.device) -> Iterator[Row]:
    """Yield the time of a small kernel in a row of many, and of one that is waited for."""
    number = torch.zeros(1, device=device)
    for name, waits in (("launch of a small kernel", False), ("launch and wait", True)):
        number.add_(1)
        wait(device)
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            number.add_(1)
            if waits:
                wait(device)
        wait(device)
        yield _fact(name, 1e6 * (time.perf_counter() - start) / LAUNCHES, "µs")


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _named(device: torch.device) -> Iterator[Row]:
    yield _fact("device", device_name(device))
    if device.type == "cuda":
        about: Any = torch.cuda.get_device_properties(device)
        yield _fact("memory", about.total_memory / 2**30, "GiB")
        yield _fact("multiprocessors", about.multi_processor_count)
        yield _fact("compute capability", f"{about.major}.{about.minor}")
        yield _fact("CUDA of torch", str(torch.version.cuda))
        yield from _of_driver(device.index or 0)
    yield _fact("python", platform.python_version())
    for package in PACKAGES:
        yield _fact(package, package_version(package) or "not there")


def device_name(device: torch.device) -> str:
    """Return the device's name; on a CPU it says that this is a rehearsal."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu (rehearsal)"


def _of_driver(index: int) -> Iterator[Row]:
    """Yield what nvidia-smi says, if it is there."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return
    query = [tool, f"--id={index}", f"--query-gpu={','.join(DRIVER)}"]
    answer = subprocess.run(
        [*query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=20
    )
    if answer.returncode == 0:
        for (name, unit), value in zip(DRIVER.items(), answer.stdout.split(","), strict=False):
            yield _fact(name, value.strip(), unit)


def _fact(quantity: str, value: Any, unit: str = "") -> Row:
    return {"quantity": quantity, "value": value, "unit": unit}


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
