"""Laws on whole answers: sums by prompt, ratios paired by prompt, and scores if asked. Resumes.

Every policy answers the same prompts with the same verifier and K, at the knob that is given, so
many times each. Coins of an answer depend on its prompt and number alone. ``by_prompt.csv`` has
the sums of each policy and prompt, from which ``laws.csv`` is made: ± is the jackknife's standard
error over prompts; ``over_lossless`` and ``over_first`` are paired ratios to lossless decoding and
to the first policy, of tokens a call and of calls an answer. ``complete`` rows count those prompts
alone whose answers ended by themselves under every policy. Clocks are not read.
"""

import argparse
import re
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
from .common.results import columns, estimates, publish
from .scores import Score, score_of

# normal quantiles of a two-sided test at 5 % and of a power of 80 %
TWO_SIDED, POWER = 1.96, 0.84
# sums over a prompt's answers
SUMS = "answers", "ended", "tokens", "calls", "nats", "score"
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
    parser.set_defaults(threads=1)


def run(args: argparse.Namespace) -> int:
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
    rows = by_prompt(sums)
    publish(args, rows, args.out / "by_prompt.csv", dtype=pair.dtype)
    # greedy texts are compared with the argmax, not with a law that has a surprise
    known = {policy: _directions(results, policy) for policy in policies if args.temperature}
    table = table_of(rows, known)
    publish(args, table, args.out / "laws.csv", dtype=pair.dtype)
    shown = ("policy", "prompts", "tokens_per_call", "over_lossless", "over_first", "nats",
             "surprise", "tokens_per_answer", "ended", "score", "difference")  # fmt: skip
    print(columns(table, {name: name.replace("_", " ") for name in shown}, args.prompts.name))
    return 0


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
    """Return the sums of each answer of a batch, and the batch's surprise and agreement."""
    done, rows = harness.decode(config, group, meter=True), []
    assert done.result is not None
    whose = [at % len(prompts) for at in harness.group(config.batch, group)]
    answers = zip(whose, done.outputs, done.ended, done.result.readings(), strict=True)
    for at, output, ended, reading in answers:
        text = completion(harness.pair.tokenizer, harness.prompts[at], output)
        right = score(prompts[at], text) if score else 0.0
        spent = reading.emitted_divergence or 0.0
        rows.append([at, 1, int(ended), len(output), reading.num_calls, spent, right])
    whole = done.result.reading
    return {"rows": rows, "directions": [whole.num_tokens, whole.surprise, whole.agreement]}


def _sums(records: list[Row], count: int) -> np.ndarray:
    """Return SUMS of each prompt, (prompts, 6)."""
    total = np.zeros((count, len(SUMS)))
    for at, *own in (row for record in records for row in record["rows"]):
        total[at] += own
    return total


def _directions(results: dict[str, Row], policy: str) -> tuple[float | None, float | None]:
    """Return surprise and agreement a token; None where they are not known."""
    own = [record["directions"] for key, record in results.items()
           if key.rpartition(" ")[0] == policy]  # fmt: skip
    tokens = sum(one[0] for one in own)
    if any(None in one for one in own) or not tokens:
        return None, None
    return sum(one[1] for one in own) / tokens, sum(one[2] for one in own) / tokens


def by_prompt(sums: dict[str, np.ndarray]) -> list[Row]:
    """Return a row a policy and prompt."""
    return [{"policy": policy, "prompt": prompt} | dict(zip(SUMS, map(float, own), strict=True))
            for policy, total in sums.items() for prompt, own in enumerate(total)]  # fmt: skip


def table_of(rows: list[Row], directions: dict[str, Any]) -> list[Row]:
    """Return a row a policy: over all prompts, then over those whose answers all ended."""
    sums: dict[str, list[list[float]]] = {}
    for row in rows:
        sums.setdefault(row["policy"], []).append([float(row[name]) for name in SUMS])
    every = {policy: np.array(own) for policy, own in sums.items()}
    ended = np.all([own[:, 0] == own[:, 1] for own in every.values()], 0)
    table = _rows(every, np.ones(len(ended), bool), directions, "all")
    return table + (_rows(every, ended, {}, "complete") if 2 <= ended.sum() < len(ended) else [])


def _rows(
    every: dict[str, np.ndarray], among: np.ndarray, directions: dict[str, Any], which: str
) -> list[Row]:
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
        surprise, agreement = directions.get(policy, (None, None))
        table.append(row | {"surprise": surprise, "agreement": agreement})
    return table


def _means(own: np.ndarray) -> dict[str, Estimate]:
    answers, ended, tokens, calls, nats, score = own.T
    pairs = {
        "tokens_per_call": (tokens, calls),
        "calls_per_answer": (calls, answers),
        "tokens_per_answer": (tokens, answers),
        "nats": (nats, tokens),
        "ended": (ended, answers),
        "score": (score, answers),
    }
    return {name: ratio_of_sums(*pair, "prompts") for name, pair in pairs.items()}
