"""Run the gallery's programs: what each found in a few lines, and its picture.

Every program has ``measure(quick)``, which computes, ``say(found)`` and ``draw(figure, found)``.
"""

import argparse
import importlib
from pathlib import Path

from ..common.inputs import ROOT
from ..common.results import write_bytes
from .look import picture

HERE = ROOT / "simulations" / "gallery"
PROGRAMS = (
    "all_rules", "foreign_rule", "reused_noise", "block_ceiling", "metered_text", "engine_bias",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help=f"out of {', '.join(PROGRAMS)}; all if none")
    add("--quick", action="store_true", help="smaller settings, for a look at the program")
    add("--out", type=Path, default=Path("build/gallery"), help="folder of the pictures")


def run(args: argparse.Namespace) -> int:
    """Run the programs named, print what they found, write their pictures; return 0."""
    for name in args.names:
        if name not in PROGRAMS:
            raise ValueError(f"NAME: must be one of {', '.join(PROGRAMS)}; got {name!r}")
    for name in args.names or PROGRAMS:
        program = importlib.import_module(f"simulations.gallery.{name}")
        found = program.measure(args.quick)
        write_bytes(args.out / f"{name}.png", picture(program.draw, found))
        print(f"{name}\n{program.say(found)}\n")
    return 0
