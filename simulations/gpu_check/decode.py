"""Whole decodes: tokens per second, what they emit, and what their parts should add up to.

Real sizes come from the shipped pair, inflated to them; ``--target`` and ``--draft`` name a pair
of checkpoints instead.

A round of K drafted tokens costs K·c + v decode steps, c for a drafted token and v for the pass
over K + 1 positions: what a decode should gain is its tokens per call over that, the reading of
the prompts apart.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from ..common.grid import PLAIN, USUAL, Config, at, label
from ..common.inputs import PAIR
from . import pairs
from .page import method
from .pairs import TINY_WIDTHS, WIDTHS, Results, Setup, Workload
from .sections import Bench, Message, Note, Row, first_line, in_turn
from .verify import LOSSLESS

VALUES = PAIR / "values.json"
# knob values that spend about .03, .07 and .14 nats a token on the shipped pair
PRICES, DELTAS = (1.5, 0.8, 0.5), (0.0003, 0.002, 0.01)
TINY_POLICIES = (LOSSLESS, "cactus:delta=0.01", "band:price=0.5", "band:price=0.5@block")
SETUPS = (Setup("8b", "0.6b", 1, 0.5), Setup("8b", "0.6b", 8, 0.6), Setup("14b", "0.6b", 1))
TINY_SETUPS = (Setup("tiny", "tiny", 1, 0.5), Setup("tiny", "tiny", 2))
COLUMNS = (
    "target draft batch policy knob verifier num_draft_tokens tokens_per_second speedup "
    "tokens_per_call accepted_per_call emitted_kl_per_token largest_row_kl tokens seconds c v "
    "step_ms fixed_ms prefill_ms net_speedup predicted_speedup share_of_predicted roofline_ms "
    "share_of_roofline round_ms draft_ms target_ms verify_ms other_ms loop score scored"
).split()


def policies(tiny: bool) -> list[str]:
    """Return what is decoded besides the plain target; ``SPEC@block`` where not token by token."""
    if tiny:
        return list(TINY_POLICIES)
    soft = [f"soft_band:price={price},values={VALUES}" for price in PRICES]
    bands, cactus = ([f"{name}={knob}" for knob in knobs] for name, knobs in
                     (("band:price", PRICES), ("cactus:delta", DELTAS)))  # fmt: skip
    blocks = [at(spec, "block") for spec in (LOSSLESS, *bands, *soft)]
    return [LOSSLESS, *cactus, *bands, *blocks, "typical"]


def rows(bench: Bench) -> Iterator[Message]:
    """Yield one row a method, K and setup."""
    jobs = [(setup.name, partial(_at, bench, setup)) for setup in _setups(bench)]
    yield from in_turn(jobs, bench.budget)


def _setups(bench: Bench) -> Sequence[Setup]:
    settings = bench.settings
    if settings.target is None or settings.draft is None:
        return TINY_SETUPS if bench.tiny else SETUPS
    batches = (1, 2) if bench.tiny else (1, 8)
    return [
        Setup(settings.target.name, settings.draft.name, batch, 0.5 if batch == 1 else 1.0)
        for batch in batches
    ]


def _at(bench: Bench, setup: Setup) -> Iterator[Message]:
    """Yield the rows of a setup while its share of the time lasts."""
    enough = bench.budget.left * (1 - setup.share)
    load = pairs.at_real_sizes if bench.settings.target is None else pairs.checkpoints
    for row in decoded(load(bench, setup), lines(setup.batch, bench.tiny), setup):
        yield row
        if not isinstance(row, Note) and bench.budget.left <= enough:
            why = "out of time" if setup.share == 1 else "the time is for the next batch or target"
            last = f"{method(row)}, K = {row['num_draft_tokens']}"
            yield Note("skipped", f"what came after {last} at {setup.name}", why)
            return


def lines(batch: int, tiny: bool) -> list[Config]:
    """Return plain decoding, then every policy at every K."""
    configs = [Config(PLAIN, 0, batch)]
    for width in TINY_WIDTHS if tiny else WIDTHS:
        for name in policies(tiny):
            spec, _, verifier = name.partition("@")
            configs.append(Config(spec, width, batch, verifier or USUAL))
    return configs


def decoded(workload: Workload, lines: Sequence[Config], setup: Setup) -> Iterator[Message]:
    """Yield a finished row a line; a policy that fails is named, and the next ones follow.

    Speeds are of a decode without the meter, after one with it on the same seeds, which so
    emitted the same tokens; loading and captures are not timed.
    """
    finish = finisher(setup)
    for line in lines:
        try:
            metered, timed = (workload.decode(line, meter=meter) for meter in (True, False))
        except Exception as error:
            if line.method == PLAIN:  # nothing to compare with
                raise
            policy, knob = label(line.method)
            name = method({"policy": policy, "knob": knob, "verifier": line.verifier})
            failed_line = f"{name}, K = {line.width} at {setup.name}"
            yield Note("failed", failed_line, first_line(error))
            continue
        row = measured(line, metered, timed)
        yield finish(row | workload.complete(row, timed))


def measured(line: Config, metered: Results, timed: Results) -> Row:
    """Return what a line's decodes did, all its groups of prompts together."""
    tokens = sum(result.num_tokens for result in timed)
    seconds = sum(result.seconds.total for result in timed)
    readings = [result.reading for result in metered]
    spent = [own.emitted_divergence for own in readings if own.emitted_divergence is not None]
    largest = [own.largest_row_divergence or 0.0 for own in readings[: len(spent)]]
    return {
        "policy": line.method,
        "verifier": line.verifier,
        "num_draft_tokens": line.width,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "tokens_per_call": statistics.fmean(result.tokens_per_call for result in timed),
        "accepted_per_call": statistics.fmean(result.accepted_per_call for result in timed),
        "emitted_kl_per_token": sum(spent) / tokens if spent else None,
        "largest_row_kl": max(largest, default=None),
        "loop": timed[0].loop,
    }


def finisher(setup: Setup) -> Callable[[Row], Row]:
    """Return a function that completes rows of one setup; the first must be plain decoding."""
    plain: list[Row] = []

    def finish(measures: Row) -> Row:
        policy, knob = label(measures["policy"])
        columns = {key: measures[key] for key in COLUMNS if measures.get(key) is not None}
        columns |= {"target": setup.target, "draft": setup.draft, "batch": setup.batch}
        row: Row = dict.fromkeys(COLUMNS) | columns | {"policy": policy, "knob": knob}
        if policy == PLAIN:
            plain.append(row)
        return row | _relative(row, plain[0]) | _parts(row)

    return finish


def _relative(row: Row, plain: Row) -> Row:
    """Return speed over plain decoding, over the prediction, and over the memory's limit."""
    net = _net(row) / _net(plain)
    ratios: Row = {
        "speedup": row["tokens_per_second"] / plain["tokens_per_second"],
        "net_speedup": net,
    }
    width, c, v = row["num_draft_tokens"], row["c"], row["v"]
    if width and c is not None and v is not None:
        predicted = row["tokens_per_call"] / (width * c + v)
        ratios |= {"predicted_speedup": predicted, "share_of_predicted": net / predicted}
    if not width and row["roofline_ms"] is not None:
        step = 1e3 * row["batch"] / _net(row)
        ratios["share_of_roofline"] = row["roofline_ms"] / step
    return ratios


def _net(row: Row) -> float:
    """Return tokens per second after the prompts were read, where that is known apart."""
    tokens, seconds, prefill = (row[key] for key in ("tokens", "seconds", "prefill_ms"))
    if None in (tokens, seconds, prefill):
        return row["tokens_per_second"]
    return tokens / (seconds - prefill / 1e3)


def _parts(row: Row) -> Row:
    """Return the milliseconds of a round: drafting, the target's pass, verification, the rest."""
    width, c, v, step = (row[key] for key in ("num_draft_tokens", "c", "v", "step_ms"))
    total_ms = 1e3 * row["batch"] * row["tokens_per_call"] / _net(row)
    if not width or None in (c, v, step):
        return {"round_ms": total_ms}
    draft, target, verify = width * c * step, v * step, row["verify_ms"]
    return {
        "round_ms": total_ms,
        "draft_ms": draft,
        "target_ms": target,
        "other_ms": total_ms - draft - target - (verify or 0.0),
    }
