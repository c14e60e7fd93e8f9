"""Sampled paths with certain siblings against paths alone: tokens per call and per second.

Rounds of a lossless decode are logged with the longest drafts and most siblings; every policy and
smaller shape then judges the same drafts with the same coins, so that ratios are paired. Errors
count texts. Seconds are the least of lossless decodes of each shape. ``pays_below`` is how many
times the path's pass the tree's may take before the tree is slower, all else being equal.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
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
# tokens before a timed pass, and how often it is timed
PREFIX, REPEATS = 128, 15
PARTS = ("draft_ms", "target_ms", "verify_ms", "other_ms")
Row = dict[str, Any]
# K, siblings a place, verifier
Shape = tuple[int, int, str]
# the path of a round, and the target's rows by the tokens before them
Logged = tuple[Draft, dict[tuple[int, ...], Tensor]]


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
    add("--levels", type=float, nargs="+", default=[0.01, 0.03, 0.06, 0.1], metavar="NATS")
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("build/trees"), metavar="DIR")
    add("--publish", type=Path, metavar="DIR", help="also write the tables here")


def run(args: argparse.Namespace) -> int:
    """Log, judge, time, print the tables; return 0."""
    at_least(args, num_prompts=2, max_new_tokens=1, num_draft_tokens=1, siblings=1)
    pair = load_pair(args.target, args.draft)
    texts = prompts_of(args.prompts)[: args.num_prompts]
    ids = [torch.tensor([pair.tokenizer(text)["input_ids"]]) for text in texts]
    judged = [row for heat in args.temperature for row in _judged(args, pair, ids, heat)]
    tables = {"trees": judged, "trees_passes": _passes(pair.target, _shapes(args))}
    for name, rows in tables.items():
        publish(args, rows, *(own / f"{name}.csv" for own in (args.out, args.publish) if own))
        print(columns(rows, {column: column.replace("_", "\n") for column in rows[0]}))
    trees = [row for row in judged if row["siblings"]]
    fast = sum(row["tokens_per_second"] > row["block_tokens_per_second"] for row in trees)
    print(f"{fast} of {len(trees)} trees give more tokens a second than the block of their path")
    return 0


def _shapes(args: argparse.Namespace) -> list[Shape]:
    widths, beside = args.num_draft_tokens, args.siblings
    every = [(k, 0, own) for k in widths for own in ("chain", "block")]
    return every + [(k, m, "tree") for k in widths for m in beside]


def _judged(
    args: argparse.Namespace, pair: Pair, ids: Sequence[Tensor], temperature: float
) -> list[Row]:
    """Return one row for each shape and policy, and for each level of KL."""
    first, every = (args.num_draft_tokens[0], args.siblings[0]), _shapes(args)
    priced = [own for own in every if own[0] == first[0] and own[1] in (0, first[1])]
    bands = [f"band:price={price:g}" for price in args.prices]
    jobs = [(own, LOSSLESS) for own in every] + [(own, spec) for own in priced for spec in bands]
    sums = {job: np.zeros((3, len(ids))) for job in jobs}
    decodes: dict[Shape, list[list[float]]] = {own: [] for own in every}
    with Progress(f"temperature {temperature:g}", len(ids)) as progress:
        for text, prompt in enumerate(ids):
            options = {"temperature": temperature, "seed": args.seed + text}
            rounds = logged(pair, prompt, args, options)
            for job in jobs:
                sums[job][:, text] = totals(rounds, *job, args.seed + text)
            for own in every if text < max(3, len(ids) // 4) else ():
                decodes[own].append(_milliseconds(pair, prompt, own, args, options))
            progress.advance()
    nothing = np.zeros((0, len(ids)))
    replays = {
        (own, spec): Replay(spec, own[2], own[0], "trees", cycles, tokens, tokens - cycles,
                            {"kl": nats}, nothing, nothing)
        for (own, spec), (cycles, tokens, nats) in sums.items()
    }  # fmt: skip
    seconds = {own: np.min(parts, axis=0).tolist() for own, parts in decodes.items()}
    made = []
    for own, spec in jobs:
        spent = replays[own, spec].divergence_per_token().value
        both = [replays[one, spec].tokens_per_call for one in (own, (own[0], 0, "block"))]
        made.append(_row(own, spec, spent, both, seconds))
    for level in args.levels:
        for own in priced:
            pairs = [[replays[one, spec] for spec in bands] for one in (own, (own[0], 0, "block"))]
            both = [reached(family, level) for family in pairs]
            if None not in both:
                made.append(_row(own, "band:price", level, both, seconds))
    return [{"temperature": temperature} | row for row in made]


def logged(
    pair: Pair, prompt: Tensor, args: argparse.Namespace, options: dict[str, Any]
) -> list[Logged]:
    """Return the rounds of a lossless decode of a text that drafted whole paths."""
    found: list[Logged] = []
    width, m = max(args.num_draft_tokens), max(args.siblings)

    def see(q: Tensor, draft: Draft, *place: Any) -> None:
        if draft.sampled is not None and int(draft.sampled.sum()) == width:
            trunk = Draft(draft.token_ids[:, :width], [width], draft.probs)
            found.append((trunk, dict(zip(_texts(draft), q[0], strict=True))))

    generate(
        pair.target, Siblings(ModelDrafter(pair.draft), m), prompt, policy=LOSSLESS, meter=False,
        verifier="tree", num_draft_tokens=width, max_new_tokens=args.max_new_tokens, on_rows=see,
        **options,
    )  # fmt: skip
    return found


def _texts(draft: Draft) -> list[tuple[int, ...]]:
    """Return the drafted tokens before each node."""
    ids, found = draft.token_ids[0].tolist(), [()]
    parents = range(-1, len(ids) - 1) if draft.parents is None else draft.parents[0].tolist()
    for token, parent in zip(ids, parents, strict=True):
        found.append((*found[parent + 1], token))
    return found


def totals(rounds: Sequence[Logged], shape: Shape, spec: str, seed: int) -> list[float]:
    """Return how many rounds, the tokens that they emit, and the nats these are charged.

    The coins of a round are the same for all shapes and policies.
    """
    width, m, name = shape
    judge, rule = find_verifier(name), find_policy(spec)
    assigned, meter, tokens = Assignment((rule,)), Meter((rule,), "kl", name), 0
    for number, (trunk, rows) in enumerate(rounds):
        assert trunk.probs is not None
        draft = Draft(trunk.token_ids[:, :width], [width], trunk.probs[:, :width])
        if m:
            draft = with_siblings(draft, likeliest(trunk.probs[:, :width], m), m)
        q = torch.stack([rows[text] for text in _texts(draft)])[None]
        most, nodes = trunk.lengths[0], draft.lengths[0]
        coins = np.random.default_rng([seed, number]).random((1, 2 * most + 1))
        accept = torch.zeros(1, nodes, dtype=torch.float64)
        accept[:, :width] = torch.from_numpy(coins[:, :width])
        draw = torch.from_numpy(coins[:, most:])
        verdict = judge.verify(assigned, q, draft, accept, draw if m else draw[:, 0])
        (new,) = verdict.rows()
        tokens += len(new)
        if spec != LOSSLESS:
            seen = Verified(assigned, q, draft, verdict)
            charge(meter, 0, new[:nodes], seen, (0, 0))
    return [len(rounds), tokens, meter.reading(0, max(tokens, 1)).kl]


def _milliseconds(
    pair: Pair, prompt: Tensor, shape: Shape, args: argparse.Namespace, options: dict[str, Any]
) -> list[float]:
    """Return what the parts of a round take in a lossless decode."""
    width, m, name = shape
    found = generate(
        pair.target, Siblings(ModelDrafter(pair.draft), m), prompt, policy=LOSSLESS, meter=False,
        verifier=name, num_draft_tokens=width, max_new_tokens=args.max_new_tokens // 2, **options,
    )  # fmt: skip
    own = found.seconds
    parts = own.draft, own.target, own.verify, own.other
    return [1e3 * part / found.row_calls for part in parts]


def _row(
    shape: Shape, spec: str, spent: float, both: Sequence[Any], seconds: dict[Shape, list[float]]
) -> Row:
    """Return a row; ``both`` are tokens per call of the shape and of the block of its path."""
    width, m, name = shape
    own, block = seconds[shape], seconds[width, 0, "block"]
    ratio, rest = both[0] / both[1], (sum(block) - block[1]) / block[1]
    return {
        "num_draft_tokens": width,
        "siblings": m,
        "verifier": name,
        "policy": spec,
        "kl_per_token": spent,
        **valued("tokens_per_call", both[0]),
        "ratio_to_block": ratio.value,
        "ratio_to_block_se": 0.0 if name == "block" else ratio.standard_error,
        "tokens_per_second": 1e3 * both[0].value / sum(own),
        "block_tokens_per_second": 1e3 * both[1].value / sum(block),
        "times_block_pass": own[1] / block[1],
        "pays_below": ratio.value + (ratio.value - 1) * rest,
        **dict(zip(PARTS, own, strict=True)),
    }


@torch.inference_mode()
def _passes(model: Any, shapes: Sequence[Shape]) -> list[Row]:
    """Return the least time of a pass over each shape, on both forward passes, in turn."""
    jobs, most = {}, max(width * (m + 1) for width, m, _ in shapes)
    for forward, fast in (("own", True), ("library", False)):
        cached = CachedModel(model, PREFIX, slack=1 + most, fast_forward=fast)
        cached.feed(torch.zeros(1, PREFIX, dtype=torch.int64), [PREFIX], [1])
        for width, m in dict.fromkeys(own[:2] for own in shapes):
            beside = [place for place in range(width) for _ in range(m)]
            parents = torch.tensor([[*range(-1, width), *beside]])

            def job(cached: CachedModel = cached, parents: Tensor = parents, m: int = m) -> None:
                counts = [parents.shape[1]]
                cached.feed(torch.zeros_like(parents), counts, counts, parents if m else None)
                cached.rollback(0, PREFIX)

            jobs[forward, width, m] = job
    times, made = clocked(jobs, REPEATS)[0], []
    for (forward, width, m), own in times.items():
        made.append({"forward": forward, "num_draft_tokens": width, "siblings": m})
        made[-1] |= {"nodes": 1 + width * (m + 1), "milliseconds": own["least"]}
        made[-1]["times_path"] = own["least"] / times[forward, width, 0]["least"]
    return made
