"""Laws on whole answers: sums by prompt, ratios paired by prompt, and scores if asked. Resumes.

Every policy answers the same prompts with the same verifier and K, at the knob that is given, so
many times each. Coins of an answer depend on its prompt and number alone. ``by_prompt.csv`` has
the sums of each policy and prompt, from which ``laws.csv`` is made (``--sums`` makes it again
from such a file): ± is the jackknife's standard error over prompts; ``over_lossless`` and
``over_first`` are paired ratios to lossless decoding and to the first policy, of tokens a call and
of calls an answer. ``complete`` rows count those prompts alone whose answers ended by themselves
under every policy, others those of a category, if the prompts have one. Clocks are not read.
"""

import argparse
import math
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cactus_theory.base import defaults
from cactus_theory.base.prompts import Prompt
from cactus_theory.commands import models
from cactus_theory.commands.flags import add_cuts, add_policy, given_prompts
from cactus_theory.commands.inputs import given_cuts
from cactus_theory.decoding.text import completion
from cactus_theory.decoding.truncation import WHOLE
from cactus_theory.policies import read_policy
from cactus_theory.traces.estimate import Estimate, ratio_of_sums
from cactus_theory.verify.contract import find_verifier

from .common.decode import Harness
from .common.grid import Config
from .common.inputs import add_end_arguments, add_pair_arguments, at_least, prompt_ids, settings_of
from .common.journal import Journal, filled
from .common.results import columns, estimates, publish, read_csv
from .scores import Score, score_of

# normal quantiles of a two-sided test at 5 % and of a power of 80 %
TWO_SIDED, POWER = 1.96, 0.84
# sums over a prompt's answers
SUMS = "answers", "ended", "tokens", "calls", "nats", "score", "surprise", "agreement"
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
    add("--score", metavar="NAME",
        help="word (does the word of the column answer stand in the text?), gsm8k, ifeval, or "
             "FILE.py:NAME")  # fmt: skip
    add("--seed", type=int, default=defaults.SEED)
    add_policy(parser, "beside lossless decoding", default=["band:price=1"])
    add("--out", type=Path, default=Path("build/laws"), metavar="DIR")
    add("--sums", type=Path, metavar="FILE.csv", help="a by_prompt.csv: nothing is decoded")
    parser.set_defaults(threads=1)


def run(args: argparse.Namespace) -> int:
    if args.sums:
        table = table_of(read_csv(args.sums)[0])
        publish(args, table, args.out / "laws.csv")
        _print(table, args.sums.name)
        return 0
    at_least(args, answers=1, batch=1, num_draft_tokens=1, max_new_tokens=1)
    if args.num_prompts is not None:
        at_least(args, num_prompts=2)
    prompts = given_prompts(args)[: args.num_prompts]
    if len(prompts) < 2:
        raise ValueError(f"--prompts: must hold 2 prompts, for errors; got {len(prompts)}")
    score = _word if args.score == "word" else score_of(args.score)
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
    args.out.mkdir(parents=True, exist_ok=True)
    flags = "answers num_draft_tokens batch verifier temperature score".split()
    cuts = given_cuts(args) or WHOLE
    settings = settings_of(args, prompts, *flags, methods=policies, cuts=vars(cuts))
    harness = Harness(pair, ids, args.max_new_tokens, args.seed)
    law = {"temperature": args.temperature, "cuts": cuts, "batch": args.batch}

    def answered(policy: str, group: int) -> Row:
        config = Config(policy, args.num_draft_tokens, args.verifier, **law)
        return _answered(harness, config, group, prompts, score)

    jobs = {f"{policy} {group}": partial(answered, policy, group)
            for policy in policies for group in range(-(-len(ids) // args.batch))}  # fmt: skip
    with Journal(args.out / "journal.jsonl", settings) as journal:
        results = filled(jobs, journal, "batches")
    sums = {policy: _sums([own for key, own in results.items() if key.rpartition(" ")[0] == policy],
                          len(prompts)) for policy in policies}  # fmt: skip
    rows = by_prompt(sums, [prompt.columns.get("category", "") for prompt in prompts])
    publish(args, rows, args.out / "by_prompt.csv", dtype=pair.dtype)
    table = table_of(rows)
    publish(args, table, args.out / "laws.csv", dtype=pair.dtype)
    _print(table, args.prompts.name)
    return 0


def _print(table: list[Row], title: str) -> None:
    shown = ("policy", "which", "prompts", "tokens_per_call", "over_lossless", "over_first", "nats",
             "surprise", "tokens_per_answer", "ended", "score", "difference")  # fmt: skip
    print(columns(table, {name: name.replace("_", " ") for name in shown}, title))


def _word(prompt: Prompt, text: str) -> float:
    """Return 1 if the word of the column ``answer`` stands in the text by itself, in any case."""
    if "answer" not in prompt.columns:
        raise ValueError(f"--score: word needs the column answer; got {[*prompt.columns]}")
    return float(holds(text, str(prompt.columns["answer"]).strip()))


def holds(text: str, word: str) -> bool:
    """Return whether a word, or some, stands in a text by itself, in letters of any case."""
    return bool(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


def _answered(
    harness: Harness, config: Config, group: int, prompts: list[Prompt], score: Score | None
) -> Row:
    """Return the sums of each answer of a batch, with the index of its prompt."""
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
    """Return SUMS of each prompt, (prompts, 8); not a number where one is not known."""
    total = np.zeros((count, len(SUMS)))
    for at, *own in (row for record in records for row in record["rows"]):
        total[at] += np.array(own, dtype=np.float64)
    return total


def by_prompt(sums: dict[str, np.ndarray], categories: Sequence[str]) -> list[Row]:
    """Return a row a policy and prompt, with the prompt's category; None for what is not known."""
    return [{"policy": policy, "prompt": prompt, "category": categories[prompt]}
            | {name: None if math.isnan(one) else float(one)
               for name, one in zip(SUMS, own, strict=True)}
            for policy, total in sums.items() for prompt, own in enumerate(total)]  # fmt: skip


def table_of(rows: Sequence[Row]) -> list[Row]:
    """Return rows of policies: over all prompts, those whose answers all ended, each category."""
    sums: dict[str, list[list[float]]] = {}
    for row in rows:
        known = [math.nan if row[name] in ("", None) else float(row[name]) for name in SUMS]
        sums.setdefault(row["policy"], []).append(known)
    every = {policy: np.array(own) for policy, own in sums.items()}
    ended = np.all([own[:, 0] == own[:, 1] for own in every.values()], 0)
    categories = np.array([row["category"] for row in rows[: len(ended)]])
    parts = {"all": np.ones(len(ended), bool), "complete": ended}
    parts |= {name: categories == name for name in dict.fromkeys(categories.tolist())}
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
        row["shown_by_80_percent"] = (TWO_SIDED + POWER) * less.standard_error
        table.append({name: None if value != value else value for name, value in row.items()})
    return table


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
