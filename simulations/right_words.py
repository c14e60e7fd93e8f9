"""How often short answers hold the right word, under several policies with common coins. Resumes.

Facts are asked freely, without a beginning, so many times each; an answer is right if the word
stands in it. Coins of an answer depend on its question and its number alone, so that policies are
compared answer by answer. Errors are over questions, and differences to lossless sampling paired.
"""

import argparse
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cactus_theory.base import defaults
from cactus_theory.base.prompts import prompts_of
from cactus_theory.commands import models
from cactus_theory.commands.flags import add_chat, add_policy, rendered_ids
from cactus_theory.policies import read_policy
from cactus_theory.traces.estimate import ratio_of_sums

from .common.decode import Harness
from .common.grid import Config
from .common.inputs import PAIR, at_least, settings_of
from .common.journal import Journal, filled
from .common.results import columns, estimates, publish
from .references import FACTS, LOSSLESS

# normal quantiles of a two-sided test at 5 % and of a power of 80 %
TWO_SIDED, POWER = 1.96, 0.84


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    models.add_models(parser, target=PAIR / "target", draft=PAIR / "draft")
    add("--facts", type=Path, default=FACTS, metavar="FILE", help="JSON lines: prompt and answer")
    add_chat(parser)
    add("--num-facts", type=int, default=300, help="its first ones")
    add("--answers", type=int, default=12, metavar="N", help="to each question")
    add("--max-new-tokens", type=int, default=24, metavar="N", help="of an answer")
    add("--num-draft-tokens", type=int, default=2, metavar="K")
    add("--batch", type=int, default=50, metavar="B", help="answers that are decoded at once")
    add("--seed", type=int, default=defaults.SEED)
    add_policy(parser, "beside lossless sampling", default=["band:price=1"])
    add("--out", type=Path, default=Path("build/right-words"), metavar="DIR")
    parser.set_defaults(eos_token_ids=None, no_start=False, threads=1)


def run(args: argparse.Namespace) -> int:
    at_least(args, num_facts=2, answers=1, batch=1, num_draft_tokens=1, max_new_tokens=1)
    prompts = prompts_of(args.facts, "--facts")[: args.num_facts]
    words = [str(prompt.columns["answer"]).strip() for prompt in prompts]
    policies = [*dict.fromkeys([LOSSLESS, *(read_policy(own).spec for own in args.policy)])]
    pair = models.loaded(args)
    ids = rendered_ids(args, pair.tokenizer, prompts) * args.answers
    args.out.mkdir(parents=True, exist_ok=True)
    flags = "num_facts", "answers", "num_draft_tokens", "batch"
    settings = settings_of(args, prompts, *flags, methods=policies)
    harness = Harness(pair, ids, args.max_new_tokens, args.seed)
    groups = range(-(-len(ids) // args.batch))

    def judged(policy: str, group: int) -> dict[str, Any]:
        config = Config(policy, args.num_draft_tokens, "chain", batch=args.batch)
        asked = [words[at % len(words)] for at in harness.group(args.batch, group)]
        return _judged(harness, config, group, asked, pair.tokenizer)

    jobs = {f"{policy} {group}": partial(judged, policy, group)
            for policy in policies for group in groups}  # fmt: skip
    with Journal(args.out / "journal.jsonl", settings) as journal:
        results = filled(jobs, journal, "batches")
    rows = [[results[f"{policy} {group}"] for group in groups] for policy in policies]
    table = _table(policies, rows, len(words))
    publish(args, table, args.out / "right_words.csv", dtype=pair.dtype)
    shown = "policy", "right", "difference", "nats", "tokens_per_call", "shown_by_80_percent"
    print(columns(table, {name: name.replace("_", " ") for name in shown}, str(args.facts.name)))
    return 0


def _judged(harness: Harness, config: Config, group: int, words: list[str], read: Any) -> Any:
    """Return which answers of a batch are right, and its tokens, calls and nats."""
    done = harness.decode(config, group, meter=True)
    texts = [read.decode(own, skip_special_tokens=True) for own in done.outputs]
    right, own = [*map(holds, texts, words)], done.record
    return {"right": right, "sums": [own["tokens"], own["row_calls"], own["kl"]]}


def holds(text: str, word: str) -> bool:
    """Return whether a word, or some, stands in a text by itself, in letters of any case."""
    return bool(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


def _table(policies: list[str], results: list[Any], questions: int) -> list[dict[str, Any]]:
    """Return a row a policy; a true difference of ``shown_by_80_percent`` is shown so often."""
    every = [np.array(sum((one["right"] for one in own), []), float) for own in results]
    shares = [own.reshape(-1, questions).mean(0) for own in every]
    ones, rows = np.ones(questions), []
    for policy, share, own in zip(policies, shares, results, strict=True):
        tokens, calls, nats = np.sum([one["sums"] for one in own], 0)
        right = ratio_of_sums(share, ones, "facts")
        less = ratio_of_sums(share - shares[0], ones, "facts")
        row = {"policy": policy, "questions": questions, "answers": len(every[0])}
        row |= estimates(right=right, difference=less)
        row |= {"shown_by_80_percent": (TWO_SIDED + POWER) * less.standard_error}
        rows.append(row | {"nats": nats / tokens, "tokens_per_call": tokens / calls})
    return rows
