"""Train a head by several losses from one checkpoint, and decode with each.

Training by KL is that of ``train-pair --drafter block`` with the same flags, and is taken from
--work-dir if it is there. Every loss then goes on from it for --loss-steps, with every seed.
Everything is kept in --work-dir: the same command goes on where it was stopped.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cactus_theory._lock import FolderLock
from cactus_theory.decoding import load_pair
from cactus_theory.decoding.drafters import load
from cactus_theory.traces.estimate import Estimate

from ..common.grid import Config, Grid
from ..common.inputs import PROMPTS, at_least, digest, prompts_of
from ..common.journal import Journal, add_journal_arguments
from ..common.results import columns, publish
from ..train_pair import command as train_pair
from ..train_pair import heads
from ..train_pair.corpus import held_out, training
from ..train_pair.distil import prefixes
from ..train_pair.tokenizer import encode_stream
from .measure import Decodes, Line, cells, decodes

UNSEEN = 32  # windows of unseen text along which overlaps are measured
START = "start"  # the checkpoint that all losses go on from
LOSSES = ("kl", "tv", "lk", "price")
STRICT = (("speculative", "chain"), ("speculative", "block"))
FAMILIES = (("band", "chain"), ("band", "block"), ("soft_band", "block"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags, those of training too."""
    train_pair.add_arguments(parser)
    parser.set_defaults(drafter="block", work_dir=Path("build/losses"), out=Path("losses"))
    parser.description = __doc__
    add = parser.add_argument
    add("--losses", nargs="+", choices=heads.LOSSES, default=list(LOSSES))
    add("--loss-steps", type=int, default=150, help="of every loss")
    add("--loss-seeds", type=int, nargs="+", default=[0, 1])
    add("--prompts", type=Path, default=PROMPTS, help="JSON lines, to decode")
    add("--num-prompts", type=int, default=16)
    add("--num-draft-tokens", type=int, default=4, metavar="K")
    add("--prices", type=float, nargs="+", default=[1.7, 1.1, 0.7], help="of the bands")
    add("--level", type=float, default=0.05, metavar="NATS", help="a token")
    add("--max-new-tokens", type=int, default=64, metavar="N")
    add("--metered", type=int, default=2, help="decodes of every prompt")
    add("--publish", type=Path, help="also write the CSV here")
    add_journal_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Train what is missing, decode what is missing, write the table; return 0."""
    train_pair.check_flags(args)
    at_least(args, loss_steps=1, num_prompts=2, metered=1, num_draft_tokens=1)
    torch.set_num_threads(args.threads)
    with FolderLock(args.work_dir):
        trained = _trained(args)
    table = _decoded(args, trained)
    publish(args, table, *filter(None, (args.out / "losses.csv", args.publish)))
    shown = {name: name.replace("_", "\n") for name in table[0] if not name.endswith("_error")}
    print(columns(table, shown, f"tokens per target call, K = {args.num_draft_tokens}"))
    return 0


def _trained(args: argparse.Namespace) -> dict[tuple[str, int], tuple[Path, float, float]]:
    """Return each loss's and seed's folder, seconds, and mean overlap along unseen text."""
    documents, target, tokenizer = train_pair.begin_head(args)
    begun = train_pair.BegunHead(args, encode_stream(tokenizer, training(documents)), target)
    unseen = encode_stream(tokenizer, held_out(documents))
    windows = prefixes(unseen, UNSEEN, args.length + 1, torch.Generator().manual_seed(args.seed))
    found = {}
    for loss, seed in [(START, 0), *((own, s) for s in args.loss_seeds for own in args.losses)]:
        head, outcome = begun.copy()
        name = f"loss-{loss}-{args.loss_steps}-{seed}"
        if loss != START:
            outcome = begun.train(head, loss, args.loss_steps, seed, f"{name}.pt")
        head.save(args.work_dir / name)
        overlaps = heads.overlaps(head, target, windows, args.anchors, args.seed)
        reached = float(np.mean(overlaps[: args.num_draft_tokens]))
        found[loss, seed] = args.work_dir / name, outcome.seconds, reached
    return found


def _decoded(args: argparse.Namespace, trained: Mapping[tuple[str, int], Any]) -> list[Any]:
    texts = prompts_of(args.prompts)[: args.num_prompts]
    methods = [*STRICT, *((f"{name}:price={price:g}", verifier)
                          for name, verifier in FAMILIES for price in args.prices)]  # fmt: skip
    configs = [Config(method, args.num_draft_tokens, 1, verifier) for method, verifier in methods]
    folders = [folder for folder, *_ in trained.values()]
    lines = [Line(folder.name, own) for folder in folders for own in configs]
    grid = Grid(lines, len(texts), 0, args.metered, args.seed)
    pair = load_pair(args.target, args.target)
    drafters = {folder.name: load(folder) for folder in folders}
    ids = [pair.tokenizer(text)["input_ids"] for text in texts]
    weights = {name: digest((args.work_dir / name / "model.safetensors").read_bytes())
               for name in drafters}  # fmt: skip
    settings = {"prompts": digest("\0".join(texts).encode()), "weights": weights}
    settings |= {"max_new_tokens": args.max_new_tokens, "seed": args.seed}
    with Journal(args.out / "journal.jsonl", settings, args.set_aside_damaged) as journal:
        made = decodes(grid, pair, drafters, ids, args.max_new_tokens, journal)
    return _rows(args, trained, made)


def _rows(args: argparse.Namespace, trained: Mapping[tuple[str, int], Any], made: Decodes) -> Any:
    """Return a row for every loss and seed, and one for the mean over a loss's seeds."""
    own = {key: _numbers(made, found[0].name, args.level) for key, found in trained.items()}
    table = []
    for loss in dict.fromkeys(loss for loss, _ in trained):
        of = {seed: own[loss, seed] for name, seed in trained if name == loss}
        every = [*of.items(), *([("mean", _mean(list(of.values())))] if len(of) > 1 else [])]
        for seed, numbers in every:
            known = [found[1:] for (name, one), found in trained.items()
                     if name == loss and seed in (one, "mean")]  # fmt: skip
            seconds, overlap = np.mean(known, axis=0).tolist()
            row: dict[str, Any] = {"loss": loss, "seed": seed, "seconds": seconds}
            row["overlap"] = overlap
            table.append(row | cells(numbers))
    return table


def _numbers(made: Decodes, name: str, level: float) -> dict[str, Estimate]:
    own = [line for line in made.grid.lines if line.drafter == name]
    found = {
        f"lossless_{verifier}": made.estimate(
            next(line for line in own if line.config.family == Config(method, 0, 1, verifier).family
                 ), "tokens_per_call")
        for method, verifier in STRICT
    }  # fmt: skip
    for policy, verifier in FAMILIES:
        family = Config(f"{policy}:price=1", 0, 1, verifier).family
        lines = [line for line in own if line.config.family == family]
        found[f"{policy}_{verifier}"] = made.at_level(lines, "tokens_per_call", level)
    return found


def _mean(seeds: list[dict[str, Estimate]]) -> dict[str, Estimate]:
    """Return the mean over seeds; its error is that of the texts, which all seeds share."""
    return {
        name: Estimate(
            float(np.mean([own[name].value for own in seeds])),
            np.mean([own[name].left_out for own in seeds], axis=0),
            seeds[0][name].source,
        )
        for name in seeds[0]
    }
