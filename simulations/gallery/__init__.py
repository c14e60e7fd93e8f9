"""Small programs, each with one picture: what the package is for, in about fifty lines each.

Every program has ``measure(quick)``, which computes, ``say(result)`` and ``draw(figure, result)``.
They share a look, which is that of the project's figures, and the rows of the shipped trace.
"""

import argparse
import importlib
import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.commands.plot import COLOUR, DRAFT, INK, METADATA, MUTED, OPTIMUM, OWN, settings
from cactus_theory.traces import Trace
from cactus_theory.traces.rows import row_pairs

from ..common.inputs import ROOT
from ..common.results import write_bytes

CACTUS, SOFT, BUDGETED = (COLOUR[name] for name in ("cactus", "soft_band", "band_delta"))
DPI = 100
SIZE = (7.2, 3.2)  # inches
HERE = ROOT / "simulations" / "gallery"
PROGRAMS = (
    "all_rules", "foreign_rule", "reused_noise", "block_ceiling", "metered_text", "engine_bias",
)  # fmt: skip
__all__ = ["DRAFT", "INK", "MUTED", "OPTIMUM", "OWN"]  # the programs' too


def picture(draw: Any, result: Any) -> bytes:
    """Return the PNG of ``draw(figure, result)`` (extra ``figures``); equal bytes each time."""
    check.optional_module("matplotlib", "figures")
    import matplotlib
    from matplotlib.figure import Figure

    content = io.BytesIO()
    with matplotlib.rc_context(settings()):
        figure = Figure(figsize=SIZE, layout="constrained")
        draw(figure, result)
        figure.savefig(content, format="png", dpi=DPI, metadata=METADATA[".png"])
    return content.getvalue()


def bars(axes: Any, rows: dict[str, tuple[Any, str]], names: list[str]) -> None:
    """Draw rows of probabilities, label → (row, colour), as bars side by side."""
    width = 0.8 / len(rows)
    for place, (label, (row, colour)) in enumerate(rows.items()):
        at = [token + (place - (len(rows) - 1) / 2) * width for token in range(len(names))]
        axes.bar(at, row, width * 0.92, color=colour, label=label)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("probability")
    axes.grid(axis="x", visible=False)


def shipped_trace() -> Trace:
    """Return the example trace: 68 rounds of 4 drafted tokens over 11 short texts."""
    return Trace.open(ROOT / "simulations" / "data" / "trace")


def real_rows(most: int | None = None) -> tuple[Tensor, Tensor]:
    """Return target and draft rows (R, V) of the shipped trace: all 272, or ``most`` of them."""
    _, target, draft = (torch.cat(rows) for rows in zip(*row_pairs(shipped_trace()), strict=True))
    if most is None:
        return target, draft
    spread = torch.linspace(0, len(target) - 1, most).long()
    return target[spread], draft[spread]


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
        result = program.measure(args.quick)
        write_bytes(args.out / f"{name}.png", picture(program.draw, result))
        print(f"{name}\n{program.say(result)}\n")
    return 0
