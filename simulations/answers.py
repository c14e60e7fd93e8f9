"""Compare policies on whole answers: sums by prompt, paired ratios, and scores if asked. Resumes.

Every policy answers the same prompts with the same verifier and K, at the knob that is given
(``cactus-theory compare`` solves knobs for equal nats). The uniform random numbers of an answer
depend on its prompt and number alone. ``by_prompt.csv`` has the sums of each policy and prompt.
``answers.csv`` and the picture are made from these sums; ``--sums`` makes them again from a file.

* ± is the jackknife's standard error over prompts.
* ``over_lossless`` and ``over_first`` are ratios to lossless decoding and to the first policy,
  paired by prompt, of tokens a call and of calls an answer.
* The rows named ``complete`` count only prompts whose answers all ended by themselves, under every
  policy. Further rows count the prompts of one category, if prompts have the column ``category``.
* Scores of 0 and 1, of one answer per prompt, are compared with the scores of lossless decoding by
  McNemar's exact test. ``p_of_all`` is corrected by Holm for all policies.

Seconds are not measured: a policy takes its calls times the seconds of a call.
"""

import argparse
import math
import pickle
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cactus_theory.base import defaults
from cactus_theory.base.prompts import Prompt
from cactus_theory.base.significance import POWER, WIDE, holm, mcnemar
from cactus_theory.commands import models
from cactus_theory.commands.flags import add_cuts, add_policy, given_prompts
from cactus_theory.commands.inputs import given_cuts
from cactus_theory.decoding import Pair
from cactus_theory.decoding.text import completion
from cactus_theory.decoding.truncation import WHOLE
from cactus_theory.policies import read_policy
from cactus_theory.traces.estimate import Estimate, ratio_of_sums
from cactus_theory.verify.contract import find_verifier

from .common.cluster import add_cluster, opened_client
from .common.decode import Harness
from .common.grid import Config
from .common.inputs import add_end_arguments, add_pair_arguments, at_least, prompt_ids, settings_of
from .common.journal import Journal, filled
from .common.results import columns, estimates, publish, read_csv
from .scores import Score, score_of

# sums over a prompt's answers
SUMS = "answers", "ended", "tokens", "calls", "nats", "score", "surprise", "agreement"
COLUMNS = "policy", "prompt", "category", *SUMS
Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_pair_arguments(parser)
    add_end_arguments(parser)
    add("--num-prompts", type=int, help="its first ones (all)")
    add("--answers", type=int, default=1, metavar="N", help="to each prompt")
    add("--max-new-tokens", type=int, default=256, metavar="N", help="of an answer")
    add("--num-draft-tokens", type=int, default=2, metavar="K")
    add("--verifier", default=defaults.VERIFIER, help="of all policies (%(default)s)")
    add("--temperature", type=float, default=defaults.TEMPERATURE, help="of both models")
    add_cuts(parser)
    add("--batch", type=int, default=20, metavar="B", help="answers that are decoded at once")
    text = "word (does the word of the column answer stand in the text?), gsm8k, ifeval"
    add("--score", metavar="NAME", help=f"{text}, or FILE.py:NAME")
    add("--seed", type=int, default=defaults.SEED)
    add_policy(parser, "beside lossless decoding", default=["band:price=1"])
    add("--out", type=Path, default=Path("build/answers"), metavar="DIR")
    add("--sums", type=Path, metavar="FILE.csv", help="a by_prompt.csv: nothing is decoded")
    add_cluster(parser)
    parser.set_defaults(threads=1)


class Work(NamedTuple):
    """The models, prompts, policies and score of a process that makes answers."""

    pair: Pair
    prompts: list[Prompt]
    policies: list[str]
    score: Score | None
    harness: Harness


def run(args: argparse.Namespace) -> int:
    if args.sums:
        rows, _ = read_csv(args.sums)
        if missing := [name for name in COLUMNS if not rows or name not in rows[0]]:
            raise ValueError(f"--sums: must have the columns of by_prompt.csv; misses {missing}")
        _report(args, rows, args.sums.name)
        return 0
    counts = dict.fromkeys(("answers", "batch", "num_draft_tokens", "max_new_tokens"), 1)
    least = {"num_prompts": 2, "workers": 1}
    counts |= {name: low for name, low in least.items() if getattr(args, name) is not None}
    at_least(args, **counts)
    asked = pickle.dumps(args)
    pair, prompts, policies, _, harness = _opened(asked)
    args.out.mkdir(parents=True, exist_ok=True)
    flags = "answers num_draft_tokens batch verifier temperature score".split()
    cuts = vars(given_cuts(args) or WHOLE)
    settings = settings_of(args, prompts, *flags, methods=policies, cuts=cuts)
    jobs = {f"{policy} {group}": partial(_job, asked, policy, group) for policy in policies
            for group in range(-(-len(harness.prompts) // args.batch))}  # fmt: skip
    with Journal(args.out / "journal.jsonl", settings) as journal, opened_client(args) as client:
        results = filled(jobs, journal, "batches", client)
    sums = {policy: _sums([own for key, own in results.items() if key.rpartition(" ")[0] == policy],
                          len(prompts)) for policy in policies}  # fmt: skip
    rows = by_prompt(sums, [str(own.columns.get("category", "")) for own in prompts])
    publish(args, rows, args.out / "by_prompt.csv", dtype=pair.dtype)
    _report(args, rows, args.prompts.name, dtype=pair.dtype)
    return 0


@lru_cache(maxsize=1)
def _opened(asked: bytes) -> Work:
    """Return models, prompts and policies of pickled flags, opened once a process."""
    args = pickle.loads(asked)
    prompts = given_prompts(args)[: args.num_prompts]
    if len(prompts) < 2:
        raise ValueError(f"--prompts: must hold 2 prompts, for errors; got {len(prompts)}")
    score = score_of(args.score)
    if score is not None:
        for prompt in prompts:  # one without what the score reads shows before anything runs
            score(prompt, "")
    lossless = defaults.POLICY if args.temperature else defaults.STRICT
    specs = [lossless, *(read_policy(own).spec for own in args.policy)]
    policies, judge = [*dict.fromkeys(specs)], find_verifier(args.verifier)
    for policy in policies:
        judge.check(read_policy(policy))
    pair = models.loaded(args)
    ids = prompt_ids(args, pair, prompts) * args.answers
    harness = Harness(pair, ids, args.max_new_tokens, args.seed)
    return Work(pair, prompts, policies, score, harness)


def _report(args: argparse.Namespace, rows: Sequence[Row], title: str, **notes: str) -> None:
    """Write, draw and print the table of sums by prompt."""
    from paper_figures.__main__ import draw

    table = table_of(rows)
    publish(args, table, args.out / "answers.csv", **notes)
    draw("answers", args.out, args.out)
    shown = ("policy", "which", "prompts", "tokens_per_call", "over_lossless", "over_first", "nats",
             "surprise", "tokens_per_answer", "ended", "score", "difference")  # fmt: skip
    print(columns(table, {name: name.replace("_", " ") for name in shown}, title))
    print(f"written to {args.out}/: answers.csv, answers.png, answers.pdf")


def _job(asked: bytes, policy: str, group: int) -> Row:
    """Return the sums of each answer of a batch, with the index of its prompt."""
    args, (_, prompts, _, score, harness) = pickle.loads(asked), _opened(asked)
    law = {"temperature": args.temperature, "cuts": given_cuts(args) or WHOLE}
    config = Config(policy, args.num_draft_tokens, args.verifier, **law, batch=args.batch)
    done, rows = harness.decode(config, group, meter=True), []
    assert done.result is not None
    whose = [at % len(prompts) for at in harness.group(config.batch, group)]
    answers = zip(whose, done.outputs, done.ended, done.result.readings(), strict=True)
    for at, output, ended, reading in answers:
        text = completion(harness.pair.tokenizer, harness.prompts[at], output)
        right = score(prompts[at], text) if score else 0.0
        spent = reading.emitted_divergence or 0.0
        # greedy texts are compared with the argmax, not with a law that has a surprise
        known = [reading.surprise, reading.agreement] if config.temperature else [None, None]
        rows.append([at, 1, int(ended), len(output), reading.num_calls, spent, right, *known])
    return {"rows": rows}


def _sums(records: list[Row], count: int) -> np.ndarray:
    """Return SUMS of each prompt, (prompts, 8); NaN for unknown values."""
    total = np.zeros((count, len(SUMS)))
    for at, *own in (row for record in records for row in record["rows"]):
        total[at] += np.array(own, dtype=np.float64)
    return total


def by_prompt(sums: dict[str, np.ndarray], categories: Sequence[str]) -> list[Row]:
    """Return one row per policy and prompt, with the prompt's category; unknown values are None."""
    return [dict(zip(COLUMNS, (policy, prompt, categories[prompt],
                               *(None if math.isnan(one) else float(one) for one in own)),
                     strict=True))
            for policy, total in sums.items() for prompt, own in enumerate(total)]  # fmt: skip


def table_of(rows: Sequence[Row]) -> list[Row]:
    """Return each policy's rows: for all prompts, for ``complete`` prompts, for each category."""
    sums: dict[str, list[list[float]]] = {}
    for row in rows:
        known = [math.nan if row[name] in ("", None) else float(row[name]) for name in SUMS]
        sums.setdefault(row["policy"], []).append(known)
    every = {policy: np.array(own) for policy, own in sums.items()}
    ended = np.all([own[:, 0] == own[:, 1] for own in every.values()], 0)
    categories = np.array([row["category"] for row in rows[: len(ended)]])
    parts = {name: categories == name for name in dict.fromkeys(categories.tolist())}
    parts = {"all": np.ones(len(ended), bool), "complete": ended} | parts
    return [row for name, among in parts.items()
            if name == "all" or 2 <= among.sum() < len(ended)
            for row in _rows(every, among, name)]  # fmt: skip


def _rows(every: dict[str, np.ndarray], among: np.ndarray, which: str) -> list[Row]:
    table, names = [], [*every]
    means = {policy: _means(own[among]) for policy, own in every.items()}
    lossless, first = means[names[0]], means[names[min(1, len(names) - 1)]]
    for policy, own in means.items():
        answers = every[policy][among][:, 0]
        gap = every[policy][among][:, 5] - every[names[0]][among][:, 5]
        less = ratio_of_sums(gap, answers, "prompts")
        row: Row = {"policy": policy, "which": which, "prompts": int(among.sum())}
        row |= {"answers": int(answers.sum())} | estimates(**own)
        row |= estimates(
            over_lossless=own["tokens_per_call"] / lossless["tokens_per_call"],
            over_first=own["tokens_per_call"] / first["tokens_per_call"],
            calls_over_lossless=own["calls_per_answer"] / lossless["calls_per_answer"],
            calls_over_first=own["calls_per_answer"] / first["calls_per_answer"],
            difference=less,
        )
        row["shown_by_80_percent"] = (WIDE + POWER) * less.standard_error
        row |= _tested(gap, answers)
        table.append({name: None if value != value else value for name, value in row.items()})
    tested = [row for row in table[1:] if row["p"] is not None]
    for row, p in zip(tested, holm([row["p"] for row in tested]), strict=True):
        row["p_of_all"] = p
    return table


def _tested(gap: np.ndarray, answers: np.ndarray) -> Row:
    """Return McNemar's test of scores of 0 and 1.

    The fields are empty for other scores, or if a prompt has several answers.
    """
    row: Row = dict.fromkeys(("right_alone", "lossless_right_alone", "p", "p_of_all"))
    if (answers == 1).all() and np.isin(gap, (-1, 0, 1)).all():
        better, worse = int((gap > 0).sum()), int((gap < 0).sum())
        row |= {"right_alone": better, "lossless_right_alone": worse, "p": mcnemar(better, worse)}
    return row


def _means(own: np.ndarray) -> dict[str, Estimate]:
    answers, ended, tokens, calls, nats, score, surprise, agreement = own.T
    pairs = {
        "tokens_per_call": (tokens, calls),
        "calls_per_answer": (calls, answers),
        "tokens_per_answer": (tokens, answers),
        "nats": (nats, tokens),
        "surprise": (surprise, tokens),
        "agreement": (agreement, tokens),
        "ended": (ended, answers),
        "score": (score, answers),
    }
    return {name: ratio_of_sums(*pair, "prompts") for name, pair in pairs.items()}
