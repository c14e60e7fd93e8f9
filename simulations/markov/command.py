"""Enumerate the law of whole texts of a tiny random Markov pair, policy by policy.

For every policy, verifier and K: tokens per target call, KL and total variation of the whole
text from the target's law, and the expected meter, which bounds that KL. The KL is found in two
ways, from the law of texts and token by token, which must agree. With ``--rates`` instead: how
often each place of a draft is accepted in a long text, and with ``--most`` the tokens per call
that no way to verify can exceed at the same metered KL per token (a convex program).
"""

import argparse
import json
import math
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

from cactus_theory.base.terminal import Progress
from cactus_theory.verify.contract import verifiers
from solvers import decode

from ..common.grid import checked_policy, label
from ..common.results import columns, publish
from .pair import Setting, TinyPair, markov_pair
from .rounds import every_round, long_run_rates
from .texts import enumerate_texts, follow_places

POLICIES = (
    "speculative",
    "cactus:delta=0.1",
    "band:delta=0.1",
    "band:price=1",
    "lenience:lenience=0.7",
    "mixture:alpha=0.5",
    "typical",
)
OUT, RATES_OUT = Path("build/markov.csv"), Path("build/markov_rates.csv")
# nats by which the two ways to the KL may differ: bands are roots, found to about 1e-14
AGREEMENT = 1e-9
WIDEST = 100  # columns of what is printed
SHOWN = {
    "policy": "policy",
    "verifier": "verifier",
    "num_draft_tokens": "K",
    "tokens_per_call": "tokens\nper call",
    "kl": "KL of\nthe text",
    "meter": "expected\nmeter",
    "slack": "meter\n− KL",
    "total_variation": "total\nvariation",
}
RATES_SHOWN = {
    "policy": "policy",
    "verifier": "verifier",
    "num_draft_tokens": "K",
    "mean_acceptance_length": "tokens\nper call",
    "marginal_acceptance_rates": "Pr(token i is accepted)",
    "conditional_acceptance_rates": "given all before it",
    "emitted_kl_per_token": "meter\nper token",
    "most_tokens_per_call": "no verifier\nexceeds",
}
RATE_DIGITS = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--vocab", type=int, default=3, help="V, tokens of the vocabulary")
    add("--order", type=int, default=1, help="the next row depends on so many tokens")
    add("--length", type=int, default=6, help="T, tokens of a text")
    add("--num-draft-tokens", type=int, nargs="+", default=[1, 2, 4], help="K")
    add("--seed", type=int, default=0, help="of the random rows")
    add("--sharpness", type=float, default=1.0, help="deviation of the target's logits")
    add("--distance", type=float, default=1.0, help="deviation of the draft's from them")
    add("--zeros", type=float, default=0.0, help="share of the entries that are 0")
    add("--end", type=int, help="a token that ends the text")
    add("--policy", nargs="+", default=list(POLICIES), help="specs, or FILE.py:NAME")
    add("--verifier", nargs="+", default=["chain", "block"], choices=verifiers())
    add("--rates", action="store_true", help="acceptance by place instead, in long texts")
    add("--most", action="store_true", help="with --rates: the most of any free-bonus verifier")
    add("--out", type=Path, help=f"the CSV ({OUT}, {RATES_OUT})")


def run(args: argparse.Namespace) -> int:
    """Print the table and write the CSV."""
    dials = ("order", "seed", "sharpness", "distance", "zeros")
    pair = markov_pair(args.vocab, **{name: getattr(args, name) for name in dials})
    cases, refused = settings(args)
    if args.most and not args.rates:
        raise ValueError("--most: must come with --rates, as it is about long texts")
    figures, heads = (rated, RATES_SHOWN) if args.rates else (measured, SHOWN)
    if args.most:
        figures = partial(rated, most=True)
    out = args.out or (RATES_OUT if args.rates else OUT)
    rows = []
    with Progress("enumerating", len(cases)) as progress:
        for spec, setting in cases:
            rows.append({"policy": ":".join(filter(None, label(spec))), **figures(pair, setting)})
            progress.advance(spec)
    publish(args, rows, out)
    heads = {name: head for name, head in heads.items() if name in rows[0]}
    print(columns(rows, heads))
    for line in [*refused, f"nats; {len(rows)} rows in {out}"]:
        print(textwrap.fill(line, WIDEST))
    return 0


def settings(args: argparse.Namespace) -> tuple[list[tuple[str, Setting]], list[str]]:
    """Return every case, under its policy's name, and what verifiers say to policies they refuse.

    ValueError for numbers outside their range, an unknown policy, no case at all.
    """
    cases, refused = [], []
    for spec in map(checked_policy, args.policy):
        for verifier in args.verifier:
            for width in args.num_draft_tokens:
                try:
                    case = Setting(spec, width, args.length, verifier, args.end)
                except ValueError as error:
                    if not str(error).startswith("verifier: "):
                        raise
                    refused.append(str(error))
                else:
                    cases.append((spec, case))
    if not cases:
        raise ValueError(f"--policy: must fit one of the verifiers; {refused[0]}")
    return cases, list(dict.fromkeys(refused))


def measured(pair: TinyPair, setting: Setting) -> dict[str, Any]:
    """Return the figures of one case.

    RuntimeError if two ways to one KL, or to one expected meter, do not agree.
    """
    starts = every_round(pair, setting)
    texts, places = enumerate_texts(pair, setting, starts), follow_places(pair, setting, starts)
    for name, total, by_token in (
        ("kl", texts.kl, sum(places.kl)),
        ("meter", texts.meter.mean, sum(places.metered)),
    ):
        if total != by_token and not abs(total - by_token) <= AGREEMENT:
            raise RuntimeError(f"{name}: must be the sum over tokens {by_token!r}; got {total!r}")
    return {
        "verifier": setting.judge.name,
        "num_draft_tokens": setting.num_draft_tokens,
        "tokens_per_call": texts.tokens_per_call,
        "kl": texts.kl,
        "meter": texts.meter.mean,
        "slack": _finite(texts.slack),
        "total_variation": texts.total_variation,
        "tokens": texts.tokens,
        "calls": texts.calls.mean,
        "calls_deviation": texts.calls.deviation,
        "meter_deviation": _finite(texts.meter.deviation),
    }


def rated(pair: TinyPair, setting: Setting, most: bool = False) -> dict[str, Any]:
    """Return acceptance by place in long texts; lists are JSON, 0 where none ever gets.

    With ``most`` also the most tokens per call, at the same meter per token, of any verifier whose
    bonus tokens are the target's.
    """
    rates = long_run_rates(pair, setting)
    lists = {"marginal_acceptance_rates": rates.marginal}
    lists |= {"conditional_acceptance_rates": rates.conditional}
    return {
        "verifier": setting.judge.name,
        "num_draft_tokens": setting.num_draft_tokens,
        "mean_acceptance_length": rates.mean_acceptance_length,
        **{
            name: json.dumps([round(_finite(value) or 0.0, RATE_DIGITS) for value in values])
            for name, values in lists.items()
        },
        "emitted_kl_per_token": _finite(rates.metered),
        **({"most_tokens_per_call": _most(pair, setting, rates.metered)} if most else {}),
    }


def _most(pair: TinyPair, setting: Setting, per_token: float) -> float:
    """Return the bound of the decode program at a budget; what lossless rounding spends is 0."""
    solved = decode.solve(
        pair.target,
        pair.draft,
        setting.num_draft_tokens,
        per_token=per_token if per_token > AGREEMENT else 0.0,
        following=pair.following.numpy(),
    )
    return solved.bound


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
