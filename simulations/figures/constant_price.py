"""Constant price against constant δ and Cactus in real decodes, at equal tokens per call.

Every setting decodes the same prompts with K drafted tokens. The exact meter gives the KL of
what was emitted, the decode gives tokens per target call; the least KL at as many tokens per
call is read off the constant-price settings. Intervals come from resampling prompts.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from cactus_theory.commands.models import opened

from ..common.decode import Harness
from ..common.grid import Config, Grid, Job, Record
from ..common.inputs import add_pair_arguments
from ..common.results import publish
from ..common.statistics import INTERVAL, RESAMPLES, interval, resamples

OUT = Path("paper_figures/data/constant_price.csv")
# nearly lossless to nearly the draft's own law: budgets in nats, prices in acceptance per nat
DELTAS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
PRICES = (64, 32, 16, 8, 4, 2, 1, 0.5, 0.25, 0.125, 0.0625)
SERIES: dict[str, list[str]] = {
    "band_price": [f"band:price={price:g}" for price in PRICES],
    "band_delta": [f"band:delta={delta:g}" for delta in DELTAS],
    "cactus": [f"cactus:delta={delta:g}" for delta in DELTAS],
}
# sums per prompt: new tokens, target calls, emitted KL in nats
Sums = Float[np.ndarray, "prompts 3"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags; the defaults made the committed table."""
    add = parser.add_argument
    add_pair_arguments(parser)
    add("--num-draft-tokens", type=int, default=4, metavar="K")
    add("--max-new-tokens", type=int, default=64, metavar="N")
    add("--decodes", type=int, default=4, help="of every prompt, each with its own seed")
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=OUT, help="the CSV")


def run(args: argparse.Namespace) -> int:
    """Decode with every setting, write the table, print what Cactus and constant δ pay."""
    pair, _, prompts = opened(args)
    harness = Harness(pair, prompts, args.max_new_tokens, args.seed)
    lines = [Config(spec, args.num_draft_tokens, 1) for specs in SERIES.values() for spec in specs]
    grid = Grid(lines, len(prompts), repeats=0, metered=args.decodes, seed=args.seed)

    def decoded(job: Job) -> Record:
        return harness.decode(job.config, job.group, repeat=job.repeat, meter=True).record

    runs = grid.runs(grid.fill(decoded))
    sums = {line.method: _sums(line_runs.metered, len(prompts)) for line, line_runs in runs.items()}
    rows = table(sums, np.random.default_rng(args.seed))
    notes = {
        "decodes": f"{len(prompts)} prompts, {args.decodes} each, {args.max_new_tokens} new "
        f"tokens, K = {args.num_draft_tokens}, temperature 1",
        "units": "nats; kl_ratio = KL per token / that of constant price at equal tokens per call",
        "interval": f"percentiles {INTERVAL} over {RESAMPLES} resamples of the prompts",
    }
    rows = [{**row, "num_draft_tokens": args.num_draft_tokens} for row in rows]
    publish(args, rows, **notes)
    for row in rows:
        if row["kl_ratio"] is not None:
            print(
                "{spec:<20} {tokens_per_call:.3f} tokens/call, {kl_per_token:.4f} nats/token, "
                "{kl_ratio:.2f}x the constant price's [{kl_ratio_low:.2f}, {kl_ratio_high:.2f}]"
                "".format(**row)
            )
    return 0


def table(sums: dict[str, Sums], generator: np.random.Generator) -> list[dict[str, Any]]:
    """Return one row per setting, with the KL ratio to constant price at equal tokens per call.

    ``sums`` are by spec; prompts are resampled, the same ones for every setting.
    """
    draws = resamples(len(next(iter(sums.values()))), generator)
    rows = []
    for series, specs in SERIES.items():
        for spec in specs:
            tokens, cost = _point(sums[spec])
            ratio = _ratio(sums, spec, slice(None))
            low = high = None
            if series != "band_price" and ratio is not None:
                ratios = [_ratio(sums, spec, draw) for draw in draws]
                low, high = interval([value for value in ratios if value is not None])
            rows.append(
                {
                    "series": series,
                    "spec": spec,
                    "tokens_per_call": tokens,
                    "kl_per_token": cost,
                    "kl_ratio": None if series == "band_price" else ratio,
                    "kl_ratio_low": low,
                    "kl_ratio_high": high,
                    "tokens": int(sums[spec][:, 0].sum()),
                }
            )
    return rows


def _sums(records: Sequence[Record], prompts: int) -> Sums:
    parts = [[record[name] for name in ("tokens", "target_calls", "kl")] for record in records]
    return np.reshape(parts, (-1, prompts, 3)).sum(0)


def _point(sums: Sums) -> tuple[float, float]:
    tokens, calls, kl = sums.sum(0)
    return tokens / calls, kl / tokens


def _ratio(sums: dict[str, Sums], spec: str, draw: Any) -> float | None:
    """Return KL over constant price's at equal tokens per call; None outside its range.

    ``draw`` indexes prompts.
    """
    curve = sorted(_point(sums[priced][draw]) for priced in SERIES["band_price"])
    tokens_per_call, costs = zip(*curve, strict=True)
    tokens, cost = _point(sums[spec][draw])
    if not tokens_per_call[0] <= tokens <= tokens_per_call[-1]:
        return None
    least = np.exp(np.interp(tokens, tokens_per_call, np.log(costs)))
    return float(cost / least)
