"""Seconds that tuning will take, by its long parts, foretold from a few rounds of the models."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from cactus_theory.traces.estimate import FEWEST_TEXTS
from cactus_theory.traces.log import log_trace
from cactus_theory.traces.replays import replay, replay_widths
from cactus_theory.traces.trace import Trace
from cactus_theory.tuning.costs import plain_speed, speed_of
from cactus_theory.tuning.families import LOSSLESS, Family
from cactus_theory.tuning.measure import Prompts, TimedSetting, measure_costs

# new tokens of the decodes that tell, fewer where texts are shorter
FEW = 12
# passes over rows until a knob is solved at every K: on the shipped trace 3 to 11 of them
PASSES = 6


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
    """Return the seconds of each long part of ``tune``, and those of an answer at every batch size.

    Parameters
    ----------
    prompts : of the timed decodes; the prompt of the middle length is taken.
    batches, kinds, widths : that will be tried.
    rounds : that knobs are solved on.
    timed_widths, repeats : at how many K, and how often, decodes are timed.
    """
    ids, most = sorted(prompts.ids, key=len)[len(prompts.ids) // 2], prompts.max_new_tokens
    few = replace(prompts, ids=[ids], max_new_tokens=min(FEW, most))
    width = sorted(widths)[len(widths) // 2]
    sizes = {"num_draft_tokens": max(widths), "max_new_tokens": few.max_new_tokens}
    sizes |= {"temperature": few.temperature, "cuts": few.cuts, "seed": few.seed}
    with TemporaryDirectory(prefix="tune-") as folder:
        logging = _seconds(partial(log_trace, pair.target, pair.draft, [ids], folder, **sizes))
        trace = Trace.open(folder)
        lossless = replay(trace, LOSSLESS, num_draft_tokens=width)  # the first one allocates
        solving = 0.0
        for kind in kinds:
            passes = 1 if kind.least == kind.most else PASSES
            own = trace, kind.policy(kind.first), kind.verifier, widths
            solving += passes * _seconds(partial(replay_widths, *own))
    rounds = max(rounds, FEWEST_TEXTS * len(trace) * most // few.max_new_tokens)
    timed, answers = 0.0, 0.0
    for batch in batches:
        drafted, own = TimedSetting(LOSSLESS, LOSSLESS, "chain", width), replace(few, batch=batch)
        costs = measure_costs(pair.target, pair.draft, own, [drafted], repeats=1)
        costs = replace(costs, new_tokens=most)
        answer = most / float(speed_of(lossless, costs, LOSSLESS, np.ones((1, 1), bool))[0])
        answers += answer
        timed += batch * (most / plain_speed(costs) + timed_widths * len(kinds) * answer)
    scale = rounds / len(trace)
    parts = {"logging": scale * logging, "solving knobs": scale * solving}
    return parts | {"timing decodes": (repeats + 1) * timed, "an answer": answers}


def _seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
