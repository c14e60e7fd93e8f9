"""A policy and a verifier on a trace of logged rows: exact, nothing is sampled."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import lru_cache

from cactus_theory.traces import Trace, replay

from ...replay import alone
from ..task import MANIFEST, Row, Task, known, local, task

FLAGS = ("trace",)


def tasks(args: argparse.Namespace, cells: Sequence[tuple[str, str]]) -> Iterator[Task]:
    """Yield a task per trace, cell and K.

    Raises
    ------
    OSError, ValueError
        A trace that cannot be read, more drafted tokens than it logged.
    """
    for folder in args.trace:
        trace = Trace.open(folder)
        for width in args.num_draft_tokens:
            if width > trace.num_draft_tokens:
                raise ValueError(
                    f"--num-draft-tokens: must be at most the {trace.num_draft_tokens} that "
                    f"{trace.name} logged; got {width}"
                )
        files = known({"trace": trace.folder})
        for policy, verifier in cells:
            for width in args.num_draft_tokens:
                case = {"trace": trace.name, "verifier": verifier, "num_draft_tokens": width}
                yield task("replay", policy, case, files=files)


def measure(own: Task) -> list[Row]:
    """Return tokens and emitted KL per call and per token, with errors over texts."""
    trace = _opened(str(own.path("trace")), own.files["trace"][1])
    width = own.case["num_draft_tokens"]
    found = replay(trace, local(own.policy), own.case["verifier"], num_draft_tokens=width)
    return [dict(own.case) | alone(found, "kl")]


@lru_cache(maxsize=4)
def _opened(folder: str, digest: str) -> Trace:
    """Return a trace, each of whose files is then checked once by each worker."""
    return Trace.open(f"{folder}/{MANIFEST}")
