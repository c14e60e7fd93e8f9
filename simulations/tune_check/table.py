"""Predicted beside measured, a line per setting, and how good the choices were."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cactus_theory.policies._registry import policy, policy_of_data
from cactus_theory.verify.registry import registered_verifier

from ..common.grid import PLAIN, Config, Runs, label, own_file
from ..common.statistics import Draws, resamples, spread
from ..common.terminal import fitted, width_of_terminal

JOURNAL = "journal.jsonl"
Row = dict[str, Any]
WIDEST = 120
# what a setting may meter above the level and still count as within it
WITHIN = 1.1


def key(batch: int, level: float) -> str:
    """Return the name under which a result of tuning is kept."""
    return f"tuned|batch={batch}|level={level:g}"


def config(args: argparse.Namespace, line: Mapping[str, Any], batch: int) -> Config:
    """Return the decode of a line of a tuned table.

    Raises
    ------
    ValueError
        A policy of a file that ``--policies`` does not name: the journal is data.
    """
    spec, written = line["policy"], filter(own_file, args.policies or ())
    asked = spec in {policy(own).spec for own in written}
    method = spec if asked else policy_of_data(spec, args.out / JOURNAL).spec
    judge = registered_verifier(line["verifier"])
    return Config(method, line["num_draft_tokens"], batch, judge.spec)


def rows(
    args: argparse.Namespace, results: Mapping[str, Any], runs: Mapping[Config, Runs]
) -> list[Row]:
    """Return one row per batch size, level and setting; plain decoding first."""
    draws = resamples(args.repeats, args.seed)
    measured = {line: _measured(own, draws) for line, own in runs.items()}
    found = []
    for batch in args.batch:
        for level in args.kl_per_token:
            own = results[key(batch, level)]
            place = {"batch": batch, "level": level}
            plain = {
                "family": PLAIN, "policy": PLAIN, "verifier": "", "num_draft_tokens": 0,
                "speed": own["plain"], "speed_se": 0.0, "tokens_per_call": 1.0, "kl": 0.0,
                "kl_se": 0.0,
            }  # fmt: skip
            made = [place | _row(plain, measured[Config(PLAIN, 0, batch)], own, -1)]
            for number, line in enumerate(own["lines"]):
                done = measured[config(args, line, batch)]
                made.append(place | _row(line, done, own, number))
            found += _compared(made, level)
    return found


def _compared(made: Sequence[Row], level: float) -> list[Row]:
    """Return the rows, for the chosen one ``of_the_best_of_other_repeats``, without single speeds.

    Its speed in each repeat over that of the setting which is the fastest in the others, the
    median of these: the fastest of fifty noisy numbers is too good, and a machine's pace changes
    between repeats.
    """
    within = [row for row in made if row["measured_kl"] <= WITHIN * level]
    chosen = next(row for row in made if row["chosen"])
    ratios = []
    for repeat in range(len(chosen["speeds"])):
        others = [own for own in range(len(chosen["speeds"])) if own != repeat] or [repeat]
        best = max(within, key=lambda row: float(np.median(row["speeds"][others])))  # noqa: B023
        ratios.append(float(chosen["speeds"][repeat] / best["speeds"][repeat]))
    column, own = "of_the_best_of_other_repeats", float(np.median(ratios))
    return [
        {name: value for name, value in row.items() if name != "speeds"}
        | {column: own if row is chosen else ""}
        for row in made
    ]


def verdict(made: Sequence[Row]) -> str:
    """Return a table of the choices and the best of the grid, and two sentences on the rest."""
    heads = ("batch", "level", "chosen", "K", "tokens/s", "of the best", "metered", "other repeats",
             "best measured", "ratios")  # fmt: skip
    cells = []
    for batch, level in dict.fromkeys((row["batch"], row["level"]) for row in made):
        own = [row for row in made if (row["batch"], row["level"]) == (batch, level)]
        cells.append(_verdict(own, batch, level))
    known = [row for row in made if row["predicted_kl"] > 1e-9]
    off = [row["measured_speed"] / row["predicted_speed"] - 1 for row in made]
    kl_off = [row["measured_kl"] / row["predicted_kl"] - 1 for row in known]
    return "\n".join([
        fitted(heads, cells, width_of_terminal(WIDEST), "choices against the measured grid"),
        f"measured over predicted tokens/s: {_spread(off)}",
        f"measured over predicted KL per token: {_spread(kl_off)}",
        f"best: among settings that metered at most {WITHIN:g} times the level; other repeats: "
        "over what is fastest in these; ratios: whether the costs as three ratios lead to the "
        "same policy",
    ])  # fmt: skip


def _verdict(own: Sequence[Row], batch: int, level: float) -> list[str]:
    chosen = next(row for row in own if row["chosen"])
    alone = next(row for row in own if row["chosen_by_ratios"])
    within = [row for row in own if row["measured_kl"] <= WITHIN * level]
    best = max(within, key=lambda row: row["measured_speed"])
    return [
        str(batch), f"{level:g}", _named(chosen), str(chosen["num_draft_tokens"] or "–"),
        f"{chosen['measured_speed']:,.0f}",
        f"{chosen['measured_speed'] / best['measured_speed']:.3f}",
        f"{chosen['measured_kl']:.4f}",
        f"{chosen['of_the_best_of_other_repeats']:.3f}",
        f"{_named(best)}, K={best['num_draft_tokens']}",
        "same" if alone["family"] == chosen["family"] else _named(alone),
    ]  # fmt: skip


def _named(row: Row) -> str:
    return f"{row['family']}@{row['verifier']}" if row["verifier"] else row["family"]


def _spread(off: Sequence[float]) -> str:
    if not off:
        return "nothing to compare"
    low, middle, high = np.percentile(off, [10, 50, 90])
    return f"{1 + middle:.3f} (80 % between {1 + low:.3f} and {1 + high:.3f})"


def _row(line: Mapping[str, Any], measured: Row, own: Mapping[str, Any], number: int) -> Row:
    return {
        "family": line["family"],
        "policy": ":".join(filter(None, label(line["policy"]))),
        "verifier": line["verifier"],
        "num_draft_tokens": line["num_draft_tokens"],
        "predicted_speed": line["speed"],
        "predicted_speed_se": line["speed_se"],
        **measured,
        "predicted_tokens_per_call": line["tokens_per_call"],
        "predicted_kl": line["kl"],
        "predicted_kl_se": line["kl_se"],
        "chosen": int(own["chosen"] == number),
        "chosen_by_ratios": int(own["chosen_by_ratios"] == number),
    }


def _measured(own: Runs, draws: Draws) -> Row:
    """Return medians over repeats with intervals over resampled ones, and what was metered."""
    return {
        "speeds": own.speeds,
        **spread("measured_speed", own.speeds, draws),
        "measured_tokens_per_call": own.ratio("tokens", "row_calls"),
        "measured_kl": own.ratio("kl", "tokens"),
    }
