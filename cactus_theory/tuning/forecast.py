"""Seconds that tuning will take, by its parts, foretold from a few rounds of the same models."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

from cactus_theory.decoding.ledger import Ledger
from cactus_theory.decoding.result import Round
from cactus_theory.traces.log import log_trace
from cactus_theory.traces.replays import replay, replay_widths, shares_rows
from cactus_theory.traces.trace import Trace
from cactus_theory.tuning.families import LOSSLESS, Family
from cactus_theory.tuning.measure import Prompts, TimedSetting, decoded, split

# new tokens of the decodes that tell, fewer where texts are shorter
FEW = 12
# passes over rows until a knob is solved: of each K alone; of the first of several that share
# passes, and of each other one. On the shipped trace 3, and 6 to 7 for four K that share
ALONE, FIRST, OTHER = 4, 5, 1
# texts on which rounding is measured, and passes over one token that take as long as all of one
FLOOR_TEXTS, FLOOR_PASSES = 8, 48


def seconds_ahead(
    pair: Any,
    prompts: Prompts,
    batches: Sequence[int],
    kinds: Sequence[Family],
    widths: Sequence[int],
    *,
    rounds: int,
    timed_widths: int,
    repeats: int,
) -> dict[str, float]:
    """Return the seconds of each part of the command ``tune``, and those of one answer.

    Parameters
    ----------
    prompts : of the timed decodes; the prompt of the middle length is taken.
    batches, kinds, widths : that will be tried.
    rounds : that knobs are solved on.
    timed_widths, repeats : at how many K, and how often, decodes are timed.
    """
    ids, most = sorted(prompts.ids, key=len)[len(prompts.ids) // 2], prompts.max_new_tokens
    few = replace(prompts, ids=[ids], max_new_tokens=min(FEW, most))
    ends = (TimedSetting("", LOSSLESS, "chain", width) for width in (min(widths), max(widths)))
    settings = [None, *ends]
    texts = {
        batch: [_decode(pair, replace(few, batch=batch), own, most) for own in settings]
        for batch in batches
    }
    with TemporaryDirectory(prefix="tune-") as folder:
        sizes = {"num_draft_tokens": max(widths), "max_new_tokens": few.max_new_tokens}
        options = {"temperature": few.temperature, "cuts": few.cuts, "seed": few.seed}
        logging = _seconds(
            lambda: log_trace(pair.target, pair.draft, [ids], folder, **sizes, **options)
        )
        trace = Trace.open(folder)
        scale = rounds / len(trace)
        replay(trace, LOSSLESS)  # the first one allocates
        solving = sum(_solving(trace, kind, widths) for kind in kinds)
        cap = _seconds(lambda: replay(trace, Ledger("band:price=1", 1.0)))
    drafted = {batch: mean(seconds for seconds, _ in own[1:]) for batch, own in texts.items()}
    timed = (own[0][0] + timed_widths * len(kinds) * drafted[batch] for batch, own in texts.items())
    plain, start = texts[batches[0]][0]
    single = (plain - start) / most / batches[0]
    floor = min(FLOOR_TEXTS, len(prompts.ids)) * (2 * start / batches[0] + FLOOR_PASSES * single)
    return {
        "logging": scale * logging,
        "solving knobs": scale * solving,
        "timing decodes": (repeats + 1) * sum(timed),
        "a cap on answers": scale * cap,
        "rounding": floor,
        "an answer": mean(seconds / batch for batch, seconds in drafted.items()),
    }


def _decode(
    pair: Any, prompts: Prompts, setting: TimedSetting | None, most: int
) -> tuple[float, float]:
    """Return the seconds of a batch of ``most`` tokens a text, and of these what it starts with."""
    for tokens in (1, prompts.max_new_tokens):  # the first one allocates
        rounds: list[Round] = []
        own = replace(prompts, max_new_tokens=tokens)
        result = decoded(pair.target, pair.draft, own, setting, own.group(0), 0, rounds)
    timed, calls = split(result, rounds), sum(part.rows for part in rounds)
    start = timed.start * prompts.batch
    return start + timed.seconds * calls * most * prompts.batch / result.num_tokens, start


def _solving(trace: Trace, kind: Family, widths: Sequence[int]) -> float:
    """Return the seconds of a family's replays until its knob is solved at every K."""
    policy = kind.policy(kind.first)
    seconds = _seconds(lambda: replay_widths(trace, policy, kind.verifier, widths))
    if kind.least == kind.most:
        return seconds
    shared = FIRST + OTHER * (len(set(widths)) - 1)
    return seconds * (shared if shares_rows(policy, kind.verifier) else ALONE)


def _seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
