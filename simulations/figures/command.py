"""Write a table of a figure or a page: ``python -m simulations table TABLE …``."""

import argparse
import importlib

from cactus_theory.base.help_pages import add_commands

# name → (description in one line, flags of a small run, module)
TABLES = {
    "frontier": ("acceptance against emitted KL on real rows",
                 "--tokens-each 2 --out build/example/acceptance_kl.csv", "figures.frontier"),
    "overspend": ("how far the published rule exceeds its budget",
                  "--points 21 --out build/example/overspend.csv", "figures.overspend"),
    "measured": ("the tables of the pages, from the committed CSV",
                 "--root .", "figures.page_tables"),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_commands(parser, {"Tables": TABLES}, _declare, "TABLE")


def _declare(name: str, parser: argparse.ArgumentParser) -> None:
    module = importlib.import_module(f"simulations.{TABLES[name][-1]}")
    parser.description = module.__doc__
    module.add_arguments(parser)
    parser.set_defaults(make=module.run, declare=module.add_arguments)


def run(args: argparse.Namespace) -> int:
    return args.make(args)
