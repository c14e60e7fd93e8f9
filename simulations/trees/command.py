"""Sampled paths with certain siblings against paths alone: tokens per call and per second.

``tree, certain`` are trees whose siblings the policy's row knows of (``Siblings(certain=True)``).
Every policy and shape judges the paths of one lossless decode, all coins integrated out, so that
ratios are paired. Errors count texts. Seconds are those that a processor worked: a round's the
least of some lossless decodes of a shape, a pass's the least of REPEATS. ``pays_below`` is how many
times the path's pass the tree's may take before the tree is slower, the rest of a round being that
of the path. ``equal_time_k`` is the K of the block whose pass takes as long as the tree's, between
two of them by a coin; empty if none of --path-lengths is as long. ``--parts left`` holds published
verifiers of several drafts beside the best rule for them.
"""

import argparse
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import cactus_theory as ct
from cactus_theory.decoding import Pair, load_pair
from cactus_theory.decoding.drafters.siblings import likeliest, with_siblings
from cactus_theory.decoding.models import CachedModel
from cactus_theory.policies import Policy
from cactus_theory.traces import Estimate
from cactus_theory.verify import Draft

from ..bench import verify
from ..common.decode import Harness
from ..common.grid import Config
from ..common.inputs import add_pair_arguments, at_least, prompts_of
from ..common.results import columns, publish
from ..common.statistics import resamples, spread
from ..replay import valued
from .ideas import ideas
from .references import left
from .rounds import LOSSLESS, Round, alone, followed, summed

# siblings that the row h knows of, beside "tree", where it is that of the path
CERTAIN = "tree, certain"
# the pass of this package
PACKAGE = "own"
# tokens before a timed pass, how often it is timed, and new tokens of a timed decode
PREFIX, REPEATS, TIMED = 128, 15, 64
# drafted tokens, siblings, policies and repeats of the walk that is timed at a large vocabulary
WALK = 4, 4, (LOSSLESS, "band:price=1", "band:price=2"), 31
Row = dict[str, Any]
# K, siblings a place, verifier or CERTAIN
Shape = tuple[int, int, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
    for part in args.parts:
        for name, rows in PARTS[part](args, pair, ids).items():
            folders = [folder for folder in (args.out, args.publish) if folder]
            publish(args, rows, *(folder / f"{name}.csv" for folder in folders))
            print(columns(rows, {column: column.replace("_", "\n") for column in rows[0]}))
    return 0


def _shapes(args: argparse.Namespace, pair: Pair, ids: Sequence[Tensor]) -> dict[str, list[Row]]:
    widths = args.num_draft_tokens
    shapes: list[Shape] = [(k, 0, judge) for k in widths for judge in ("chain", "block")]
    shapes += [(k, m, "tree") for k in widths for m in args.siblings]
    timed = _passes(pair.target, [*shapes, *((k, 0, "block") for k in args.path_lengths)])
    passes = {(row["num_draft_tokens"], row["siblings"]): row["milliseconds"]
              for row in timed if row["forward"] == PACKAGE}  # fmt: skip
    rows = [row for heat in args.temperature
            for row in _judged(args, pair, ids, heat, shapes, passes)]  # fmt: skip
    trees = [row for row in rows if row["siblings"]]
    fast = sum(row["tokens_per_second"] > row["block_tokens_per_second"] for row in trees)
    print(f"{fast} of {len(trees)} trees give more tokens a second than the block of their path")
    return {"trees": rows, "trees_passes": timed}


def _judged(
    args: argparse.Namespace, pair: Pair, ids: Sequence[Tensor], temperature: float,
    shapes: Sequence[Shape], passes: Mapping[tuple[int, int], float],
) -> list[Row]:  # fmt: skip
    """Return one row for each shape and policy, and for each level of KL."""
    known = args.num_draft_tokens[0], args.siblings[0]
    bands = [f"band:price={price:g}" for price in args.prices]
    rules = {spec: ct.policy(spec) for spec in (LOSSLESS, *bands)}
    harness = Harness(pair, [prompt[0].tolist() for prompt in ids], TIMED, args.seed, ends=False)
    times: dict[Shape, float] = defaultdict(lambda: math.inf)

    def judged(text: int, whole: Tensor, rounds: Sequence[Round]) -> Iterator[Any]:
        for path, (spec, rule) in product(rounds, rules.items()):
            for name, amounts in sums(path, rule, args.siblings).items():
                yield (name, spec), amounts
        for k, m, name in shapes if text < max(3, len(ids) // 8) else ():
            config = Config(LOSSLESS, k, 1, name, m, temperature=temperature)
            spent, decode = milliseconds(partial(harness.decode, config, text))
            times[k, m, name] = min(times[k, m, name], spent / decode.record["row_calls"])

    width = max(*args.num_draft_tokens, *args.path_lengths)
    totals = summed(args, pair, ids, temperature, width, judged)
    paths = {k: spent for (k, m), spent in passes.items() if not m}
    times[*known, CERTAIN] = times[*known, "tree"]
    priced = [shape for shape in shapes if shape[0] == known[0] and shape[1] in (0, known[1])]
    priced.append((*known, CERTAIN))
    cases: list[tuple[Shape, Sequence[str], float | None]] = [
        *((shape, [LOSSLESS], None) for shape in shapes),
        *((shape, [spec], None) for shape in priced for spec in bands),
        *((shape, bands, level) for level in args.levels for shape in priced),
    ]
    rows = []
    for shape, specs, level in cases:
        k, m, name = shape
        kl, tokens = totals.at(specs, level, (name, m), k)
        block = totals.at(specs, level, ("block", 0), k)[1]
        if tokens is None or block is None:
            continue
        longer = equal_time(passes[k, m], paths) if m else None
        rival = None if longer is None else totals.at(specs, level, ("block", 0), longer)[1]
        row = {"temperature": temperature, "num_draft_tokens": k, "siblings": m, "verifier": name}
        row |= {"policy": specs[0] if level is None else "band:price", "kl_per_token": kl}
        seconds = [(times[each], passes[each[:2]]) for each in (shape, (k, 0, "block"))]
        row |= against(tokens, block, *seconds, same=name == "block")
        row |= valued("equal_time_tokens_per_call", rival)
        row |= valued("ratio_to_equal_time", rival and tokens / rival)
        rows.append(row | {"equal_time_k": longer})
    return rows


def sums(path: Round, rule: Policy, siblings: Sequence[int]) -> dict[tuple[str, int], np.ndarray]:
    """Return a round's tokens and nats (2, K + 1) of 0, 1, … drafted tokens by verifier, siblings.

    CERTAIN is with the first number of siblings.
    """
    likely = path.p.topk(max(siblings))[1]
    row, fixed = alone(path, rule), likely[:, : siblings[0]]
    block, aware = followed(path, row), followed(path, alone(path, rule, fixed.tolist()))
    return {
        ("chain", 0): followed(path, row, chain=True).sums(),
        ("block", 0): block.sums(),
        **{("tree", m): block.sums(block.caught(likely[:, :m])) for m in siblings},
        (CERTAIN, siblings[0]): aware.sums(aware.caught(fixed)),
    }


def equal_time(spent: float, paths: Mapping[int, float]) -> float | None:
    """Return the K, between those timed, of the path whose pass takes so long, None beyond them."""
    lengths = sorted(paths)
    times = np.maximum.accumulate([paths[k] for k in lengths])
    return float(np.interp(spent, times, lengths)) if times[0] <= spent <= times[-1] else None


def against(
    tokens: Estimate, block: Estimate, shape: tuple[float, float], path: tuple[float, float],
    same: bool = False,
) -> Row:  # fmt: skip
    """Return a shape beside the block of its path: tokens per call, milliseconds of round, pass."""
    ratio, rest = tokens / block, path[0] / path[1] - 1
    return {
        **valued("tokens_per_call", tokens),
        "ratio_to_block": ratio.value,
        "ratio_to_block_se": 0.0 if same else ratio.standard_error,
        "tokens_per_second": 1e3 * tokens.value / shape[0],
        "block_tokens_per_second": 1e3 * block.value / path[0],
        "times_block_pass": shape[1] / path[1],
        "pays_below": ratio.value + (ratio.value - 1) * rest,
        "round_milliseconds": shape[0],
    }


def milliseconds(job: Callable[[], Any]) -> tuple[float, Any]:
    """Return how long a processor worked, and what the job returned."""
    started = time.process_time()
    result = job()
    return 1e3 * (time.process_time() - started), result


@torch.inference_mode()
def _passes(model: Any, shapes: Sequence[Shape]) -> list[Row]:
    """Return the least time of a pass over each shape, on both forward passes, in turn."""
    times: dict[Any, float] = defaultdict(lambda: math.inf)
    kinds = list(dict.fromkeys(shape[:2] for shape in shapes))
    most = max(width * (m + 1) for width, m in kinds)
    for forward in (PACKAGE, "library"):
        cached = CachedModel(model, PREFIX, slack=1 + most, fast_forward=forward == PACKAGE)
        cached.feed(torch.zeros(1, PREFIX, dtype=torch.int64), [PREFIX], [1])
        for width, m in kinds * REPEATS:
            beside = [place for place in range(width) for _ in range(m)]
            parents = torch.tensor([[*range(-1, width), *beside]])
            counts, ids = [parents.shape[1]], torch.zeros_like(parents)
            job = partial(cached.feed, ids, counts, counts, parents if m else None)
            times[forward, width, m] = min(times[forward, width, m], milliseconds(job)[0])
            cached.rollback(0, PREFIX)
    return [
        {"forward": forward, "num_draft_tokens": width, "siblings": m, "nodes": 1 + width * (m + 1),
         "milliseconds": least, "times_path": least / times[forward, width, 0]}
        for (forward, width, m), least in times.items()
    ]  # fmt: skip


def _walk(args: argparse.Namespace, pair: Pair, ids: Sequence[Tensor]) -> dict[str, list[Row]]:
    """Time verification of trees beside that of the blocks of their paths, in turn."""
    width, m, specs, repeats = WALK
    rows = []
    for (kind, noise), spec in product(verify.NOISES.items(), specs):
        q, p, drafted, (accept, draw) = verify.rows(noise)
        q, p, drafted = q[:, : width + 1], p[:, :width], drafted[:, :width]
        tree = with_siblings(Draft(drafted, [width] * len(drafted), p), likeliest(p, m), m)
        assert tree.parents is not None
        place = torch.arange(tree.token_ids.shape[1])
        tokens = tree.token_ids.masked_fill(place >= torch.tensor(tree.lengths)[:, None], -1)
        nodes, path = torch.arange(len(place) + 1) % (width + 1), place % width
        rule, draws = ct.policy(spec), draw[:, None].expand(-1, width + 1)
        block = partial(ct.verify_block, rule, q, p, drafted, coins=(accept[:, :width], draw))
        walk = partial(
            ct.verify_tree, rule, q[:, nodes], p[:, path], tokens, tree.parents,
            sampled=tree.sampled, certain=tree.certain, coins=(accept[:, path], draws),
        )  # fmt: skip
        jobs = [partial(job, validate=False) for job in (block, walk)]
        times = np.array([[milliseconds(job)[0] for job in jobs] for _ in range(repeats + 1)])
        times = times[1:]  # the first call asks for memory
        medians = np.median(times, 0).tolist()
        row = {"draft": kind, "policy": spec, "batch": len(q), "num_draft_tokens": width}
        row |= {"siblings": m, "vocabulary": q.shape[-1]}
        row |= {"block_milliseconds": medians[0], "tree_milliseconds": medians[1]}
        rows.append(row | spread("ratio", times[:, 1] / times[:, 0], resamples(repeats)))
    return {"trees_walk": rows}


# what makes tables, by their part of the command
PARTS = {"shapes": _shapes, "ideas": ideas, "walk": _walk, "left": left}
