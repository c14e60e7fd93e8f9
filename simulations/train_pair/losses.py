"""Train a head by several losses from one checkpoint of training by KL.

Training by KL is that of ``train-pair --drafter block`` with the same flags, and is taken from
--work-dir if it is there. Every loss then goes on from it for --loss-steps, with every seed, to a
folder of its own in --work-dir, for ``python -m simulations drafters``. Resumes.
"""

import argparse
from pathlib import Path

import numpy as np
import torch

from cactus_theory.base.files import FolderLock

from ..common.inputs import at_least
from ..common.results import publish
from . import command, heads
from .corpus import encode_stream, held_out, prefixes, training

# the checkpoint that all losses go on from
START = "start"
# windows of unseen text along which overlaps are measured, and places of them
UNSEEN, PLACES = 32, 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags, those of training too."""
    command.add_arguments(parser)
    parser.set_defaults(drafter="block", work_dir=Path("build/losses"), out=Path("losses.csv"))
    parser.description = __doc__
    parser.add_argument("--losses", nargs="+", default=["kl", "tv", "lk", "price"])
    parser.add_argument("--loss-steps", type=int, default=150, help="of every loss")
    parser.add_argument("--loss-seeds", type=int, nargs="+", default=[0, 1])


def run(args: argparse.Namespace) -> int:
    """Train what is missing, and write what it took and the overlap with the target; return 0."""
    command.check_flags(args)
    at_least(args, loss_steps=1)
    if unknown := [name for name in args.losses if name not in heads.LOSSES]:
        raise ValueError(f"--losses: must be among {', '.join(heads.LOSSES)}; got {unknown[0]!r}")
    torch.set_num_threads(args.threads)
    table = []
    with FolderLock(args.work_dir):
        documents, target, tokenizer = command.head_inputs(args)
        stream = encode_stream(tokenizer, training(documents))
        head_training = command.HeadTraining(args, stream, target)
        unseen, source = encode_stream(tokenizer, held_out(documents)), torch.Generator()
        windows = prefixes(unseen, UNSEEN, args.length + 1, source.manual_seed(args.seed))
        cases = [(loss, seed) for seed in args.loss_seeds for loss in args.losses]
        for loss, seed in [(START, 0), *cases]:
            head, outcome = head_training.copy()
            name = f"loss-{loss}-{args.loss_steps}-{seed}"
            if loss != START:
                outcome = head_training.train(head, loss, args.loss_steps, seed, f"{name}.pt")
            head.save(args.work_dir / name)
            places = heads.overlaps(head, target, windows, args.anchors, args.seed)[:PLACES]
            row = {"loss": loss, "seed": seed, "steps": args.loss_steps * (loss != START)}
            row |= {"seconds": outcome.seconds, "overlap": float(np.mean(places))}
            table.append(row | {f"overlap_{i}": value for i, value in enumerate(places, 1)})
    publish(args, table, args.out)
    return 0
