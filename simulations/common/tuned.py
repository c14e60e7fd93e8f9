"""Tune settings on some prompts and keep them in a journal, for decodes of other prompts."""

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cactus_theory.base.specs import file_of
from cactus_theory.commands.tune import logged, timed, tune_shown
from cactus_theory.decoding import Pair
from cactus_theory.decoding.setting import Setting
from cactus_theory.decoding.truncation import Cuts
from cactus_theory.policies import read_policy
from cactus_theory.traces.estimate import valued
from cactus_theory.tuning import Costs, Prompts
from cactus_theory.tuning.report import over
from cactus_theory.tuning.tune import Choice, Measure

from .grid import Config, config_of
from .journal import Journal

Row = dict[str, Any]


def tune_all(
    args: argparse.Namespace,
    journal: Journal,
    pair: Pair,
    ids: Sequence[Sequence[int]],
    limit: int,
    *,
    cycles: int,
) -> None:
    """Tune ``args.policy`` at the levels of ``args.nats`` that the journal lacks; keep the results.

    Rows are logged and calls timed along texts of at most ``limit`` tokens, ``args.batch`` texts at
    once. Costs are measured once, at the largest level, where most families have a solved knob.
    """
    levels = {level for level in args.nats if key(level) not in journal.results}
    if not levels:
        return
    sought = {"widths": args.num_draft_tokens, "policies": args.policy}
    width, prompts = max(args.num_draft_tokens), Prompts(ids, args.batch, limit, args.seed)
    law = {"temperature": args.temperature, "cuts": Cuts(top_p=args.top_p)}
    setting = Setting(num_draft_tokens=width, **law)
    trace = logged(pair, prompts, setting, args.out / "trace", cycles)
    costs: Costs | Measure = partial(timed, pair, prompts, args.timings)
    for level in sorted(levels, reverse=True):
        tuned = tune_shown(trace, costs, sought | {"level": level})
        costs = tuned.costs
        record = {"plain": tuned.plain, "costs": vars(tuned.costs), "over": over(tuned)}
        record["lines"] = [_line(choice) for choice in tuned.choices]
        journal.add(key(level), record)


def _line(choice: Choice) -> Row:
    return {
        "family": choice.family.name,
        **choice.replay.names,
        **valued("predicted_speed", choice.speed),
        **valued("predicted_kl", choice.reported.divergence_per_token()),
    }


def key(level: float) -> str:
    return f"tuned|level={level:g}"


def config(line: Mapping[str, Any], path: Path, policies: Sequence[str]) -> Config:
    """Return the decode that a journal's line describes.

    A policy from a file is only loaded if it is among ``policies``, the flags' values.
    """
    trusted = [read_policy(name).spec for name in filter(file_of, policies)]
    return config_of(line, str(path), trusted)
