"""Policies at equal nats on whole answers, beside plain and lossless decoding. Resumes.

A random half of the prompts is for tuning: rows are logged on it, knobs solved so that the meter
reads --nats a token, calls timed; every policy gets the verifier and K that are predicted fastest.
Of the other half --num-prompts are answered to their end, once by every line, in turns: prompt
after prompt, or --batch at once, lines in an order drawn anew. Metering is not timed.

A policy is as for ``tune`` (``band``; ``band:hold=eos`` with other knobs fixed);
``speculative:tilt`` is lossless sampling of another target; ``regret@block`` and ``regret@chain``
are two lines. At temperature 0 nats are of regret.
Lossless drafting is decoded at its best K and one less; × lossless and scores are beside the faster
of both on these prompts. Intervals are 90 %, over prompts, or batches of them, resampled. Scores of
0 and 1 are compared with McNemar's exact test, p corrected by Holm for all lines of the table. The
last table says how many prompts make a difference significant: at 95 %, in four of five such runs.
"""

import argparse
import math
import random
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from cactus_theory.base import defaults
from cactus_theory.base.prompts import Prompt
from cactus_theory.base.significance import holm, items_needed, mcnemar
from cactus_theory.base.tables import width_of_terminal
from cactus_theory.commands.flags import given_prompts
from cactus_theory.commands.models import loaded
from cactus_theory.decoding import Pair
from cactus_theory.decoding.text import completion
from cactus_theory.decoding.truncation import Cuts
from cactus_theory.lm_eval.tasks import floor

from .common import grid
from .common.decode import Harness
from .common.grid import PLAIN, Config, Grid, Job
from .common.inputs import add_decode_arguments, at_least, prompt_ids, settings_of
from .common.journal import Journal
from .common.results import WIDEST, Column, columns, publish
from .common.statistics import Draws, interval, resamples
from .common.tuned import config, key, tune_all
from .scores import Score, score_of

# at temperatures above 0, and at 0
LOSSLESS = defaults.POLICY, defaults.STRICT
POLICIES = (defaults.POLICY, "lenience", "cactus", "band", "band:hold=eos", "speculative:tilt")
# most new tokens of the texts that are logged and timed, and the most entries of logged rows
TUNED_TOKENS, LOGGED = 48, 6_400_000
# columns with an interval; two of them stand in sentences below the table
MEASURED = (
    Column("tokens/s", "tokens_per_second", 1),
    Column("× plain", "over_plain", 2, interval=True),
    Column("× lossless", "over_lossless", 2, interval=True),
    Column("tokens a call", "tokens_per_call", 2),
    Column("metered", "kl_per_token", 4),
    Column("tokens an answer", "tokens_per_answer", 0),
    Column("seconds an answer", "seconds_per_answer", 1, interval=True),
    Column("× lossless, an answer", "answer_over_lossless", 2, interval=True),
    Column("score", "score", 2, interval=True),
    Column("minus lossless", "score_difference", 3, interval=True),
    Column("seconds a right answer", "seconds_per_right", 1),
)
IN_SENTENCES = ("answer_over_lossless", "score_difference")
# tests: prompts that this line alone, and lossless alone, has right
TESTS = ("right_alone", "lossless_right_alone", "p", "p_of_all")
Row = dict[str, Any]
Run = tuple[float, Config, Sequence[Row]]
Sums = Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_decode_arguments(
        parser, policies=POLICIES, out="build/answers", widths=[1, 2, 3, 4, 6, 8], repeats=None,
        num_prompts=30, max_new_tokens=256,
    )  # fmt: skip
    add("--nats", type=float, nargs="+", default=[0.05], help="nats a token that may be metered")
    add("--temperature", type=float, default=1.0, help="of both models")
    add("--top-p", type=float, default=1.0, help="of both models, after the temperature")
    add(
        "--score",
        metavar="NAME",
        help="gsm8k, ifeval, or FILE.py:NAME, a function "
        "of prompt, completion and, if it takes a third, the prompt's columns",
    )
    add("--cycles", type=int, help="rounds of the logged trace (6,400,000/V, from 100 to 1000)")
    add("--timings", type=int, default=2, help="timed decodes of every setting, for the choice")
    add("--batch", type=int, default=1, metavar="B", help="prompts that are answered at once")


def run(args: argparse.Namespace) -> int:
    at_least(args, num_prompts=2, num_draft_tokens=1, max_new_tokens=1, timings=1, batch=1)
    if args.cycles is not None:
        at_least(args, cycles=1)
    prompts, score = given_prompts(args), score_of(args.score)
    order = random.Random(args.seed).sample(range(len(prompts)), len(prompts))
    tuning, unseen = order[::2], order[1::2][: args.num_prompts]
    if len(unseen) < 2:
        raise ValueError(f"--prompts: must hold 4, of which half are for tuning; got {len(order)}")
    if len(unseen) <= args.batch:
        rule = f"must be below the {len(unseen)} prompts that are answered, for intervals"
        raise ValueError(f"--batch: {rule}; got {args.batch}")
    asked = [prompts[number] for number in unseen]
    if score is not None:
        for prompt in asked:  # one without what the score reads shows before anything runs
            score(prompt, "")
    pair = loaded(args)
    runs = _answered(args, pair, prompts, tuning, unseen)
    rows = rows_of(runs, asked, score, args.seed)
    publish(args, rows, args.out / "answers.csv", dtype=pair.dtype)
    from paper_figures.__main__ import draw

    draw("answers", args.out, args.out)
    print(shown(rows, args))
    if score is not None:
        lossless = next(own for _, line, own in runs if line.policy in LOSSLESS)
        print(floor(score, asked, [text for record in lossless for text in record["texts"]]))
    print(f"written to {args.out}/: answers.csv, answers.png, answers.pdf, journal.jsonl")
    return 0


def _answered(
    args: argparse.Namespace,
    pair: Pair,
    prompts: Sequence[Prompt],
    tuning: Sequence[int],
    unseen: Sequence[int],
) -> list[Run]:
    """Return nats, setting and decodes of every line, made unless they are in the journal."""
    usual = min(max(LOGGED // pair.target.config.vocab_size, 100), 1000)
    cycles = usual if args.cycles is None else args.cycles
    flags = "nats policy num_draft_tokens temperature top_p timings device batch".split()
    settings = settings_of(args, prompts, *flags, methods=args.policy, cycles=cycles)
    with Journal(args.out / "journal.jsonl", settings) as journal:
        ids = prompt_ids(args, pair, prompts)
        limit = min(args.max_new_tokens, TUNED_TOKENS)
        own_ids = [ids[number] for number in tuning]
        tune_all(args, journal, pair, own_ids, limit, cycles=cycles)
        lines = chosen(args, journal)
        for said in over(args, journal):
            print(said)
        decodes = Grid([line for _, line in lines], len(unseen), 1, metered=0, seed=args.seed)
        seed = args.seed + len(prompts) + cycles  # the trace has used the first ones
        own_ids = [ids[number] for number in unseen]
        harness = Harness(pair, own_ids, args.max_new_tokens, seed)
        results = decodes.fill(partial(_decoded, harness), journal)
    groups = range(math.ceil(len(unseen) / args.batch))
    jobs = [[Job(line, 0, group).key for group in groups] for _, line in lines]
    return [(*line, [results[job] for job in own]) for line, own in zip(lines, jobs, strict=True)]


def over(args: argparse.Namespace, journal: Journal) -> list[str]:
    """Return why policies that were asked for have no line, a sentence each."""
    return [said for level in args.nats for said in journal.results[key(level)]["over"]]


def chosen(args: argparse.Namespace, journal: Journal) -> list[tuple[float, Config]]:
    """Return plain decoding, lossless drafting at its best K and one less, every family's best."""
    best: dict[tuple[float, str], Row] = {}
    for level in args.nats:
        for line in journal.results[key(level)]["lines"]:
            family, judge = line["family"], line["verifier"]
            asked = (spec.partition("@") for spec in args.policy)
            if family not in LOSSLESS and any(family.startswith(name) and own == judge
                                              for name, _, own in asked):  # fmt: skip
                family = f"{family}@{judge}"  # asked for by itself
            at = (0.0 if line["family"] in LOSSLESS else level), family
            if at not in best or line["predicted_speed"] > best[at]["predicted_speed"]:
                best[at] = line
    if {*args.policy} - {*LOSSLESS} and not any(level for level, _ in best):
        raise ValueError(f"--policy, --nats: must leave a line; {' '.join(over(args, journal))}")
    law = {"temperature": args.temperature, "cuts": Cuts(top_p=args.top_p)}
    lines, asked = [], law | {"batch": args.batch}
    for (level, family), line in sorted(best.items(), key=lambda item: item[0][0]):
        own = replace(config(line, journal.path, args.policy), **asked)
        width = own.num_draft_tokens
        less = [width - 1] if family in LOSSLESS and width > 1 else []
        lines += [(level, replace(own, num_draft_tokens=k)) for k in (width, *less)]
    return [(0.0, Config(PLAIN, 0, **asked)), *lines]


def _decoded(harness: Harness, job: Job) -> dict[str, Any]:
    decode = harness.decode(job.config, job.group, meter=True)
    prompts = [harness.prompts[row] for row in harness.group(job.config.batch, job.group)]
    names = ("seconds", "tokens", "row_calls", "kl", "ended")
    record = {name: decode.record.get(name, 0.0) for name in names}
    pairs, tokenizer = zip(prompts, decode.outputs, strict=True), harness.pair.tokenizer
    return record | {"texts": [completion(tokenizer, *pair) for pair in pairs]}


def rows_of(
    runs: Sequence[Run], prompts: Sequence[Prompt], score: Score | None, seed: int
) -> list[Row]:
    """Return a row of every line: MEASURED with its interval, TESTS, and prompts needed."""
    draws = resamples(len(runs[0][2]), seed)
    sums = [_sums(records, prompts, score) for _, _, records in runs]
    lossless = max((own for own, (_, line, _) in zip(sums, runs, strict=True)
                    if line.policy in LOSSLESS), key=lambda own: _speed(own, None))  # fmt: skip
    rows = []
    for (level, line, _), own in zip(runs, sums, strict=True):
        row: Row = {"level": level} | line.columns | {"prompts": len(prompts)}
        rows.append(row | _measured(own, sums[0], lossless, draws) | _tested(own, lossless))
    tested = [row for row in rows if row["level"] and row["p"] is not None]
    for row, p in zip(tested, holm([row["p"] for row in tested]), strict=True):
        row["p_of_all"] = p
    return rows


def _sums(records: Sequence[Row], prompts: Sequence[Prompt], score: Score | None) -> Sums:
    """Return sums over the answers of each decode, and ``each`` answer's score."""
    names = ("seconds", "tokens", "row_calls", "kl")
    own = {name: np.array([record[name] for record in records], dtype=float) for name in names}
    own["answers"] = np.array([len(record["ended"]) for record in records])
    own["cut"] = own["answers"] - np.array([sum(record["ended"]) for record in records])
    if score is not None:
        texts = [text for record in records for text in record["texts"]]
        own["each"] = np.array([score(*pair) for pair in zip(prompts, texts, strict=True)])
        ends = own["answers"].cumsum()[:-1]
        own["score"] = np.array([part.sum() for part in np.split(own["each"], ends)])
    return own


def _speed(own: Sums, draws: Draws | None) -> Any:
    return _total(own["tokens"], draws) / _total(own["seconds"], draws)


def _total(values: Any, draws: Draws | None) -> Any:
    return values.sum() if draws is None else values[draws].sum(1)


def _numbers(own: Sums, plain: Sums, lossless: Sums, draws: Draws | None) -> dict[str, Any]:
    """Return MEASURED over all prompts, or over each of ``draws``."""
    seconds, tokens, calls, kl = (_total(own[name], draws)
                                  for name in ("seconds", "tokens", "row_calls", "kl"))  # fmt: skip
    count, speed = _total(own["answers"], draws), tokens / seconds
    numbers = {
        "tokens_per_second": speed,
        "over_plain": speed / _speed(plain, draws),
        "over_lossless": speed / _speed(lossless, draws),
        "tokens_per_call": tokens / calls,
        "kl_per_token": kl / tokens,
        "tokens_per_answer": tokens / count,
        "seconds_per_answer": seconds / count,
        "answer_over_lossless": _total(lossless["seconds"], draws) / seconds,
    }
    if "score" in own:
        right, theirs = (_total(sums["score"], draws) for sums in (own, lossless))
        with np.errstate(divide="ignore"):
            numbers |= {"score": right / count, "score_difference": (right - theirs) / count}
            numbers["seconds_per_right"] = np.float64(seconds) / right
    return numbers


def _measured(own: Sums, plain: Sums, lossless: Sums, draws: Draws) -> Row:
    count = int(own["answers"].sum())
    row: Row = {"cut": float(own["cut"].sum() / count)}
    drawn = _numbers(own, plain, lossless, draws)
    for name, value in _numbers(own, plain, lossless, None).items():
        ends = interval(drawn[name]) if np.isfinite(drawn[name]).all() else (None, None)
        row |= {name: float(value) if np.isfinite(value) else None}
        row |= dict(zip((f"{name}_low", f"{name}_high"), ends, strict=True))
    ratio = drawn["answer_over_lossless"]
    row["prompts_needed"] = items_needed(
        float(np.log(row["answer_over_lossless"])), float(np.log(ratio).std()), count
    )
    if "score" in own:
        error = float(drawn["score_difference"].std())
        row["prompts_needed_score"] = items_needed(row["score_difference"], error, count)
    return row


def _tested(own: Sums, lossless: Sums) -> Row:
    row: Row = dict.fromkeys(TESTS)
    scores = np.stack([own["each"], lossless["each"]]) if "each" in own else np.array([0.5])
    if not np.isin(scores, (0, 1)).all():
        return row
    better, worse = int((scores[0] > scores[1]).sum()), int((scores[0] < scores[1]).sum())
    return row | dict(zip(TESTS, (better, worse, mcnemar(better, worse), None), strict=True))


def shown(rows: Sequence[Row], args: argparse.Namespace) -> str:
    """Return the table, and a sentence of every lossy line beside lossless drafting."""
    named = [row | {"name": grid.method(row), "num_draft_tokens": row["num_draft_tokens"] or None}
             for row in rows]  # fmt: skip
    title = (
        f"{rows[0]['prompts']} prompts, {args.batch} at once, answers of at most "
        f"{args.max_new_tokens} tokens, temperature {args.temperature:g}"
    )
    heads = {"name": "method", "num_draft_tokens": "K"}
    heads |= {str(own.of): own.short for own in MEASURED
              if own.of in named[0] and own.of not in IN_SENTENCES}  # fmt: skip
    cut = float(np.mean([row["cut"] for row in rows]))
    said = [f"The limit cut {cut:.0%} of the answers off."]
    said += [_sentence(row) for row in rows if row["level"]]
    width = width_of_terminal(WIDEST)
    lines = [textwrap.fill(line, width, subsequent_indent="    ") for line in said]
    return "\n".join([columns(named, heads, title, "seconds_per_answer"), "", *lines])


def _sentence(row: Row) -> str:
    speed, answer = (_span(row, name) for name in ("over_lossless", "answer_over_lossless"))
    said = (
        f"{grid.name(row)}: {speed} times the tokens a second of lossless drafting, {answer} times "
        f"as fast an answer ({_needed(row['prompts_needed'])})."
    )
    if "score" in row:
        said += f" Score {_span(row, 'score_difference', '+.3f')}"
        if row["p"] is not None:
            own, theirs = row["right_alone"], row["lossless_right_alone"]
            said += f": alone right on {own}, alone wrong on {theirs} prompts, p = {row['p']:.2g}"
            said += f", {row['p_of_all']:.2g} among all lines"
        said += f" ({_needed(row['prompts_needed_score'])})."
    return said


def _span(row: Row, name: str, style: str = ".2f") -> str:
    return "{} ({} to {})".format(
        *(format(row[f"{name}{end}"], style) for end in ("", "_low", "_high"))
    )


def _needed(count: int | None) -> str:
    return "no difference" if count is None else f"{count:,} prompts make that significant"
