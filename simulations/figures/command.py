"""One table of a figure or a page, exactly: ``python -m simulations table NAME …``."""

import argparse

from .. import blocks, drafters, ledger
from . import constant_price, frontier, overspend, page_tables

# name: module, and what the table shows in a line
TABLES = {
    "frontier": (frontier, "acceptance against emitted KL on real rows"),
    "constant-price": (constant_price, "constant price against constant δ, decoded"),
    "overspend": (overspend, "how far the published rule exceeds its budget"),
    "blocks": (blocks, "token-wise against block verification on a trace"),
    "drafters": (drafters, "drafters of one target, per second and per call; resumes"),
    "ledger": (ledger, "a hard cap on every answer against the same mean; resumes"),
    "measured": (page_tables, "the tables of the pages, from the committed CSV"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the tables, each with flags of its own."""
    tables = parser.add_subparsers(dest="table", required=True, metavar="NAME")
    for name, (module, summary) in TABLES.items():
        table = tables.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(table)
        table.set_defaults(make=module.run, declare=module.add_arguments)


def run(args: argparse.Namespace) -> int:
    """Make the table; return 0."""
    args.command = f"{args.command} {args.table}"
    return args.make(args)
