"""Run every cell of the tutorial and write its outputs back into the notebook.

Text and pictures are replaced, the cells stay as they are. If a cell raises, nothing is written.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..common.inputs import ROOT
from ..common.progress import Progress
from ..common.results import write_text
from .cells import as_text, code_cells, load_notebook, run_cells, with_outputs

TUTORIAL = ROOT / "simulations" / "tutorial.ipynb"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--notebook", type=Path, default=TUTORIAL, help="to run, in its folder")
    parser.add_argument("--out", type=Path, help="write here instead")


def run(args: argparse.Namespace) -> int:
    """Run the notebook, write it, and say which outputs are new; return 0."""
    notebook = load_notebook(args.notebook)
    sources = ["".join(cell["source"]) for cell in code_cells(notebook)]
    with Progress("running", len(sources)) as progress:
        ran = run_cells(sources, args.notebook.parent, lambda _: progress.advance())
    out = args.out or args.notebook
    write_text(out, as_text(with_outputs(notebook, ran)))
    print(f"{len(ran)} cells, {sum(len(own.pictures) for own in ran)} pictures; wrote {out.name}")
    return 0
