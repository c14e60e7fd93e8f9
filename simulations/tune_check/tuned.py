"""Tune once a level and batch size, and keep what was predicted in the journal."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cactus_theory.decoding import Pair
from cactus_theory.traces import Trace, log_trace
from cactus_theory.tuning import Costs, Prompts, Setting, Tuned, measure_costs, tune
from cactus_theory.tuning.tune import Choice

from ..common.journal import Journal
from ..common.progress import Progress

JOURNAL = "journal.jsonl"


def key(batch: int, level: float) -> str:
    """Return the name under which a result of tuning is kept."""
    return f"tuned|batch={batch}|level={level:g}"


def fill(
    args: argparse.Namespace, journal: Journal, pair: Pair, ids: Sequence[Sequence[int]]
) -> None:
    """Tune for every level and batch size, unless all of it is in the journal."""
    wanted = [(batch, level) for level in args.kl_per_token for batch in args.batch]
    if all(key(*own) in journal.results for own in wanted):
        return
    trace, clock = _trace(args, pair, ids), _Clock(args, pair, ids)
    with Progress("tuning, levels", len(args.kl_per_token)) as progress:
        for level in args.kl_per_token:
            values = args.out / f"values-{level:g}.json"
            first = tune(
                trace,
                lambda settings: clock.costs(args.batch[0], settings),
                level,
                widths=args.num_draft_tokens,
                policies=args.policies,
                values=values,
            )
            for batch in args.batch:
                own = first.at_costs(clock.costs(batch))
                if key(batch, level) not in journal.results:
                    journal.add(key(batch, level), _kept(own))
            progress.advance()


@dataclass
class _Clock:
    """Costs by batch size, measured once at the first level's knobs."""

    args: argparse.Namespace
    pair: Pair
    ids: Sequence[Sequence[int]]
    settings: list[Setting] = field(default_factory=list)
    known: dict[int, Costs] = field(default_factory=dict)

    def costs(self, batch: int, settings: Sequence[Setting] = ()) -> Costs:
        self.settings = self.settings or list(settings)
        if batch not in self.known:
            args, target = self.args, self.pair.target
            ends = target.generation_config.eos_token_id
            prompts = Prompts(self.ids, batch, args.max_new_tokens, 1.0, ends, args.seed)
            with Progress(f"timing decodes, batch {batch}", 1) as progress:

                def on_decode(done: int, total: int) -> None:
                    progress.total = total
                    progress.update(done)

                self.known[batch] = measure_costs(
                    target, self.pair.draft, prompts, self.settings, on_decode=on_decode
                )
        return self.known[batch]


def _trace(args: argparse.Namespace, pair: Pair, ids: Sequence[Sequence[int]]) -> Trace:
    with Progress("logging cycles", args.cycles) as progress:
        return log_trace(
            pair.target,
            pair.draft,
            ids,
            args.out / "trace",
            num_draft_tokens=max(args.num_draft_tokens),
            max_new_tokens=args.max_new_tokens,
            cycles=args.cycles,
            eos_token_ids=pair.target.generation_config.eos_token_id,
            seed=args.seed,
            on_text=lambda done, own: progress.update(min(done, args.cycles), f"{own} texts"),
        )


def _kept(own: Tuned) -> dict[str, Any]:
    """Return what the journal keeps: all lines, and which one is chosen, −1 for plain decoding."""
    ratios = own.costs.as_ratios()
    alone = own.at_costs(Costs.ratios(**ratios, batch=own.costs.batch))
    places = {_name(choice): place for place, choice in enumerate(own.choices)}
    return {
        "plain": own.plain,
        "costs": own.costs.as_json() | {"ratios": ratios},
        "lines": [_line(choice) for choice in own.choices],
        "chosen": -1 if own.best is None else places[_name(own.best)],
        "chosen_by_ratios": -1 if alone.best is None else places[_name(alone.best)],
    }


def _name(own: Choice) -> tuple[str, int]:
    return own.family.key, own.num_draft_tokens


def _line(own: Choice) -> dict[str, Any]:
    meter, calls = own.replay.divergence_per_token(), own.replay.tokens_per_call
    values = "" if own.values is None else f",values={own.values.name}"
    return {
        "family": own.family.name,
        "policy": own.policy + values,
        "verifier": own.verifier,
        "num_draft_tokens": own.num_draft_tokens,
        "speed": own.speed.value,
        "speed_se": own.speed.standard_error,
        "tokens_per_call": calls.value,
        "kl": meter.value,
        "kl_se": meter.standard_error,
    }
