"""A hard cap on every answer against a constant price with the same mean: cost, and who exceeds.

A band at a constant price spends its mean *on average*; single answers exceed it. A ledger
spends at most the cap on each answer, at every length. Both decode the same prompts with the
same seeds. Tokens per target call are compared at equal emitted KL: the band's are read off a
straight line between its prices. Standard errors leave out one group of prompts at a time.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from cactus_theory.decoding import Ledger, load_pair

from ..common.decode import Harness
from ..common.grid import Config
from ..common.inputs import DATA, add_pair_arguments, load_prompts
from ..common.journal import Journal, add_journal_arguments, fill
from ..common.run import columns, publish
from .table import Answers, Line, along, rows_of

LOOSEST = "band:price=0.5"
SHOWN = {
    "verifier": "verifier",
    "kind": "kind",
    "setting": "price\nor cap",
    "kl_per_token": "KL a\ntoken",
    "used": "of the\ncap",
    "largest_answer": "largest\nanswer",
    "over": "answers\nover mean",
    "tokens_per_call": "tokens\na call",
    "ratio": "× band at\nequal KL",
    "ratio_se": "±",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_pair_arguments(parser)
    add = parser.add_argument
    add("--price", type=float, nargs="+", default=[4, 2.8, 2, 1.4, 1, 0.7, 0.5], help="of bands")
    add("--cap", type=float, nargs="+", default=[0.01, 0.02, 0.05, 0.1], help="nats a token")
    add("--policy", default=LOOSEST, help="that ledgers follow while they can")
    add("--verifier", nargs="+", default=["chain", "block"])
    add("--num-draft-tokens", type=int, default=4, help="K")
    add("--max-new-tokens", type=int, default=64)
    add("--repeats", type=int, default=4, help="passes over the prompts, with other seeds")
    add("--work", type=Path, default=Path("build/ledger"), help="folder of the journal")
    add("--out", type=Path, default=DATA, help="folder of the two CSV")
    add_journal_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Decode, write ``ledger.csv`` and ``ledger_answers.csv``, and print the first."""
    if args.repeats < 1:
        raise ValueError(f"--repeats: must be at least 1; got {args.repeats}")
    found = [line for verifier in args.verifier for line in lines(args, verifier)]
    policies = {line.key: policy_of(line, args.policy) for line in found}
    prompts = load_prompts(args.prompts, args.target)
    settings = {
        name: str(getattr(args, name))
        for name in ("target", "draft", "prompts", "policy", "num_draft_tokens", "max_new_tokens")
    }
    todo = {f"{line.key}|{again}": (line, again) for again in range(args.repeats) for line in found}
    with Journal(args.work / "journal.jsonl", settings, args.set_aside_damaged) as journal:
        if todo.keys() - journal.results:
            pair = load_pair(args.target, args.draft)
            harness = Harness(pair, prompts, args.max_new_tokens, seed=0)

            def decoded(one: tuple[Line, int]) -> dict[str, Any]:
                line, again = one
                config = Config(line.key, args.num_draft_tokens, len(prompts), line.verifier)
                return answered(harness, config, policies[line.key], again)

            fill(todo, decoded, journal, "decoding", lambda one: one[0].key)
        answers = {line: _answers(journal, line.key, args.repeats) for line in found}
    rows = rows_of(answers, len(prompts))
    publish(args, rows, args.out / "ledger.csv")
    publish(args, list(along(answers)), args.out / "ledger_answers.csv")
    print(columns(rows, SHOWN))
    print(f"largest answer and over: spend a token at some length; {args.out}/ledger*.csv")
    return 0


def lines(args: argparse.Namespace, verifier: str) -> list[Line]:
    """Return the lines of one verifier: bands, then ledgers."""
    return [Line(verifier, "band", price) for price in args.price] + [
        Line(verifier, "ledger", cap) for cap in args.cap
    ]


def policy_of(line: Line, loosest: str) -> Any:
    """Return the policy or schedule of a line."""
    return f"band:price={line.setting!r}" if line.kind == "band" else Ledger(loosest, line.setting)


def answered(harness: Harness, config: Config, policy: Any, again: int) -> dict[str, Any]:
    """Return what each answer of one pass cost, token by token, and its target calls."""
    result = harness.decode(config, 0, again=again, meter=True, policy=policy).result
    assert result is not None and result.token_kl is not None
    costs = [
        own[:length]
        for own, length in zip(result.token_kl.tolist(), result.row_lengths, strict=True)
    ]
    return {"costs": costs, "calls": [own.num_calls for own in result.readings()]}


def _answers(journal: Journal, key: str, repeats: int) -> Answers:
    passes = [journal.results[f"{key}|{repeat}"] for repeat in range(repeats)]
    costs = [np.array(own) for one in passes for own in one["costs"]]
    return Answers(costs, np.array([own for one in passes for own in one["calls"]]))
