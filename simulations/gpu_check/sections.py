"""The sections of a run, what passes between a section and the report, and how one is run.

A section is a file of its name here with ``rows(bench)``, which yields what it measured: a
dictionary per row of its table, or a :class:`Note` about something skipped or failed. Add a file
and a line in ``SECTIONS``, and it has its share of the time and its table in the report.

Each runs in a process of its own, so that nothing it does can take the others along: a kernel
that reads where it may not makes a CUDA context useless for good, and a section that hangs is
stopped. What it had measured until then is kept.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch

from cactus_theory.base.files import first_line

# seconds beyond its budget after which a section is stopped; starting a process takes some
GRACE_S = 15.0
# how a process begins: afresh, since CUDA does not survive a fork
START = "spawn"
Row = dict[str, Any]
Tables = Mapping[str, Sequence[Row]]


@dataclass(frozen=True)
class Section:
    """The weight of a section when time is shared out, and what it does."""

    weight: float
    summary: str


SECTIONS = {
    "device": Section(3, "the machine: name, copy bandwidth, matmul, launch latency"),
    "agreement": Section(10, "answers on the device against float64 on the CPU"),
    "verify": Section(10, "one verification: fused kernel, torch path and floor"),
    "decode": Section(20, "whole decodes: speed, emitted KL, prediction"),
    "goals": Section(1, "each goal: measured, needed, met or not"),
}


@dataclass(frozen=True)
class Settings:
    """What the command line says; without folders of a pair, the shipped one at real sizes."""

    device: str = "cuda"
    tiny: bool = False  # the smallest sizes of everything, to rehearse the run
    seed: int = 0
    target: Path | None = None
    draft: Path | None = None
    prompts: Path | None = None  # JSON lines; with a field ``answer`` they are scored
    num_prompts: int = 8
    max_new_tokens: int = 128


@dataclass(frozen=True)
class Note:
    """Something that is not in a table: ``what`` of a section was skipped or failed, and why."""

    kind: Literal["skipped", "failed"]
    what: str
    why: str
    section: str = ""


class Budget:
    """Some seconds, counted from now on: work shrinks to fit, and what does not fit is named."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self.now = seconds, now
        self.end = now() + seconds

    @property
    def left(self) -> float:
        """Return the seconds that are left, 0 when there are none."""
        return max(0.0, self.end - self.now())

    def share(self, name: str, weights: Mapping[str, float]) -> float:
        """Return the seconds ``name`` may take of what is left, by the weights of all to come."""
        return self.left * weights[name] / sum(weights.values())


@dataclass
class Bench:
    """What a section works with: the settings, its time, the tables of the sections before."""

    settings: Settings
    budget: Budget
    tables: Tables = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return torch.device(self.settings.device)

    @property
    def tiny(self) -> bool:
        """Return whether everything has its smallest size."""
        return self.settings.tiny


Message = Row | Note
# what a section does in one go: its name, and the rows it gives
Job = tuple[str, Callable[[], Iterable[Message]]]


def load(name: str) -> Callable[[Bench], Iterator[Message]]:
    """Return the function of a section; only its own file is imported."""
    return importlib.import_module(f".{name}", __package__).rows


def section_names(names: Sequence[str]) -> list[str]:
    """Return the sections of these names, all without, in the order they run; always the goals."""
    for name in names:
        if name not in SECTIONS:
            raise ValueError(f"SECTION: must be among {', '.join(SECTIONS)}; got {name!r}")
    return [name for name in SECTIONS if not names or name in names or name == "goals"]


def in_turn(jobs: Iterable[Job], budget: Budget) -> Iterator[Message]:
    """Run jobs in order, whichever fail; name those, and those that the time is too short for."""
    for name, job in jobs:
        if not budget.left:
            yield Note("skipped", name, "out of time")
            continue
        try:
            yield from job()
        except torch.cuda.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            yield Note("skipped", name, first_line(error))
        except Exception as error:  # whatever a first run on a new machine meets
            yield Note("failed", name, f"{type(error).__name__}: {first_line(error)}")


def run_here(name: str, settings: Settings, tables: Tables, seconds: float) -> Iterator[Message]:
    """Run a section in this process and yield what it gives; an error becomes a note."""
    try:
        yield from load(name)(Bench(settings, Budget(seconds), tables))
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})"
        yield Note("failed", name, f"{type(error).__name__}: {first_line(error)}{where}")


def run_apart(
    name: str, settings: Settings, tables: Tables, seconds: float, grace: float = GRACE_S
) -> Iterator[Message]:
    """Run a section in a new process and yield what it gives as it comes.

    The process is stopped ``grace`` seconds after its time is up; that, and an end by a
    signal, becomes a note.
    """
    processes = multiprocessing.get_context(START)
    receive, send = processes.Pipe(duplex=False)
    work = (send, name, settings, tables, seconds)
    child = processes.Process(target=_child, args=work, daemon=True)
    child.start()
    send.close()  # so that the child's end is the only one
    try:
        yield from _received(receive, time.monotonic() + seconds + grace, name, seconds)
        child.join(grace)
        if child.exitcode:
            yield Note("failed", name, f"its process ended with code {child.exitcode}")
    finally:
        child.kill()
        child.join()


def _received(receive: Connection, deadline: float, name: str, seconds: float) -> Iterator[Message]:
    while receive.poll(max(0.0, deadline - time.monotonic())):
        try:
            yield receive.recv()
        except EOFError:
            return
    yield Note("failed", name, f"stopped: its {seconds:.0f} s were over")


def _child(send: Connection, name: str, settings: Settings, tables: Tables, seconds: float) -> None:
    if settings.device == "cpu":
        torch.set_num_threads(1)
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton
    for message in run_here(name, settings, tables, seconds):
        send.send(message)
    send.close()
