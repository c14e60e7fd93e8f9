"""Constant price against constant δ and Cactus in real decodes, at equal tokens per call.

Every setting decodes the same prompts with K drafted tokens. The exact meter gives the KL of
what was emitted, the decode gives tokens per target call; the least KL at as many tokens per
call is read off the constant-price settings. Intervals come from resampling prompts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from cactus_theory.decoding import load_pair

from ..common.decode import Harness
from ..common.grid import Config
from ..common.inputs import add_pair_arguments, command_line, load_prompts
from ..common.progress import Progress
from ..common.results import provenance, write_csv

OUT = Path("paper_figures/data/constant_price.csv")
# from nearly lossless to nearly the draft's own law: budgets in nats, prices in acceptance per nat
DELTAS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
PRICES = (64, 32, 16, 8, 4, 2, 1, 0.5, 0.25, 0.125, 0.0625)
SERIES: dict[str, list[str]] = {
    "band_price": [f"band:price={price:g}" for price in PRICES],
    "band_delta": [f"band:delta={delta:g}" for delta in DELTAS],
    "cactus": [f"cactus:delta={delta:g}" for delta in DELTAS],
}
# resamples of the prompts, and the percentiles of the interval
RESAMPLES = 1000
INTERVAL = (5, 95)
# per prompt: new tokens, target calls, emitted KL
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
    torch.set_num_threads(1)
    pair = load_pair(args.target, args.draft)
    prompts = load_prompts(args.prompts, args.target)
    harness = Harness(pair, prompts, args.max_new_tokens, args.seed)
    specs = [spec for own in SERIES.values() for spec in own]
    sums = {}
    with Progress("decoding", len(specs)) as progress:
        for spec in specs:
            sums[spec] = _decoded(harness, Config(spec, args.num_draft_tokens, 1), args.decodes)
            progress.advance(spec)
    rows = table(sums, np.random.default_rng(args.seed))
    notes = provenance(command_line("constant-price", add_arguments, args)) | {
        "decodes": f"{len(prompts)} prompts, {args.decodes} each, {args.max_new_tokens} new "
        f"tokens, K = {args.num_draft_tokens}, temperature 1",
        "units": "nats; kl_ratio = KL per token / that of constant price at equal tokens per call",
        "interval": f"percentiles {INTERVAL} over {RESAMPLES} resamples of the prompts",
    }
    write_csv(args.out, [{**row, "num_draft_tokens": args.num_draft_tokens} for row in rows], notes)
    for row in rows:
        if row["kl_ratio"] is not None:
            print(
                "{spec:<20} {tokens_per_call:.3f} tokens/call, {kl_per_token:.4f} nats/token, "
                "{kl_ratio:.2f}x the constant price's [{kl_ratio_low:.2f}, {kl_ratio_high:.2f}]"
                "".format(**row)
            )
    return 0


def _decoded(harness: Harness, config: Config, decodes: int) -> Sums:
    """Return the sums per prompt over its decodes."""
    sums = np.zeros((len(harness.prompts), 3))
    for number in range(len(harness.prompts)):
        for again in range(decodes):
            result = harness.decode(config, number, again=again, meter=True).result
            assert result is not None and result.meter is not None
            sums[number] += result.num_tokens, result.target_calls, result.meter.kl
    return sums


def table(sums: dict[str, Sums], generator: np.random.Generator) -> list[dict[str, Any]]:
    """Return one row per setting, with the KL ratio to constant price at equal tokens per call.

    Parameters
    ----------
    sums : spec → tokens, calls and KL of each prompt.
    generator : resamples prompts, the same ones for every setting.
    """
    count = len(next(iter(sums.values())))
    draws = generator.integers(count, size=(RESAMPLES, count))
    rows = []
    for series, specs in SERIES.items():
        for spec in specs:
            tokens, cost = _point(sums[spec])
            ratio = _ratio(sums, spec, lambda own: own)
            low = high = None
            if series != "band_price" and ratio is not None:
                resampled = [_ratio(sums, spec, lambda own, d=d: own[d]) for d in draws]
                found = [value for value in resampled if value is not None]
                low, high = np.percentile(found, INTERVAL).tolist()
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


def _point(sums: Sums) -> tuple[float, float]:
    tokens, calls, kl = sums.sum(0)
    return tokens / calls, kl / tokens


def _ratio(sums: dict[str, Sums], spec: str, chosen: Callable[[Sums], Sums]) -> float | None:
    """Return KL over constant price's at equal tokens per call; None outside its range."""
    line = sorted(_point(chosen(sums[other])) for other in SERIES["band_price"])
    tokens, cost = _point(chosen(sums[spec]))
    reached = [point[0] for point in line]
    if not reached[0] <= tokens <= reached[-1]:
        return None
    least = np.exp(np.interp(tokens, reached, np.log([point[1] for point in line])))
    return float(cost / least)
