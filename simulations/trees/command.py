"""Sampled paths with certain siblings against paths alone: tokens per call and per second.

``tree, certain`` are trees whose siblings the policy's row knows of (``Siblings(certain=True)``).
Every policy and shape judges the paths of one lossless decode, all coins integrated out, so that
ratios are paired. Errors count texts. Seconds are those that a processor worked: a round's the
least of some lossless decodes of a shape, a pass's the least of REPEATS. ``pays_below`` is how many
times the path's pass the tree's may take before the tree is slower, the rest of a round being that
of the path. ``equal_time_k`` is the K of the block whose pass takes as long as the tree's, between
two of them by a coin; empty if none of --path-lengths is as long.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import cactus_theory as ct
from cactus_theory.decoding import ModelDrafter, Pair, Siblings, generate, load_pair
from cactus_theory.decoding.drafters.siblings import likeliest, with_siblings
from cactus_theory.decoding.models import CachedModel
from cactus_theory.policies import Policy
from cactus_theory.traces import Replay
from cactus_theory.verify import Draft

from ..bench import verify
from ..common.inputs import add_pair_arguments, at_least, prompts_of
from ..common.progress import Progress
from ..common.results import columns, publish
from ..common.statistics import resamples, spread
from ..traces.table import reached, valued
from .ideas import ideas
from .rounds import LOSSLESS, Round, alone, beside, first, followed, logged, replayed

# siblings that the row h knows of, beside "tree", where it is that of the path
CERTAIN = "tree, certain"
# tokens before a timed pass, how often it is timed, and new tokens of a timed decode
PREFIX, REPEATS, TIMED = 128, 15, 64
# drafted tokens, siblings, policies and repeats of the walk that is timed at a large vocabulary
WALK = 4, 4, (LOSSLESS, "band:price=1", "band:price=2"), 31
Row = dict[str, Any]
# K, siblings a place, verifier or CERTAIN
Shape = tuple[int, int, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.description = __doc__
    add = parser.add_argument
    add_pair_arguments(parser)
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="tables to make")
    add("--num-prompts", type=int, default=16)
    add("--max-new-tokens", type=int, default=96, metavar="N", help="of each text")
    add("--temperature", type=float, nargs="+", default=[1.0, 0.6])
    add("--num-draft-tokens", type=int, nargs="+", default=[8, 4, 2], metavar="K",
        help="the first one at all prices")  # fmt: skip
    add("--siblings", type=int, nargs="+", default=[4, 2, 1], metavar="M", help="as K")
    add("--path-lengths", type=int, nargs="+", default=[16, 32, 48], metavar="K",
        help="of paths alone, beside which trees are at equal time of the pass")  # fmt: skip
    add("--prices", type=float, nargs="+", default=[6.0, 2.0, 1.0, 0.6])
    add("--levels", type=float, nargs="+", default=[0.01, 0.03, 0.06, 0.1], metavar="NATS")
    add("--level", type=float, default=0.05, metavar="NATS", help="at which ideas are compared")
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("build/trees"), metavar="DIR")
    add("--publish", type=Path, metavar="DIR", help="also write the tables here")


def run(args: argparse.Namespace) -> int:
    """Make the tables, print them; return 0."""
    at_least(args, num_prompts=2, max_new_tokens=1, num_draft_tokens=1, siblings=1, path_lengths=1)
    pair = load_pair(args.target, args.draft)
    texts = prompts_of(args.prompts)[: args.num_prompts]
    ids = [torch.tensor([pair.tokenizer(text)["input_ids"]]) for text in texts]
    tables = {name: rows for part in args.parts for name, rows in PARTS[part](args, pair, ids)}
    for name, rows in tables.items():
        publish(args, rows, *(own / f"{name}.csv" for own in (args.out, args.publish) if own))
        print(columns(rows, {column: column.replace("_", "\n") for column in rows[0]}))
    return 0


def _shapes(args: argparse.Namespace, pair: Pair, ids: Sequence[Tensor]) -> list[Any]:
    widths = args.num_draft_tokens
    every: list[Shape] = [(k, 0, own) for k in widths for own in ("chain", "block")]
    every += [(k, m, "tree") for k in widths for m in args.siblings]
    longer = [(k, 0, "block") for k in args.path_lengths]
    timed = _passes(pair.target, [*every, *longer])
    heats = args.temperature
    rows = [row for own in heats for row in _judged(args, pair, ids, own, every, timed)]
    trees = [row for row in rows if row["siblings"]]
    fast = sum(row["tokens_per_second"] > row["block_tokens_per_second"] for row in trees)
    print(f"{fast} of {len(trees)} trees give more tokens a second than the block of their path")
    return [("trees", rows), ("trees_passes", timed)]


def _judged(
    args: argparse.Namespace, pair: Pair, ids: Sequence[Tensor], temperature: float,
    every: Sequence[Shape], timed: Sequence[Row],
) -> list[Row]:  # fmt: skip
    """Return one row for each shape and policy, and for each level of KL."""
    known = args.num_draft_tokens[0], args.siblings[0]
    priced = [own for own in every if own[0] == known[0] and own[1] in (0, known[1])]
    priced.append((*known, CERTAIN))
    bands = [f"band:price={price:g}" for price in args.prices]
    width = max(*args.num_draft_tokens, *args.path_lengths)
    made, cycles, decodes = [], np.zeros(len(ids)), defaultdict(list)
    with Progress(f"temperature {temperature:g}", len(ids)) as progress:
        for text, prompt in enumerate(ids):
            options = {"temperature": temperature, "seed": args.seed + text}
            rounds = logged(pair, prompt, width, args.max_new_tokens, **options)[1]
            cycles[text] = len(rounds)
            made.append({spec: sums(rounds, ct.policy(spec), args.siblings, known)
                         for spec in (LOSSLESS, *bands)})  # fmt: skip
            for own in every if text < max(3, len(ids) // 8) else ():
                decodes[own].append(_milliseconds(pair, prompt, own, options))
            progress.advance()

    def replay(shape: tuple[float, int, str], spec: str) -> Replay:
        k, m, name = shape
        found = np.stack([own[spec][name, m] for own in made], -1)
        low, share = int(k), k - int(k)  # between two lengths one is taken by a coin
        mixed = (1 - share) * found[:, low] + share * found[:, low + (share > 0)]
        return replayed(spec, name, k, cycles, *mixed)

    own_pass = [row for row in timed if row["forward"] == timed[0]["forward"]]
    spent = {(row["num_draft_tokens"], row["siblings"]): row["milliseconds"] for row in own_pass}
    longest = dict(sorted((k, own) for (k, m), own in spent.items() if not m))
    decodes[*known, CERTAIN] = decodes[*known, "tree"]
    seconds = {own: (min(parts), spent[own[:2]]) for own, parts in decodes.items()}

    def rows(shape: Shape, read: Any, policy: str) -> list[Row]:
        kl, tokens = read(shape)
        block = read((shape[0], 0, "block"))[1]
        if tokens is None or block is None:
            return []
        row = {"temperature": temperature} | _row(shape, policy, kl, [tokens, block], seconds)
        k = equal_time(spent[shape[:2]], longest)
        rival = read((k, 0, "block"))[1] if k is not None and shape[1] else None
        for name, value in (("equal_time_tokens_per_call", rival),
                            ("ratio_to_equal_time", rival and tokens / rival)):  # fmt: skip
            row |= {name: None, f"{name}_se": None} if value is None else valued(name, value)
        return [row | {"equal_time_k": k if shape[1] else None}]

    def under(spec: str) -> Any:
        def read(shape: Shape) -> Any:
            own = replay(shape, spec)
            return own.divergence_per_token().value, own.tokens_per_call

        return read

    found = [row for shape in every for row in rows(shape, under(LOSSLESS), LOSSLESS)]
    found += [row for shape in priced for spec in bands for row in rows(shape, under(spec), spec)]
    for level in args.levels:

        def read(shape: Shape, level: float = level) -> Any:
            return level, reached([replay(shape, spec) for spec in bands], level)

        found += [row for shape in priced for row in rows(shape, read, "band:price")]
    return found


def sums(
    rounds: Sequence[Round], rule: Policy, siblings: Sequence[int], known: tuple[int, int]
) -> Mapping[tuple[str, int], np.ndarray]:
    """Return tokens and nats (2, K + 1) of 0, 1, … drafted tokens, by verifier and siblings.

    ``known`` are the K and the siblings of CERTAIN.
    """
    found: dict[tuple[str, int], Any] = defaultdict(float)
    for own in rounds:
        row = alone(own, rule)
        block, likely = followed(own, row), own.p.topk(max(siblings))[1]
        found["chain", 0] += followed(own, row, chain=True).sums()
        found["block", 0] += block.sums()
        for m in siblings:
            found["tree", m] += block.sums(block.replaced.gather(1, likely[:, :m]).sum(1))
        short, fixed = first(own, known[0]), likely[: known[0], : known[1]]
        aware = followed(short, beside(short, rule, fixed.tolist()))
        found[CERTAIN, known[1]] += aware.sums(aware.replaced.gather(1, fixed).sum(1))
    return found


def equal_time(milliseconds: float, paths: Mapping[int, float]) -> float | None:
    """Return the K, between those timed, of the path whose pass takes so long, None beyond them."""
    times = np.maximum.accumulate(list(paths.values()))
    if not times[0] <= milliseconds <= times[-1]:
        return None
    return float(np.interp(milliseconds, times, list(paths)))


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
    shape: Shape, spec: str, spent: float, both: Sequence[Any], seconds: Mapping[Any, Any]
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


def _walk(args: argparse.Namespace, pair: Pair, ids: Sequence[Tensor]) -> list[Any]:
    """Time verification of trees beside that of the blocks of their paths, in turn."""
    width, m, specs, repeats = WALK
    rows = []
    for (kind, noise), spec in product(verify.NOISES.items(), specs):
        q, p, drafted, (accept, draw) = verify.rows(noise)
        q, p, drafted, coins = (
            q[:, : width + 1],
            p[:, :width],
            drafted[:, :width],
            accept[:, :width],
        )
        tree = with_siblings(Draft(drafted, [width] * len(drafted), p), likeliest(p, m), m)
        assert tree.parents is not None
        place = torch.arange(tree.token_ids.shape[1])
        tokens = tree.token_ids.masked_fill(place >= torch.tensor(tree.lengths)[:, None], -1)
        nodes = torch.arange(len(place) + 1) % (width + 1)
        block = partial(ct.verify_block, ct.policy(spec), q, p, drafted, coins=(coins, draw))
        walk = partial(
            ct.verify_tree, ct.policy(spec), q[:, nodes], p[:, place % width], tokens, tree.parents,
            sampled=tree.sampled, certain=tree.certain,
            coins=(coins[:, place % width], draw[:, None].expand(-1, width + 1)),
        )  # fmt: skip
        times = np.zeros((repeats + 1, 2))
        for turn, (number, job) in product(times, enumerate((block, walk))):
            started = time.process_time()
            job(validate=False)
            turn[number] = 1e3 * (time.process_time() - started)
        times = times[1:]  # the first call asks for memory
        row = {"draft": kind, "policy": spec, "batch": len(q), "num_draft_tokens": width,
               "siblings": m, "vocabulary": q.shape[-1]}  # fmt: skip
        row |= dict(zip(("block_milliseconds", "tree_milliseconds"), np.median(times, 0).tolist(),
                        strict=True))  # fmt: skip
        rows.append(row | spread("ratio", times[:, 1] / times[:, 0], resamples(repeats)))
    return [("trees_walk", rows)]


# what makes tables, by their part of the command
PARTS = {"shapes": _shapes, "ideas": ideas, "walk": _walk}
