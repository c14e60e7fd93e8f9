"""Time the closed forms, one verification step, or whole decodes, in one run and one thread.

``theory``: the optimum, its policy form, exact laws and audits at real vocabulary sizes,
compared with one softmax of the same row and a plain numpy sort-and-bisect.
``verify``: one verification step of a batch, compared with the straightforward dense way.
``decode``: tokens per second of a model pair, compared with Hugging Face assisted generation.
Each benchmark is a module, in which ``measure`` yields rows and ``HEADS`` names printed columns.
"""

import argparse
import importlib
from pathlib import Path

from cactus_theory.commands.models import opened

from ..common.inputs import add_pair_arguments
from ..common.results import columns, publish

WHAT = ("theory", "verify", "decode")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=WHAT, help="which benchmark")
    parser.add_argument("--repeats", type=int, default=7, help="of which the median is reported")
    add_pair_arguments(parser)
    parser.add_argument("--out", type=Path, help="build/bench/WHAT.csv unless given")


def run(args: argparse.Namespace) -> int:
    benchmark = importlib.import_module(f"simulations.bench.{args.what}")
    needs, notes = [], {}
    if args.what == "decode":
        needs, notes = [pair := opened(args), args.target.name], {"dtype": pair[0].dtype}
    rows = list(benchmark.measure(args.repeats, *needs))
    print(columns(rows, benchmark.HEADS))
    publish(args, rows, args.out or Path("build/bench") / f"{args.what}.csv", **notes)
    return 0
