"""Time the closed forms, or one verification step, in one run and one thread.

``theory``: the optimum, its policy form, exact laws and audits at real vocabulary sizes,
compared with one softmax of the same row and a plain numpy sort-and-bisect.
``verify``: one verification step of a batch, compared with the straightforward dense way.
Each benchmark is a module, in which ``measure`` yields rows and ``HEADS`` names printed columns.
"""

import argparse
import importlib
from pathlib import Path

from ..common.results import columns, publish

WHAT = ("theory", "verify")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=WHAT, help="which benchmark")
    parser.add_argument("--repeats", type=int, default=7, help="of which the median is reported")
    parser.add_argument("--out", type=Path, help="build/bench/WHAT.csv unless given")


def run(args: argparse.Namespace) -> int:
    benchmark = importlib.import_module(f"simulations.bench.{args.what}")
    rows = list(benchmark.measure(args.repeats))
    print(columns(rows, benchmark.HEADS))
    publish(args, rows, args.out or Path("build/bench") / f"{args.what}.csv")
    return 0
