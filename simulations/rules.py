"""Price the lossy rules of engines and papers on one pair: tokens per call, nats per token.

At temperature 1 every rule is replayed on logged rows, of sampled and of greedy drafts, at its
engine's defaults and at published settings, with the whole text as between markers. Beside it stand
the band token by token and in blocks, at the same nats and at the same tokens; errors
count texts, differences are paired. FLy defers refusals: its nats are exact for greedy drafts, and
for sampled ones, where rows after undrafted tokens count, an estimate from drafting on with both
models. At temperature 0 no KL is finite: greedy rules get the share of tokens that they
change, which is the total variation of a token. vLLM's ``synthetic`` mode accepts by given rates
whatever was drafted: it is for load tests, has no law near a model's, and is not priced.
"""

import argparse
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

import cactus_theory as ct
from cactus_theory.base.terminal import Progress
from cactus_theory.decoding import generate
from cactus_theory.decoding.drafters import MODES, drafter_by
from cactus_theory.emitted import RaisedOffHead
from cactus_theory.policies.accepted_sets import Mars
from cactus_theory.traces import Estimate, Replay, Trace
from cactus_theory.traces.estimate import divergence_at, ratio_of_sums, tokens_at, valued
from cactus_theory.traces.log import log_shown
from cactus_theory.traces.replays import replay_widths
from cactus_theory.verify import Assignment, Draft, find_verifier

from .common.inputs import add_pair_arguments, at_least, opened
from .common.results import columns, publish
from .fly_nats import deferred_nats

# price in tokens per nat: from nearly lossless to nearly everything accepted
PRICES = (8.0, 4.0, 2.0, 1.2, 0.8, 0.5, 0.3, 0.17, 0.08)
# policies and verifier of each band, from lossless sampling on
BANDS = {
    name: [(spec, verifier) for spec in ("speculative", *(f"band:price={x:g}" for x in PRICES))]
    for name, verifier in (("band", "chain"), ("block", "block"))
}
METERED = {"kl_per_token": "kl", "tv_per_token": "total_variation",
           "raised_off_head_per_1000": RaisedOffHead()}  # fmt: skip
# columns with a standard error each; empty where a rule has no such number
COLUMNS = ("tokens_per_call", "tokens_ratio", *METERED, "changed_calls",
           *(f"{name}_{number}" for name in BANDS for number in ("tokens_at_kl", "kl_at_tokens"))
           )  # fmt: skip
# nats below are rounding
ROUNDING = 1e-9
NATS = (
    "KL of the emitted law from the target's row, per emitted token, bonus tokens free; FLy's for "
    "sampled drafts is estimated, on its own number of cycles; at temperature 0 tv_per_token is "
    "the share of tokens that were changed, changed_calls that of calls; _se over texts"
)
Row = dict[str, Any]
Numbers = Mapping[str, Estimate]
Replays = dict[tuple[str, str], dict[int, Replay]]


@dataclass(frozen=True)
class Rule:
    """A policy and a verifier as someone ships or publishes them: whose, which setting, specs."""

    engine: str
    setting: str
    policy: str
    verifier: str = "chain"


# rules of sampled drafts and a target at temperature 1; the whole text as between markers
SAMPLED = (
    Rule("TensorRT-LLM", "default k=1 δ=0", "relaxed:k=1,delta=0,recover=argmax"),
    Rule("TensorRT-LLM", "example k=10 δ=0.01", "relaxed:k=10,delta=0.01,recover=argmax"),
    Rule("ATOM", "k=10 δ=0.6", "relaxed:k=10,delta=0.6,recover=argmax"),
    Rule("ATOM", "earlier k=8 δ=0.5", "relaxed:k=8,delta=0.5,recover=argmax"),
    Rule("relaxed, then a draw", "k=10 δ=0.01", "relaxed:k=10,delta=0.01"),
    Rule("MAX", "default k=10 δ=0.6", "relaxed:k=10,delta=0.6"),
    Rule("SGLang", "default 1, 1", "thresholds"),
    Rule("SGLang", "acc 0.5", "thresholds:acc=0.5"),
    Rule("SGLang", "single 0.3, acc 0.3", "thresholds:single=0.3,acc=0.3"),
    Rule("SGLang", "single 0.1, acc 0.1", "thresholds:single=0.1,acc=0.1"),
    Rule("vLLM FLy", "default", "speculative", "fly"),
    Rule("vLLM FLy", "W=2", "speculative", "fly:window=2"),
)
AHEAD = sorted({rule.verifier for rule in SAMPLED if find_verifier(rule.verifier).defers})
# greedy drafts, a greedy target, rules that read the rows of temperature 1; ``top`` of MARS is
# taken from the raw logits of each row instead
GREEDY = "relaxed:k=1,delta=0.0,recover=argmax"
AT_ZERO = (
    Rule("all engines", "exact match", GREEDY),
    Rule("TensorRT-LLM", "default k=1 δ=0", GREEDY),
    Rule("TensorRT-LLM", "example k=10 δ=0.01", "relaxed:delta=0.01,recover=argmax"),
    Rule("MAX, ATOM", "default k=10 δ=0.6", "relaxed:recover=argmax"),
    Rule("ATOM", "earlier k=8 δ=0.5", "relaxed:k=8,delta=0.5,recover=argmax"),
    Rule("MARS", "θ=0.97", "mars:theta=0.97,top=1"),
    Rule("MARS", "θ=0.9", "mars:theta=0.9,top=1"),
    Rule("MARS", "θ=0.8", "mars:theta=0.8,top=1"),
    Rule("vLLM FLy", "default", GREEDY, "fly"),
    Rule("vLLM FLy", "W=2", GREEDY, "fly:window=2"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_pair_arguments(parser)
    add("--num-draft-tokens", type=int, nargs="+", default=[5, 8], metavar="K")
    add("--cycles", type=int, default=160, help="logged at temperature 1, at least so many")
    add("--ahead", type=int, default=128, help="of those, drafted on from for FLy's nats")
    add("--max-new-tokens", type=int, default=32, metavar="N", help="of a text")
    add("--greedy-prompts", type=int, default=8, help="prompts of the texts of temperature 0")
    add("--eos-token-ids", type=int, nargs="*", metavar="ID", help="default: the target's own")
    add("--seed", type=int, default=0)
    add("--work", type=Path, default=Path("build/rules"), metavar="DIR", help="for the trace")
    add("--out", type=Path, default=Path("build/rules.csv"), metavar="FILE.csv")


def run(args: argparse.Namespace) -> int:
    at_least(args, num_draft_tokens=2, cycles=1, ahead=2, max_new_tokens=1, greedy_prompts=2)
    pair, _, prompts = opened(args)
    widths = sorted(set(args.num_draft_tokens))
    rows: list[Row] = []
    for drafts in MODES:
        options = {"num_draft_tokens": max(widths), "draft_model": drafter_by(drafts, pair.draft)}
        options |= {
            name: getattr(args, name) for name in ("max_new_tokens", "seed", "eos_token_ids")
        }
        trace = log_shown(pair, prompts, args.work / drafts, args.cycles, **options)
        replays, estimates, count = _replays(trace, widths), {}, 0
        if trace.manifest.total("draft_rows"):  # else rows below other tokens do not count
            cases = list(itertools.product(AHEAD, widths))
            estimates, count = deferred_nats(
                pair, prompts, trace, cases, cycles=args.ahead, seed=args.seed
            )
        for width, rule in itertools.product(widths, SAMPLED):
            nats = estimates.get((rule.verifier, width))
            numbers = _priced(rule, width, replays, nats)
            rows.append(_row(1.0, drafts, rule, width, count if nats else len(trace), numbers))
    ends = trace.header.eos_token_ids
    for width in widths:
        greedy = (pair, prompts[: args.greedy_prompts], width, args.max_new_tokens)
        rows += _at_zero(width, list(drafted(*greedy, ends)), ends)
    publish(args, rows, nats=NATS)
    print(_tables(rows))
    return 0


def _replays(trace: Trace, widths: Sequence[int]) -> Replays:
    """Return (policy, verifier) → K → replay, of the rules and of the two bands."""
    rules = [(rule.policy, rule.verifier) for rule in SAMPLED]
    cases = dict.fromkeys(itertools.chain(rules, *BANDS.values()))
    sampled, replays = trace.manifest.total("draft_rows") > 0, Replays()
    with Progress("replaying", len(cases)) as progress:
        for policy, verifier in cases:
            kinds = () if sampled and verifier in AHEAD else tuple(METERED.values())
            replays[policy, verifier] = replay_widths(trace, policy, verifier, widths, kinds)
            progress.advance(policy)
    return replays


def _priced(rule: Rule, width: int, replays: Replays, nats: Numbers | None) -> Numbers:
    """Return the nats that a rule pays and that the bands could pay, at temperature 1."""
    replay = replays[rule.policy, rule.verifier][width]
    if nats is None:
        nats = {name: replay.divergence_per_token(kind) for name, kind in METERED.items()}
    tokens, kl = replay.tokens_per_call, nats["kl_per_token"]
    ratio = tokens / replays["speculative", "chain"][width].tokens_per_call
    numbers = {"tokens_per_call": tokens, "tokens_ratio": ratio, **nats}
    for name, cases in BANDS.items():
        family = [replays[case][width] for case in cases]
        lossless = family[0].tokens_per_call
        with suppress(ValueError):  # the family does not go that far
            numbers[f"{name}_tokens_at_kl"] = (
                tokens_at(family, kl) if kl.value > ROUNDING else lossless
            )
        with suppress(ValueError):
            numbers[f"{name}_kl_at_tokens"] = (
                divergence_at(family, tokens) if tokens.value > lossless.value else tokens - tokens
            )
    return numbers


def _at_zero(width: int, texts: list[Any], ends: list[int]) -> Iterator[Row]:
    """Yield the accepted and changed tokens of each greedy rule; the first rule is lossless."""
    source, calls = f"greedy texts, K={width}", sum(len(ids) for ids, _ in texts)
    counts = [counted(rule.policy, rule.verifier, texts, ends, source) for rule in AT_ZERO]
    for rule, numbers in zip(AT_ZERO, counts, strict=True):
        ratio = numbers["tokens_per_call"] / counts[0]["tokens_per_call"]
        yield _row(0.0, "greedy", rule, width, calls, numbers | {"tokens_ratio": ratio})


def _row(
    temperature: float, drafts: str, rule: Rule, width: int, cycles: int, numbers: Numbers
) -> Row:
    """Return every column, empty where there is no such number."""
    row: Row = {"temperature": temperature, "drafts": drafts, "num_draft_tokens": width}
    row |= vars(rule) | {"cycles": cycles}
    for name in COLUMNS:
        row |= valued(name, numbers.get(name))
    return row


def _tables(rows: Sequence[Row]) -> str:
    whose = {"engine": "whose", "setting": "rule", "num_draft_tokens": "K"}
    at_one = {
        "tokens_per_call": "tokens/call", "kl_per_token": "nats/token",
        "raised_off_head_per_1000": "off head/1,000",
        "band_tokens_at_kl": "band*", "block_tokens_at_kl": "in blocks*",
        "block_kl_at_tokens": "its nats**",
    }  # fmt: skip
    at_zero = {
        "tokens_per_call": "tokens/call", "tokens_ratio": "x exact match",
        "tv_per_token": "changed tokens", "changed_calls": "changed calls",
    }  # fmt: skip
    tables = []
    for temperature, drafts in [*((1, mode) for mode in MODES), (0, "greedy")]:
        heads, needed = (at_one, "kl_per_token") if temperature else (at_zero, "tv_per_token")
        own = [row for row in rows if (row["temperature"], row["drafts"]) == (temperature, drafts)]
        title = f"temperature {temperature}, {drafts} drafts"
        tables.append(columns(own, whose | heads, title, needed))
    return "\n\n".join([*tables, "* tokens per call at the rule's nats, ** nats at its tokens"])


# tokens of a greedy text between the beginnings of two drafts
STRIDE = 3
# the greedy drafts along one greedy text, and the target's raw logits along them, float64
Ids = Int[Tensor, "N K"]
Logits = Float[Tensor, "N K1 vocab"]


@torch.no_grad()
def drafted(
    pair: Any, prompts: list[list[int]], width: int, tokens: int, ends: list[int]
) -> Iterator[tuple[Ids, Logits]]:
    sizes = {"num_draft_tokens": width, "max_new_tokens": tokens}
    options: dict[str, Any] = sizes | {"policy": "speculative", "temperature": 0.0}
    for prompt in prompts:
        result = generate(pair.target, pair.draft, torch.tensor([prompt]),
                          eos_token_ids=ends, **options)  # fmt: skip
        text = [*prompt, *result.output_token_ids[0].tolist()]
        ids, logits = [], []
        for stop in range(len(prompt), len(text), STRIDE):
            line = torch.tensor([text[:stop]])
            for _ in range(width):
                line = torch.cat([line, pair.draft(line).logits[:, -1:].argmax(-1)], 1)
            ids.append(line[0, -width:])
            logits.append(pair.target(line).logits[0, -width - 1 :].double())
        yield torch.stack(ids), torch.stack(logits)


def accepted(spec: str, verifier: str, ids: Ids, logits: Logits) -> Int[Tensor, "N"]:
    policy, (count, width) = ct.policy(spec), ids.shape
    if isinstance(policy, Mars):
        (z_1, z_2), (first, second) = (best[:, :-1].unbind(-1) for best in logits.topk(2, -1))
        accepts = (ids == first) | ((ids == second) & (z_2 / z_1 > policy.theta))
        return accepts.long().cumprod(-1).sum(-1)
    coins, draft = torch.full((count, width), 0.5).double(), Draft(ids, [width] * count, None)
    judge, assigned = find_verifier(verifier), Assignment((policy,))
    return judge.verify(assigned, logits.softmax(-1), draft, coins, coins[:, 0]).num_accepted


def counted(
    policy: str, verifier: str, texts: list[tuple[Ids, Logits]], ends: list[int], source: str
) -> dict[str, Estimate]:
    sums = np.zeros((4, len(texts)))
    for number, (ids, logits) in enumerate(texts):
        counts = accepted(policy, verifier, ids, logits)
        ended = torch.isin(ids, torch.tensor(ends).long())
        length = (ended.cumsum(-1) == 0).sum(-1)  # up to the end of the text
        tokens = torch.minimum(counts, length) + 1
        emitted = torch.arange(ids.shape[1]) < torch.minimum(counts, tokens)[:, None]
        changed = (emitted & (ids != logits[:, :-1].argmax(-1))).sum(-1)
        sums[:, number] = len(counts), tokens.sum(), changed.sum(), (changed > 0).sum()
    calls, tokens, changed, touched = sums
    return {
        "tokens_per_call": ratio_of_sums(tokens, calls, source),
        "tv_per_token": ratio_of_sums(changed, tokens, source),
        "changed_calls": ratio_of_sums(touched, calls, source),
    }
