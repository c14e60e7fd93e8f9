"""Measure lengths of answers under a policy, beside lossless answers to the same prompts. Resumes.

Every token is drawn from the emitted law itself (``simulations/common/walk.py``), without rounds.
The knobs were solved by ``price-travels`` on rows at temperature 1; the band is also run with the
end token's probability floored and held. Along the texts, the table has the probability of the end
token under the law and the target, acceptance, nats, and the expected calls of a chain that drafts
K tokens and emits such a text. Every law's probability of the end token is also measured along the
lossless texts, to see whether it predicts lengths. The table is written after every setting. Errors
are the jackknife's over prompts. Columns *adjusted* use a control variate that removes chance
differences in when answers ended.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cactus_theory.base.significance import items_needed
from cactus_theory.commands.flags import Repeated
from cactus_theory.decoding.options import own_ends
from cactus_theory.policies import Policy, read_policy
from cactus_theory.traces.estimate import Estimate, ratio_of_sums
from cactus_theory.verify.node import Node

from .common.inputs import at_least
from .common.journal import filled
from .common.results import columns, estimates, publish, read_csv, values_of
from .common.walk import Step, add_walk_arguments, laws_of, opened_walk, walked

BAND = "band:price"
FAMILIES = BAND, "lenience:lenience", "cactus:delta", "band:price,head=0.2"
Row = dict[str, Any]
Sums = dict[str, np.ndarray]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_walk_arguments(parser, num_prompts=48, max_new_tokens=512, out="build/lengths")
    add("--knobs", type=Path, required=True, metavar="FILE.csv", help="table of price-travels")
    add("--nats", type=float, nargs="+", default=[0.05], help="nats a token, among the table's")
    add("--policy", action=Repeated, default=list(FAMILIES), metavar="NAME:KNOB", help="likewise")
    add("--answers", type=int, default=32, help="to each prompt")
    add("--together", type=int, default=8, help="answers to each prompt in a batch")


def run(args: argparse.Namespace) -> int:
    at_least(args, answers=1, together=1, num_prompts=2, num_draft_tokens=1, max_new_tokens=1)
    named = list(_settings(args))
    pair, ids, kept = opened_walk(args, "together")
    ends, passes = sorted(own_ends(pair.target)), range(0, args.answers, args.together)
    lossy = [read_policy(spec).at_ends(ends) for _, spec in named[1:]]
    made: list[tuple[Row, Sums]] = []
    texts = ids * args.together

    def written(policy: Policy, start: int) -> Row:
        coins = torch.Generator().manual_seed(args.seed + start)
        steps = walked(pair, texts, policy, args.max_new_tokens, coins)
        return _sums(steps, ends, len(texts), args, () if made else lossy)

    with kept as journal:
        for level, spec in named:
            policy = read_policy(spec).at_ends(ends)
            jobs = {f"{policy.spec} from {start}": partial(written, policy, start)
                    for start in passes}  # fmt: skip
            sums = [*filled(jobs, journal, f"writing answers, {policy.spec}").values()]
            total = {name: np.sum([one[name] for one in sums], 0) for name in sums[0]}
            made.append(({"policy": policy.spec, "level": level}, total))
            rows = [about | _row(own, made[0][1], about["policy"]) for about, own in made]
            publish(args, rows, args.out / "lengths.csv", dtype=pair.dtype)
    print(columns(rows, values_of(rows), f"{args.out / 'lengths.csv'}"))
    return 0


def _settings(args: argparse.Namespace) -> Iterator[tuple[float, str]]:
    """Yield (level, policy): the lossless policy, then the policies of a table of price-travels."""
    yield 0.0, "speculative"
    rows, needed = read_csv(args.knobs)[0], ("law", "family", "level", "knob")
    if not rows or any(row.get(name) is None for row in rows for name in needed):
        raise ValueError(f"--knobs: must have columns {', '.join(needed)}; got {args.knobs}")
    for level in args.nats:
        for family in args.policy:
            asked = "speculative", family, level
            knobs = [row["knob"] for row in rows
                     if (row["law"], row["family"], float(row["level"])) == asked]  # fmt: skip
            if not knobs:
                known = f"{args.knobs.name} must hold {family} at {level} without another law"
                raise ValueError(f"--knobs: {known}; got no such line")
            name, comma, more = family.partition(",")
            spec = f"{name}={float(knobs[0]):.6g}{comma}{more}"
            boxes = ("", ",floor=eos", ",hold=eos") if family == BAND else ("",)
            yield from ((level, spec + box) for box in boxes)


def _sums(
    steps: Iterator[Step],
    ends: Sequence[int],
    texts: int,
    args: argparse.Namespace,
    others: Sequence[Policy] = (),
) -> Row:
    """Return sums over the answers to each prompt: tokens, ends, probabilities, nats, calls.

    The result also has, for each of ``others`` under its spec, the sum of the probabilities that
    this policy's emitted law gives to end tokens after the same prefixes.
    """
    sums, ended, foretold = np.zeros((5, texts)), np.zeros(texts), np.zeros((len(others), texts))
    kept: list[list[float]] = [[] for _ in range(texts)]
    for at, q, p, laws, tokens in steps:
        pairs = zip(laws, tokens.tolist(), strict=True)
        h_n = torch.tensor([node.h(token) for node, token in pairs], dtype=torch.float64)
        charges = np.array([node.charge()[:2] for node in laws]).T
        chance_of_end = q[:, ends].double().sum(-1).cpu().numpy(), _ends(laws, ends)
        sums[:, at] += np.stack([np.ones(len(at)), charges[1], charges[0], *chance_of_end])
        ended[at] = np.isin(tokens.cpu().numpy(), ends)
        for sums_of_other, other in zip(foretold, others, strict=True):
            sums_of_other[at] += _ends(laws_of(other, q, p), ends)
        drafted = p.gather(1, tokens[:, None])[:, 0].double().cpu()
        accepted = torch.minimum(h_n, drafted) / h_n
        for text, chance in zip(at, accepted.tolist(), strict=True):
            kept[text].append(chance)
    calls = [expected_calls(chances, args.num_draft_tokens) for chances in kept]
    names = "tokens", "accepted", "kl", "end_target", "end_emitted", "ended", "calls", "answers"
    names = *names, *(other.spec for other in others)
    every = np.stack([*sums, ended, calls, np.ones(texts), *foretold])
    by_prompt = every.reshape(len(names), args.together, -1).sum(1)
    return dict(zip(names, by_prompt.tolist(), strict=True))


def _ends(laws: Sequence[Node], ends: Sequence[int]) -> np.ndarray:
    """Return the probability of the end tokens under the laws at nodes."""
    return np.array([math.fsum(map(node.h, ends)) for node in laws])


def expected_calls(chances: Sequence[float], width: int) -> float:
    """Return the mean number of target calls of a chain, given the text that the chain emits.

    ``chances[i]`` is the probability that token i of the text is an accepted drafted token, if a
    token was drafted at its place. Given the text, these events are independent. A call drafts
    ``width`` tokens and adds one token. The recursion runs over the tokens of the text, and updates
    the distribution of the number of tokens accepted so far in the current call.
    """
    calls, within = 0.0, np.eye(width + 1)[0]  # within[i]: i tokens accepted so far in this call
    for chance in chances:
        calls += within[0]
        going = within[:width] * chance
        within = np.concatenate([[1.0 - going.sum()], going])
    return calls


def _row(own: Sums, lossless: Sums, spec: str) -> Row:
    """Return a policy's row: means over answers, and ratios to lossless answers by prompt."""

    def mean(sums: Sums, above: str, below: str = "answers") -> Estimate:
        return ratio_of_sums(sums[above], sums[below], "prompts")

    ends = mean(own, "end_emitted", "tokens") / mean(own, "end_target", "tokens")
    row: Row = {"answers": int(own["answers"].sum()), "cut": 1 - mean(own, "ended").value}
    ratio = mean(own, "tokens") / mean(lossless, "tokens")
    fair = [[mean(_adjusted(sums), of) for sums in (own, lossless)] for of in ("tokens", "calls")]
    row |= estimates(
        length=mean(own, "tokens"), length_ratio=ratio,
        length_ratio_adjusted=fair[0][0] / fair[0][1],
        calls_ratio_adjusted=fair[1][0] / fair[1][1],
    )  # fmt: skip
    prompts = len(own["answers"])
    row["prompts_needed"] = items_needed(ratio.value - 1, ratio.standard_error, prompts)
    # a resumed run may have other levels than the lossless answers were measured with
    known = "end_emitted" if own is lossless else spec
    foretold = mean(lossless, known, "end_target") if known in lossless else None
    return row | estimates(
        end_ratio=ends, end_ratio_at_lossless_texts=foretold,
        acceptance=mean(own, "accepted", "tokens"), kl_per_token=mean(own, "kl", "tokens"),
        calls_per_answer=mean(own, "calls"),
        calls_ratio=mean(own, "calls") / mean(lossless, "calls"),
    )  # fmt: skip


def _adjusted(sums: Sums) -> Sums:
    """Return the sums with tokens and calls adjusted by a control variate.

    The control variate is the number of ends minus the sum of their probabilities along the text,
    which has mean 0. The regression of tokens and calls on this variate is subtracted.
    """
    luck = sums["ended"] - sums["end_emitted"]
    around = luck - luck.mean()
    share = around / max((around**2).sum(), np.finfo(float).tiny)
    return sums | {of: sums[of] - (share @ sums[of]) * luck for of in ("tokens", "calls")}
