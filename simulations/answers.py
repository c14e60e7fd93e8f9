"""Lengths of Markov models' texts under lossy policies: exact, with an end and no limit.

A random target and its draft over V tokens, whose next row depends on the last token; the draft
is off by noise in the logits, so it ends texts sooner or later than the target. Each policy's
knob is solved so that the meter reads the same nats a token. One row a model, policy and level.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.base.roots import rising_root
from cactus_theory.base.terminal import Progress
from cactus_theory.divergences import divergence
from cactus_theory.emitted import raised_off_head
from cactus_theory.policies import Policy
from cactus_theory.policies import policy as find_policy
from cactus_theory.tuning.families import SLOPE, TOLERANCE, Family, families
from cactus_theory.verify.contract import find_verifier

from .common.inputs import at_least
from .common.results import publish
from .markov.pair import TinyPair, markov_pair
from .markov.rounds import drafted_rounds

# the token that ends a text, and the state it starts in
END = 0
# most factor by which the end is made rarer or likelier, and the last relative step of a knob
RARE, SETTLED = 1e9, 1e-6
POLICIES = "band:price", "band:price,head=0.2", "cactus:delta", "lenience:lenience"
Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--vocab", type=int, default=6, metavar="V")
    add("--num-draft-tokens", type=int, default=3, metavar="K")
    add("--models", type=int, default=16, help="random pairs, with seeds 0, 1, …")
    add("--length", type=float, default=60, metavar="TOKENS", help="of a lossless text, on average")
    add("--level", type=float, nargs="+", default=[0.02, 0.05, 0.1, 0.4], help="nats a token")
    add("--policies", nargs="+", default=list(POLICIES))
    add("--out", type=Path, default=Path("build/answers_markov.csv"), metavar="FILE.csv")


def run(args: argparse.Namespace) -> int:
    """Solve every model and write the table; return 0."""
    at_least(args, vocab=3, num_draft_tokens=1, models=2)
    kinds = [kind for name in args.policies for kind in _family(name)]
    rows: list[Row] = []
    with Progress("solving models", args.models) as progress:
        for seed in range(args.models):
            rows += _rows(args, seed, kinds)
            progress.advance()
    publish(args, rows)
    print(f"written to {args.out}")
    return 0


def ending_pair(vocab: int, seed: int, length: float) -> TinyPair:
    """Return a random pair whose target writes ``length`` tokens on average, the end included.

    In every row of both the end's probability is multiplied by the same before they are normalised.
    """
    pair = markov_pair(vocab, seed=seed, sharpness=1.5, distance=1.5)

    def ended(by: float) -> TinyPair:
        scale = torch.ones(vocab, dtype=torch.float64)
        scale[END] = by
        target, draft = (scale * rows for rows in (pair.target, pair.draft))
        rows = target / target.sum(-1, keepdim=True), draft / draft.sum(-1, keepdim=True)
        return TinyPair(*rows, pair.following)

    def over(rarity: float) -> float:
        return own_length(ended(1 / rarity).target) - length

    return ended(1 / rising_root(over, 1 / RARE, RARE, 1.0, SETTLED**2)[0])


def own_length(rows: Float[Tensor, "states vocab"]) -> float:
    """Return the mean length of the texts of a model whose state is the last token."""
    going = rows.clone()
    going[:, END] = 0.0
    return float(_visited(going, torch.ones(len(rows), 1, dtype=rows.dtype))[0])


def _visited(
    going: Float[Tensor, "states states"], each: Float[Tensor, "states columns"]
) -> Float[Tensor, "columns"]:
    """Return the sum of ``each`` over visits of states until texts end."""
    return torch.linalg.solve(torch.eye(len(going), dtype=going.dtype) - going, each)[END]


@dataclass(frozen=True)
class Expected:
    """Means over texts: tokens, target calls, metered KL in nats, mass raised off the head."""

    tokens: float
    calls: float
    meter: float
    raised: float


def expected(pair: TinyPair, policy: Policy, width: int) -> Expected:
    """Return the means of a decode that drafts ``width`` tokens a round until the text ends."""
    states = torch.arange(len(pair.target))
    judge = find_verifier("chain")
    rounds = drafted_rounds(pair, states, width, (policy,), judge).cut(END)
    going = torch.zeros(len(states), len(states), dtype=torch.float64)
    sums = torch.zeros(len(states), 4, dtype=torch.float64)
    sums[:, 1] = 1.0
    before = states[:, None]  # after each text of the round so far
    for place, chance in enumerate(rounds.ends):
        if place < width:
            q, law, alive = pair.target[before], rounds.following[place], rounds.alive[place]
            sums[:, 2] += (alive * rounds.charges[place]).sum(-1)
            sums[:, 3] += (alive * raised_off_head(law, q)).sum(-1)
        before = pair.following[before].flatten(1)
        sums[:, 0] += (place + 1) * chance.sum(-1)
        ended = torch.arange(chance.shape[1]) % pair.vocab == END
        going.scatter_add_(1, before, chance * ~ended)
    return Expected(*_visited(going, sums).tolist())


def _family(name: str) -> Iterator[Family]:
    """Yield the family of ``NAME:KNOB`` token by token, more knobs at the values they have."""
    first, comma, others = name.partition(",")
    for kind in families(divergence("kl"), [first]):
        if kind.verifier == "chain" and not kind.lossless:
            yield replace(kind, name=name, template=kind.template + comma + others)


def _rows(args: argparse.Namespace, seed: int, kinds: list[Family]) -> Iterator[Row]:
    pair = ending_pair(args.vocab, seed, args.length)
    width, draft = args.num_draft_tokens, own_length(pair.draft)
    lossless = expected(pair, find_policy("speculative"), width)
    for kind in kinds:
        for level in args.level:
            policy, made = solved(pair, kind, width, level)
            if abs(made.meter / made.tokens / level - 1) > TOLERANCE:
                continue  # accepting all drafts costs less
            yield {
                "model": seed, "family": kind.name, "policy": policy.spec, "level": level,
                "kl_per_token": made.meter / made.tokens,
                "length_ratio": made.tokens / lossless.tokens,
                "draft_ratio": draft / lossless.tokens,
                "raised_off_head_per_1000": 1000 * made.raised / made.tokens,
                "tokens_per_call": made.tokens / made.calls,
                "tokens_per_call_lossless": lossless.tokens / lossless.calls,
            }  # fmt: skip


def solved(pair: TinyPair, kind: Family, width: int, level: float) -> tuple[Policy, Expected]:
    """Return a family's policy that meters ``level`` nats a token, or its loosest; its means."""

    def over(looseness: float) -> float:
        made = expected(pair, kind.policy(looseness), width)
        return made.meter / made.tokens - level

    ends = kind.least, kind.most, kind.first
    policy = kind.policy(rising_root(over, *ends, SETTLED, SLOPE * level)[0])
    return policy, expected(pair, policy, width)
