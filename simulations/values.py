"""Learn from a trace what accepted tokens are worth, for ``soft_band:price=…,values=FILE``.

TRACE is a folder from ``python -m simulations trace``; measure on other texts than these. The
file is small and JSON: slopes of a concave function by price and by drafted tokens that follow.
"""

import argparse
from pathlib import Path

from cactus_theory.base.terminal import Progress
from cactus_theory.traces import Trace, learn_values
from cactus_theory.traces.values import KNOTS, PRICES

from .common.results import provenance_of, write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    add = parser.add_argument
    add("trace", type=Path, metavar="TRACE")
    add("--num-draft-tokens", type=int, metavar="K", help="largest one, default: as logged")
    add("--cycles", type=int, help="of the trace, its first ones; default: all")
    add("--prices", type=float, nargs="+", default=list(PRICES), help="tokens per nat, rising")
    add("--knots", type=float, nargs="+", default=list(KNOTS), help="rising to 1")
    add("--divergence", default="kl")
    add("--out", type=Path, default=Path("build/values.json"), metavar="FILE")


def run(args: argparse.Namespace) -> int:
    """Learn and write the file; return 0."""
    trace = Trace.open(args.trace)
    with Progress("learning at prices", len(args.prices)) as progress:
        table = learn_values(
            trace,
            num_draft_tokens=args.num_draft_tokens,
            prices=args.prices,
            knots=args.knots,
            divergence=args.divergence,
            cycles=args.cycles,
            on_price=lambda price: progress.advance(f"{price:g}"),
        )
    cycles = min(args.cycles or len(trace), len(trace))
    notes = {"trace": trace.name, "cycles": cycles, "trace_made": trace.header.flat()}
    write_json(args.out, table.as_json() | {"made": provenance_of(args) | notes})
    print(
        f"{args.out}: {len(table.prices)} prices, up to {len(table.slopes[0]) - 1} tokens to follow"
    )
    return 0
