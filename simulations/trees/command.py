"""Sampled paths with certain siblings against paths alone: tokens per call and per second.

``tree, certain`` are trees whose siblings the policy's row knows of (``Siblings(certain=True)``).
Rounds of a lossless decode are logged with the longest drafts and most siblings; every policy and
smaller shape then judges the same drafts with the same coins, so that ratios are paired. Errors
count texts. Seconds are those that a processor worked: a round's the least of some lossless
decodes of a shape, a pass's the least of REPEATS. ``pays_below`` is how many times the path's pass
the tree's may take before the tree is slower, the rest of a round being that of the path.
"""

import argparse
import time
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

from ..common.inputs import add_pair_arguments, at_least, prompts_of
from ..common.progress import Progress
from ..common.results import columns, publish
from ..traces.table import reached, valued

LOSSLESS = "speculative"
# siblings that the row h knows of, beside "tree", where it is that of the path
CERTAIN = "tree, certain"
# tokens before a timed pass, how often it is timed, and new tokens of a timed decode
PREFIX, REPEATS, TIMED = 128, 15, 64
Row = dict[str, Any]
# K, siblings a place, verifier or CERTAIN
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
    add("--num-draft-tokens", type=int, nargs="+", default=[8, 4], metavar="K",
        help="the first one at all prices")  # fmt: skip
    add("--siblings", type=int, nargs="+", default=[4, 1], metavar="M", help="as K")
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
    timed = _passes(pair.target, _shapes(args))
    judged = [row for heat in args.temperature for row in _judged(args, pair, ids, heat, timed)]
    tables = {"trees": judged, "trees_passes": timed}
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
    args: argparse.Namespace,
    pair: Pair,
    ids: Sequence[Tensor],
    temperature: float,
    timed: Sequence[Row],
) -> list[Row]:
    """Return one row for each shape and policy, and for each level of KL."""
    first, every = (args.num_draft_tokens[0], args.siblings[0]), _shapes(args)
    priced = [own for own in every if own[0] == first[0] and own[1] in (0, first[1])]
    priced.append((*first, CERTAIN))
    bands = [f"band:price={price:g}" for price in args.prices]
    jobs = [(own, LOSSLESS) for own in every] + [(own, spec) for own in priced for spec in bands]
    sums = {job: np.zeros((3, len(ids))) for job in jobs}
    decodes: dict[Shape, list[float]] = {own: [] for own in every}
    with Progress(f"temperature {temperature:g}", len(ids)) as progress:
        for text, prompt in enumerate(ids):
            options = {"temperature": temperature, "seed": args.seed + text}
            rounds = logged(pair, prompt, args, options)
            for job in jobs:
                sums[job][:, text] = totals(rounds, *job, args.seed + text)
            for own in every if text < max(3, len(ids) // 8) else ():
                decodes[own].append(_milliseconds(pair, prompt, own, options))
            progress.advance()
    nothing = np.zeros((0, len(ids)))
    replays = {
        (own, spec): Replay(spec, own[2], own[0], "trees", cycles, tokens, tokens - cycles,
                            {"kl": nats}, nothing, nothing)
        for (own, spec), (cycles, tokens, nats) in sums.items()
    }  # fmt: skip
    decodes[*first, CERTAIN] = decodes[*first, "tree"]
    places = [(row["num_draft_tokens"], row["siblings"]) for row in timed]
    seconds = {  # of a round, of its pass, which is the first one timed: the package's own
        own: (min(parts), timed[places.index(own[:2])]["milliseconds"])
        for own, parts in decodes.items()
    }
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
    ids = draft.token_ids[0].tolist()
    found: list[tuple[int, ...]] = [()]
    parents = range(-1, len(ids) - 1) if draft.parents is None else draft.parents[0].tolist()
    for token, parent in zip(ids, parents, strict=True):
        found.append((*found[parent + 1], token))
    return found


def totals(rounds: Sequence[Logged], shape: Shape, spec: str, seed: int) -> list[float]:
    """Return how many rounds, the tokens that they emit, and the nats these are charged.

    The coins of a round are the same for all shapes and policies.
    """
    width, m, name = shape
    judge, rule = find_verifier("tree" if m else name), find_policy(spec)
    assigned, meter, tokens = Assignment((rule,)), Meter((rule,), "kl", judge), 0
    for number, (trunk, rows) in enumerate(rounds):
        assert trunk.probs is not None
        draft = Draft(trunk.token_ids[:, :width], [width], trunk.probs[:, :width])
        if m:
            fixed = likeliest(trunk.probs[:, :width], m)
            draft = with_siblings(draft, fixed, m, certain=name == CERTAIN)
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


def _milliseconds(pair: Pair, prompt: Tensor, shape: Shape, options: dict[str, Any]) -> float:
    """Return what a round takes in a lossless decode, the prompt's share included."""
    width, m, name = shape
    started = time.process_time()
    found = generate(
        pair.target, Siblings(ModelDrafter(pair.draft), m), prompt, policy=LOSSLESS, meter=False,
        verifier=name, num_draft_tokens=width, max_new_tokens=TIMED, **options,
    )  # fmt: skip
    return 1e3 * (time.process_time() - started) / found.row_calls


def _row(
    shape: Shape, spec: str, spent: float, both: Sequence[Any], seconds: dict[Shape, Any]
) -> Row:
    """Return a row; ``both`` are tokens per call of the shape and of the block of its path."""
    width, m, name = shape
    own, block = seconds[shape], seconds[width, 0, "block"]
    ratio, rest = both[0] / both[1], block[0] / block[1] - 1
    return {
        "num_draft_tokens": width,
        "siblings": m,
        "verifier": name,
        "policy": spec,
        "kl_per_token": spent,
        **valued("tokens_per_call", both[0]),
        "ratio_to_block": ratio.value,
        "ratio_to_block_se": 0.0 if name == "block" else ratio.standard_error,
        "tokens_per_second": 1e3 * both[0].value / own[0],
        "block_tokens_per_second": 1e3 * both[1].value / block[0],
        "times_block_pass": own[1] / block[1],
        "pays_below": ratio.value + (ratio.value - 1) * rest,
        "round_milliseconds": own[0],
    }


@torch.inference_mode()
def _passes(model: Any, shapes: Sequence[Shape]) -> list[Row]:
    """Return the least time of a pass over each shape, on both forward passes, in turn."""
    times: dict[Any, float] = {}
    kinds = list(dict.fromkeys(own[:2] for own in shapes))
    most = max(width * (m + 1) for width, m in kinds)
    for forward, fast in (("own", True), ("library", False)):
        cached = CachedModel(model, PREFIX, slack=1 + most, fast_forward=fast)
        cached.feed(torch.zeros(1, PREFIX, dtype=torch.int64), [PREFIX], [1])
        for width, m in kinds * REPEATS:
            beside = [place for place in range(width) for _ in range(m)]
            parents = torch.tensor([[*range(-1, width), *beside]])
            counts, ids = [parents.shape[1]], torch.zeros_like(parents)
            started = time.process_time()
            cached.feed(ids, counts, counts, parents if m else None)
            spent = 1e3 * (time.process_time() - started)
            cached.rollback(0, PREFIX)
            times[forward, width, m] = min(spent, times.get((forward, width, m), spent))
    return [
        {"forward": forward, "num_draft_tokens": width, "siblings": m, "nodes": 1 + width * (m + 1),
         "milliseconds": own, "times_path": own / times[forward, width, 0]}
        for (forward, width, m), own in times.items()
    ]  # fmt: skip
