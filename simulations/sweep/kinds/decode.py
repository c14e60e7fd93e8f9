"""Real decodes of a pair of models, metered: every prompt once with each seed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from cactus_theory.decoding import GenerationResult, load_pair

from ...common.decode import Harness
from ...common.grid import Config
from ...common.inputs import prompts_of
from ..task import Row, Task, known, local, task

FLAGS = ("seeds", "target", "draft", "prompts", "num_prompts", "max_new_tokens")


def tasks(args: argparse.Namespace, cells: Sequence[tuple[str, str]]) -> Iterator[Task]:
    """Yield a task per pair, cell, K and seed.

    Raises
    ------
    OSError, ValueError
        Targets and drafts that do not go in pairs, prompts that cannot be read.
    """
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
        files = known({"target": target, "draft": draft, "prompts": args.prompts})
        for policy, verifier in cells:
            for width in args.num_draft_tokens:
                for seed in args.seeds:
                    case = {"target": target.name, "draft": draft.name, "verifier": verifier,
                            "num_draft_tokens": width, "seed": seed}  # fmt: skip
                    yield task("decode", policy, case, settings, files)


def measure(own: Task) -> list[Row]:
    """Return tokens, calls and emitted KL, summed over the prompts."""
    case, settings = dict(own.case), own.settings
    folders = str(own.path("target")), str(own.path("draft"))
    pair = _loaded(*folders, own.files["target"][1], own.files["draft"][1])
    texts = prompts_of(own.path("prompts"))[: settings["num_prompts"]]
    ids = [pair.tokenizer(text)["input_ids"] for text in texts]
    harness = Harness(pair, ids, settings["max_new_tokens"], seed=0)
    config = Config(local(own.policy), case["num_draft_tokens"], 1, case["verifier"])
    found = []
    for group in range(len(ids)):
        done = harness.decode(config, group, again=case["seed"], meter=True)
        assert done.result is not None  # only decodes of the library have none
        found.append(done.result)
    return [case | _sums(found)]


def _sums(found: Sequence[GenerationResult]) -> Row:
    tokens, calls = (
        sum(getattr(own, name) for own in found) for name in ("num_tokens", "row_calls")
    )
    accepted = sum(own.num_accepted for own in found)
    meters = [own.meter for own in found if own.meter is not None]
    return {
        "tokens": tokens,
        "target_calls": calls,
        "tokens_per_call": tokens / calls,
        "accepted_per_call": accepted / calls,
        "kl_per_token": sum(meter.kl for meter in meters) / tokens,
        "largest_row_kl": max(meter.largest_row_kl for meter in meters),
    }


@lru_cache(maxsize=2)
def _loaded(target: str, draft: str, *digests: str) -> Any:
    return load_pair(Path(target), Path(draft))
