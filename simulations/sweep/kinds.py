"""Kinds of tasks: which tasks a grid has, which rows a task; and how a worker runs one."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cactus_theory.decoding import load_pair
from cactus_theory.traces import Trace, replay

from ..common.decode import Harness
from ..common.grid import Config, total
from ..common.inputs import code_digest, prompts_of
from ..common.results import package_version
from ..markov import Setting, markov_pair, measured
from ..replay import replay_figures
from .tasks import MANIFEST, Row, Task, file_digests, task_of

Cells = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Kind:
    """What a kind is: the flags that only it reads, its tasks, the rows of a task.

    ``tasks`` are those of cells (policy, verifier), and raise for flags that would make them
    fail. ``measure`` returns the same whenever and wherever it is called; its rows begin with the
    task's own columns.
    """

    flags: tuple[str, ...]
    tasks: Callable[[argparse.Namespace, Cells], Iterator[Task]]
    measure: Callable[[Task], list[Row]]


def _replays(args: argparse.Namespace, cells: Cells) -> Iterator[Task]:
    """Yield a task per trace, cell and K."""
    for folder in args.trace:
        trace = Trace.open(folder)
        for width in args.num_draft_tokens:
            if width > trace.num_draft_tokens:
                raise ValueError(
                    f"--num-draft-tokens: must be at most the {trace.num_draft_tokens} that "
                    f"{trace.name} logged; got {width}"
                )
        files = file_digests({"trace": trace.folder})
        for policy, verifier in cells:
            for width in args.num_draft_tokens:
                case = {"trace": trace.name, "verifier": verifier, "num_draft_tokens": width}
                yield task_of("replay", policy, case, files=files)


def _replayed(task: Task) -> list[Row]:
    """Return tokens and emitted KL per call and per token, with errors over texts."""
    trace = _trace(str(task.path("trace")), task.files["trace"][1])
    width = task.case["num_draft_tokens"]
    result = replay(trace, task.policy, task.case["verifier"], num_draft_tokens=width)
    return [dict(task.case) | replay_figures(result, "kl")]


@lru_cache(maxsize=4)
def _trace(folder: str, digest: str) -> Trace:
    """Return a trace, each of whose files is then checked once by each worker."""
    return Trace.open(f"{folder}/{MANIFEST}")


def _enumerations(args: argparse.Namespace, cells: Cells) -> Iterator[Task]:
    """Yield a task per pair (distance and seed), cell and K."""
    for distance in args.distance:
        for seed in args.seeds:
            pair = markov_pair(args.vocab, seed=seed, distance=distance)
            for policy, verifier in cells:
                for width in args.num_draft_tokens:
                    Setting(policy, width, args.length, verifier).check(pair)
                    case = {"verifier": verifier, "num_draft_tokens": width, "vocab": args.vocab,
                            "length": args.length, "distance": distance, "seed": seed}  # fmt: skip
                    yield task_of("markov", policy, case)


def _enumerated(task: Task) -> list[Row]:
    """Return the KL of the text, the meter that bounds it, and tokens per call."""
    case = dict(task.case)
    pair = markov_pair(case["vocab"], seed=case["seed"], distance=case["distance"])
    setting = Setting(task.policy, case["num_draft_tokens"], case["length"], case["verifier"])
    return [case | measured(pair, setting)]


def _decodes(args: argparse.Namespace, cells: Cells) -> Iterator[Task]:
    """Yield a task per pair, cell, K and seed."""
    if len(args.target) != len(args.draft):
        raise ValueError(
            f"--draft: must be one per --target, {len(args.target)}; got {len(args.draft)}"
        )
    prompts_of(args.prompts)
    settings = {"num_prompts": args.num_prompts, "max_new_tokens": args.max_new_tokens}
    for target, draft in zip(args.target, args.draft, strict=True):
        for name, folder in (("target", target), ("draft", draft)):
            if not (folder / "config.json").is_file():
                raise ValueError(f"--{name}: must be the folder of a model; got {folder}")
        files = file_digests({"target": target, "draft": draft, "prompts": args.prompts})
        for policy, verifier in cells:
            for width in args.num_draft_tokens:
                for seed in args.seeds:
                    case = {"target": target.name, "draft": draft.name, "verifier": verifier,
                            "num_draft_tokens": width, "seed": seed}  # fmt: skip
                    yield task_of("decode", policy, case, settings, files)


def _decoded(task: Task) -> list[Row]:
    """Return tokens, calls and emitted KL, summed over the prompts."""
    case, settings = dict(task.case), task.settings
    folders = str(task.path("target")), str(task.path("draft"))
    pair = _pair(*folders, task.files["target"][1], task.files["draft"][1])
    texts = prompts_of(task.path("prompts"))[: settings["num_prompts"]]
    ids = [pair.tokenizer(text)["input_ids"] for text in texts]
    harness = Harness(pair, ids, settings["max_new_tokens"], seed=0)
    config = Config(task.policy, case["num_draft_tokens"], 1, case["verifier"])
    records = [
        harness.decode(config, group, repeat=case["seed"], meter=True).record
        for group in range(len(ids))
    ]
    tokens, calls = total(records, "tokens"), total(records, "row_calls")
    figures = {
        "tokens": tokens,
        "target_calls": calls,
        "tokens_per_call": tokens / calls,
        "accepted_per_call": total(records, "accepted") / calls,
        "kl_per_token": total(records, "kl") / tokens,
        "largest_row_kl": max(record["largest_row_kl"] for record in records),
    }
    return [case | figures]


@lru_cache(maxsize=2)
def _pair(target: str, draft: str, *digests: str) -> Any:
    return load_pair(Path(target), Path(draft))


KINDS = {
    # a policy and a verifier on a trace of logged rows: exact, nothing is sampled
    "replay": Kind(("trace",), _replays, _replayed),
    # whole texts of a tiny random Markov pair, enumerated: exact
    "markov": Kind(("seeds", "vocab", "length", "distance"), _enumerations, _enumerated),
    # real decodes of a pair of models, metered: every prompt once with each seed
    "decode": Kind(
        ("seeds", "target", "draft", "prompts", "num_prompts", "max_new_tokens"),
        _decodes,
        _decoded,
    ),
}

# the code that decides what a task's rows are
CODE = (
    *("cactus_theory/**/*.py", "simulations/replay.py"),
    *(f"simulations/{name}/*.py" for name in ("common", "markov", "sweep")),
)
# threads of one worker share models and their buffers
_turn = threading.Lock()
# rows of a task, or in one line how it failed
Outcome = dict[str, Any]


def perform(task: Task, planned: Mapping[str, str | None]) -> Outcome:
    """Return ``rows`` of a task, or its ``error``; on one thread of torch.

    It fails where code or versions are not those that the sweep was planned with.
    """
    try:
        with _turn:
            torch.set_num_threads(1)  # of this thread: OpenMP counts them by thread
            _check_release(planned)
            for name in task.files:
                task.path(name)
            return {"rows": KINDS[task.kind].measure(task)}
    except Exception as error:  # whatever it is: the other tasks go on
        return {"error": " ".join(f"{type(error).__name__}: {error}".split())}


def _check_release(planned: Mapping[str, str | None]) -> None:
    for name, here in release().items():
        if planned[name] != here:
            raise RuntimeError(
                f"every worker must have the same {name} as the command; the command has "
                f"{planned[name]}, a worker {here} (restart workers after a change)"
            )


@lru_cache(maxsize=1)
def release() -> dict[str, str | None]:
    """Return versions and a digest of the code, as they were when first asked for."""
    return {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "transformers": package_version("transformers"),
        "code": code_digest(*CODE),
    }
