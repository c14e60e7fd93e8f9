"""Run a section in a process of its own, so that nothing it does can take the others along.

A kernel that reads where it may not makes a CUDA context useless for good; a section that hangs
is stopped. What it had measured until then is kept.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection

import torch

from .budget import Budget
from .sections import Bench, Message, Note, Row, Settings, first_line, load

# seconds beyond its budget after which a section is stopped; starting a process takes some
GRACE_S = 15.0
# how a process begins: afresh, since CUDA does not survive a fork
START = "spawn"
Tables = Mapping[str, Sequence[Row]]


def run_here(name: str, settings: Settings, before: Tables, seconds: float) -> Iterator[Message]:
    """Run a section in this process and yield what it gives; an error becomes a note."""
    try:
        yield from load(name)(Bench(settings, Budget(seconds), before))
    except Exception as error:
        yield Note("failed", name, f"{type(error).__name__}: {first_line(error)}{_place(error)}")


def run_apart(
    name: str, settings: Settings, before: Tables, seconds: float, grace: float = GRACE_S
) -> Iterator[Message]:
    """Run a section in a new process and yield what it gives as it comes.

    The process is stopped ``grace`` seconds after its time is up; that, and an end by a
    signal, becomes a note.
    """
    processes = multiprocessing.get_context(START)
    receive, send = processes.Pipe(duplex=False)
    work = (send, name, settings, before, seconds)
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


def _child(send: Connection, name: str, settings: Settings, before: Tables, seconds: float) -> None:
    if settings.device == "cpu":
        torch.set_num_threads(1)
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton
    for message in run_here(name, settings, before, seconds):
        send.send(message)
    send.close()


def _place(error: BaseException) -> str:
    """Return where an error was raised: the file's name and the line."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
