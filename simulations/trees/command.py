"""Sampled paths with certain siblings against paths alone: tokens per call and per second.

Rounds of a lossless decode are logged with the longest drafts and most siblings; every policy and
smaller shape then judges the same drafts with the same coins, so that ratios are paired. Errors
count texts. Seconds are those of decodes of each shape. ``pays_below`` is how many times a pass of
the path alone a pass of the tree may take before the tree is slower.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.decoding import ModelDrafter, Pair, Siblings, generate, load_pair
from cactus_theory.decoding._meter import Meter, charge
from cactus_theory.decoding.drafters.siblings import likeliest, with_siblings
from cactus_theory.decoding.models import CachedModel
from cactus_theory.policies import policy as find_policy
from cactus_theory.traces import Replay
from cactus_theory.verify import Assignment, Draft, find_verifier
from cactus_theory.verify.contract import Verified

from ..bench.theory import clocked
from ..common.inputs import add_pair_arguments, at_least, prompts_of
from ..common.progress import Progress
from ..common.results import columns, publish
from ..traces.table import reached, valued

LOSSLESS = "speculative"
# tokens before a timed pass
PREFIX = 128
Row = dict[str, Any]
# K, siblings a place, verifier
Shape = tuple[int, int, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.description = __doc__
    add = parser.add_argument
    add_pair_arguments(parser)
    add("--num-prompts", type=int, default=16)
    add("--max-new-tokens", type=int, default=96, metavar="N", help="of each text")
    add("--temperature", type=float, nargs="+", default=[1.0, 0.6])
    add("--num-draft-tokens", type=int, nargs="+", default=[8, 4, 16], metavar="K",
        help="the first one at all prices")  # fmt: skip
    add("--siblings", type=int, nargs="+", default=[4, 2, 1], metavar="M", help="as K")
    add("--prices", type=float, nargs="+", default=[6.0, 2.0, 1.0, 0.6])
    add("--levels", type=float, nargs="+", default=[0.01, 0.03, 0.06, 0.1],
        help="emitted KL in nats per token")  # fmt: skip
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("build/trees"), metavar="DIR")
    add("--publish", type=Path, metavar="DIR", help="also write the tables here")


def run(args: argparse.Namespace) -> int:
    """Log, judge, time, print the tables; return 0."""
    at_least(args, num_prompts=2, max_new_tokens=1, num_draft_tokens=1, siblings=1)
    pair = load_pair(args.target, args.draft)
    texts = prompts_of(args.prompts)[: args.num_prompts]
    ids = [torch.tensor([pair.tokenizer(text)["input_ids"]]) for text in texts]
    judged, timed = [], passes(pair.target, shapes(args)[0])
    for temperature in args.temperature:
        made = _judged(args, pair, ids, temperature)
        judged += [{"temperature": temperature} | row for row in made]
    tables = {"trees": judged, "trees_passes": timed}
    for name, rows in tables.items():
        publish(args, rows, *(own / f"{name}.csv" for own in (args.out, args.publish) if own))
    print(_said(judged, args.num_draft_tokens[0], args.siblings[0]))
    print(columns(timed, {name: name for name in timed[0]}, "\na pass of the target"))
    return 0


def shapes(args: argparse.Namespace) -> tuple[list[Shape], list[Shape]]:
    """Return every shape, and those that are judged at all prices."""
    widths, beside = args.num_draft_tokens, args.siblings
    every = [(k, 0, own) for k in widths for own in ("chain", "block")]
    every += [(k, m, "tree") for k in widths for m in beside]
    return every, [own for own in every if own[0] == widths[0] and own[1] in (0, beside[0])]


@dataclass(frozen=True)
class Logged:
    """One round of one text: the drafted path, its rows, and the target's row at every node.

    Attributes
    ----------
    q : by the number of path tokens before it and the token after them, None for none.
    """

    path: list[int]
    probs: Float[Tensor, "K vocab"]
    q: dict[tuple[int, int | None], Float[Tensor, "vocab"]]

    def shaped(self, shape: Shape) -> tuple[Float[Tensor, "1 nodes vocab"], Draft]:
        """Return the target's rows and the draft of a smaller shape."""
        width, m, _ = shape
        probs = self.probs[None, :width]
        draft = Draft(torch.tensor([self.path[:width]]), [width], probs)
        if m:
            draft = with_siblings(draft, likeliest(probs, m), m)
        own = [self.q[0, None]]
        for place, token in enumerate(draft.token_ids[0].tolist()):
            node = draft.node(0, place)
            own.append(self.q[(place + 1, None) if place < width else (node, token)])
        return torch.stack(own)[None], draft


def logged(
    pair: Pair, ids: Tensor, args: argparse.Namespace, temperature: float, seed: int
) -> Iterator[Logged]:
    """Yield the rounds of one text that drafted whole paths, lossless."""
    found: list[Logged] = []
    width = max(args.num_draft_tokens)

    def see(q: Tensor, draft: Draft, *place: Any) -> None:
        if draft.lengths[0] <= width or draft.probs is None:
            return
        children, tokens = draft.children(0), draft.token_ids[0].tolist()
        if int(draft.sampled[0].sum()) < width:  # type: ignore[index]
            return
        rows: dict[Any, Tensor] = {(node, None): q[0, node] for node in range(width + 1)}
        for node in range(width):
            rows |= {(node, tokens[own]): q[0, own + 1] for own in children[node] if own >= width}
        found.append(Logged(tokens[:width], draft.probs[0], rows))

    drafter = Siblings(ModelDrafter(pair.draft), max(args.siblings))
    generate(
        pair.target, drafter, ids, policy=LOSSLESS, verifier="tree", num_draft_tokens=width,
        max_new_tokens=args.max_new_tokens, temperature=temperature, seed=seed, on_rows=see,
        meter=False,
    )  # fmt: skip
    yield from found


def _judged(
    args: argparse.Namespace, pair: Pair, ids: Sequence[Tensor], temperature: float
) -> list[Row]:
    """Return one row for each shape and policy, and for each level of KL."""
    every, priced = shapes(args)
    policies = [LOSSLESS, *(f"band:price={price:g}" for price in args.prices)]
    jobs = [(own, spec) for own in every for spec in policies if spec == LOSSLESS or own in priced]
    sums = {job: np.zeros((3, len(ids))) for job in jobs}  # rounds, tokens, nats
    with Progress(f"judging at temperature {temperature:g}", len(ids)) as progress:
        for text, own in enumerate(ids):
            seed = args.seed + text
            rounds = list(logged(pair, own, args, temperature, seed))
            for job in jobs:
                sums[job][:, text] = totals(rounds, *job, seed=seed)
            progress.advance()
    replays = {job: _replay(*job, own) for job, own in sums.items()}
    seconds = _seconds(args, pair, ids, temperature, every)
    made = [_row(job[0], job[1], replays, seconds) for job in jobs]
    for level in args.levels:
        for own in priced:
            made += _row_at(level, own, replays, seconds, policies[1:])
    return made


def totals(rounds: Sequence[Logged], shape: Shape, spec: str, seed: int) -> list[float]:
    """Return how many rounds, the tokens that they emit, and the nats these are charged.

    The coins of a round are the same for all shapes and policies.
    """
    width, m, name = shape
    judge, rule = find_verifier(name), find_policy(spec)
    assigned, meter = Assignment((rule,)), Meter((rule,), "kl", name)
    tokens = 0
    for number, own in enumerate(rounds):
        q, draft = own.shaped(shape)
        coins = np.random.default_rng([seed, number]).random(2 * len(own.path) + 1)
        accept = torch.zeros(1, draft.token_ids.shape[1], dtype=torch.float64)
        accept[0, :width] = torch.from_numpy(coins[:width])
        draw = torch.from_numpy(coins[len(own.path) :])[None]
        verdict = judge.verify(assigned, q, draft, accept, draw if m else draw[:, 0])
        (new,) = verdict.rows()
        tokens += len(new)
        if spec != LOSSLESS:
            count = draft.lengths[0]
            taken = new[: min(count, len(new))]
            charge(meter, 0, taken, Verified(assigned, q, draft, verdict), (0, 0))
    return [len(rounds), tokens, meter.reading(0, max(tokens, 1)).kl]


def _replay(shape: Shape, spec: str, own: Float[np.ndarray, "3 texts"]) -> Replay:
    """Return sums of texts as what a replay of a trace gives, for its estimates."""
    cycles, tokens, nats = own
    nothing = np.zeros((0, len(cycles)))
    return Replay(spec, shape[2], shape[0], "trees", cycles, tokens, tokens - cycles,
                  {"kl": nats}, nothing, nothing)  # fmt: skip


def _seconds(
    args: argparse.Namespace,
    pair: Pair,
    ids: Sequence[Tensor],
    temperature: float,
    every: Sequence[Shape],
) -> dict[Shape, Row]:
    """Return milliseconds of a round of each shape by part: medians over decodes, in turn."""
    spent: dict[Shape, list[list[float]]] = {own: [] for own in every}
    for text, prompt in enumerate(ids[: max(3, len(ids) // 4)]):
        for width, m, name in every:
            found = generate(
                pair.target, Siblings(ModelDrafter(pair.draft), m), prompt, policy=LOSSLESS,
                verifier=name, num_draft_tokens=width, max_new_tokens=args.max_new_tokens // 2,
                temperature=temperature, seed=args.seed + text, meter=False,
            )  # fmt: skip
            own, calls = found.seconds, found.row_calls
            parts = own.draft, own.target, own.verify, own.other
            spent[width, m, name].append([1e3 * part / calls for part in parts])
    names = ("draft_ms", "target_ms", "verify_ms", "other_ms")
    return {
        shape: dict(zip(names, np.median(own[1:], axis=0).tolist(), strict=True))
        for shape, own in spent.items()  # the first one takes memory
    }


def passes(model: Any, every: Sequence[Shape], repeats: int = 15) -> list[Row]:
    """Return the time of a pass over each shape, after PREFIX tokens, on both forward passes."""
    jobs: dict[str, Any] = {}
    found: dict[str, Row] = {}
    for forward, fast in (("own", True), ("library", False)):
        cached = CachedModel(model, PREFIX, slack=1 + _nodes(every), fast_forward=fast)
        cached.feed(torch.zeros(1, PREFIX, dtype=torch.int64), [PREFIX], [1])
        for width, m, _ in every:
            path = list(range(-1, width))
            fed = torch.tensor([path + [place for place in range(width) for _ in range(m)]])
            key = f"{forward} {width} {m}"

            def job(cached: Any = cached, fed: Tensor = fed, m: int = m) -> None:
                count = fed.shape[1]
                with torch.inference_mode():
                    cached.feed(torch.zeros_like(fed), [count], [count], fed if m else None)
                cached.rollback(0, PREFIX)

            jobs[key] = job
            nodes = fed.shape[1]
            found[key] = {
                "forward": forward, "num_draft_tokens": width, "siblings": m, "nodes": nodes,
            }  # fmt: skip
    times, _ = clocked(jobs, repeats)
    made = [found[key] | {"milliseconds": own["milliseconds"]} for key, own in times.items()]
    path = {(row["forward"], row["num_draft_tokens"]): row["milliseconds"] for row in made
            if not row["siblings"]}  # fmt: skip
    return [
        row | {"times_path": row["milliseconds"] / path[row["forward"], row["num_draft_tokens"]]}
        for row in made
    ]


def _nodes(every: Sequence[Shape]) -> int:
    return max(width * (m + 1) for width, m, _ in every)


def _row(shape: Shape, spec: str, replays: dict[Any, Replay], seconds: dict[Shape, Row]) -> Row:
    own, rival = replays[shape, spec], replays.get(((shape[0], 0, "block"), spec))
    other = own if rival is None else rival
    spent = own.divergence_per_token().value
    return _made(shape, spec, spent, (own.tokens_per_call, other.tokens_per_call), seconds)


def _row_at(
    level: float, shape: Shape, replays: dict[Any, Replay], seconds: dict[Shape, Row],
    policies: Sequence[str],
) -> list[Row]:  # fmt: skip
    """Return a row at a level of KL, none where the prices do not reach it."""
    block = (shape[0], 0, "block")
    found = [reached([replays[own, spec] for spec in policies], level) for own in (shape, block)]
    if found[0] is None or found[1] is None:
        return []
    return [_made(shape, "band:price", level, found, seconds)]


def _made(
    shape: Shape, spec: str, spent: float, tokens: Sequence[Any], seconds: dict[Shape, Row]
) -> Row:
    width, m, name = shape
    own, block = seconds[shape], seconds[width, 0, "block"]
    ratio = tokens[0] / tokens[1]
    rest = sum(block.values()) - block["target_ms"]
    return {
        "num_draft_tokens": width,
        "siblings": m,
        "verifier": name,
        "policy": spec,
        "kl_per_token": spent,
        **valued("tokens_per_call", tokens[0]),
        "ratio_to_block": ratio.value,
        "ratio_to_block_se": 0.0 if shape == (width, 0, "block") else ratio.standard_error,
        "tokens_per_second": 1e3 * tokens[0].value / sum(own.values()),
        "block_tokens_per_second": 1e3 * tokens[1].value / sum(block.values()),
        "pass_ratio": own["target_ms"] / block["target_ms"],
        "pays_below": ratio.value + (ratio.value - 1) * rest / block["target_ms"],
        **own,
    }


HEADS = {
    "temperature": "T", "num_draft_tokens": "K", "siblings": "m", "verifier": "verifier",
    "policy": "policy", "kl_per_token": "nats\n/token", "tokens_per_call": "tokens\n/call",
    "ratio_to_block": "x block", "ratio_to_block_se": "error",
    "tokens_per_second": "tokens\n/second", "pass_ratio": "x pass", "pays_below": "pays\nbelow",
}  # fmt: skip


def _said(rows: Sequence[Row], width: int, m: int) -> str:
    """Return what does not pay, first, then the table."""
    trees = [row for row in rows if row["siblings"]]
    faster = [row for row in trees if row["tokens_per_second"] > row["block_tokens_per_second"]]
    said = f"{len(faster)} of {len(trees)} trees give more tokens a second than the block alone"
    for row in trees:
        if (row["num_draft_tokens"], row["siblings"], row["policy"]) == (width, m, LOSSLESS):
            said += (
                f"\nT={row['temperature']:g}, K={width}, {m} siblings, lossless: "
                f"{100 * (row['ratio_to_block'] - 1):+.1f} % tokens a call; pays while its pass "
                f"takes less than {row['pays_below']:.2f} of the block's, here "
                f"{row['pass_ratio']:.2f}"
            )
    return f"{said}\n{columns(rows, HEADS)}"
