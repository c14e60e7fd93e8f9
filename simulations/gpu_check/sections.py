"""The sections of a run, and what passes between a section and the report.

A section is a file here with ``rows(bench)``, which yields what it measured: a dictionary per
row of its table, or a :class:`Note` about something skipped or failed. Add a file and a line in
``SECTIONS``, and it has its share of the time and its table in the report.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from .budget import Budget

Row = dict[str, Any]


@dataclass(frozen=True)
class Section:
    """Where a section's code is, its weight when time is shared out, and what it does."""

    module: str
    weight: float
    summary: str


SECTIONS = {
    "device": Section("device", 3, "the machine: name, copy bandwidth, matmul, launch latency"),
    "agreement": Section("agreement", 10, "answers on the device against float64 on the CPU"),
    "verify": Section("verify", 10, "one verification: fused kernel, torch path and floor"),
    "decode": Section("decoding", 20, "whole decodes: speed, emitted KL, prediction"),
    "goals": Section("goals", 1, "each goal: measured, needed, met or not"),
}


@dataclass(frozen=True)
class Settings:
    """What the command line says.

    Attributes
    ----------
    device : as torch names it.
    tiny : the smallest sizes of everything, to rehearse the run.
    seed : of all random numbers.
    target, draft : folders of a pair to decode with; None for the shipped pair at real sizes.
    prompts : JSON lines to decode, with answers if there is an ``answer`` field.
    num_prompts, max_new_tokens : how much of them, with folders given.
    """

    device: str = "cuda"
    tiny: bool = False
    seed: int = 0
    target: Path | None = None
    draft: Path | None = None
    prompts: Path | None = None
    num_prompts: int = 8
    max_new_tokens: int = 128


@dataclass(frozen=True)
class Note:
    """Something that is not in a table: ``what`` of a section was skipped or failed, and why."""

    kind: Literal["skipped", "failed"]
    what: str
    why: str
    section: str = ""


@dataclass
class Bench:
    """What a section works with: the settings, its time, the tables of the sections before."""

    settings: Settings
    budget: Budget
    before: Mapping[str, Sequence[Row]] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Return the device."""
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
    return importlib.import_module(f".{SECTIONS[name].module}", __package__).rows


def chosen(names: Sequence[str]) -> list[str]:
    """Return the sections named, all if none is, in the order they run; the goals always do.

    Raises
    ------
    ValueError
        A name that no section has.
    """
    for name in names:
        if name not in SECTIONS:
            raise ValueError(f"SECTION: must be among {', '.join(SECTIONS)}; got {name!r}")
    return [name for name in SECTIONS if not names or name in names or name == "goals"]


def in_turn(jobs: Iterable[Job], budget: Budget) -> Iterator[Message]:
    """Run jobs in order; name those the time is too short for, and those that fail.

    A failing job does not keep the next ones from running.
    """
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


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text."""
    return (str(error).splitlines() or [""])[0]


def optional(module: str, name: str) -> Callable[..., Any] | None:
    """Return a function of a module, None where this checkout has no such module."""
    if importlib.util.find_spec(module) is None:
        return None
    return getattr(importlib.import_module(module), name)
