"""Write a page for every public package, from the docstrings: ``python -m simulations reference``.

The pages need no network: formulas are MathML, and search runs in the page. Modules and names with
an underscore are left out, and so is what a package does not export.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

from .sections import markdown

OUT = Path("docs")
# with the modules that they export
PACKAGES = (
    "cactus_theory",
    "cactus_theory.decoding",
    "cactus_theory.decoding.drafters",
    "cactus_theory.divergences",
    "cactus_theory.kernels",
    "cactus_theory.policies",
    "cactus_theory.testing",
    "cactus_theory.traces",
    "cactus_theory.tuning",
    "cactus_theory.verify",
)
NEEDED = ("pdoc", "latex2mathml.converter")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--out", type=Path, default=OUT, help="folder (default: docs)")


def run(args: argparse.Namespace) -> int:
    """Write the pages and name the first one."""
    pdoc, latex = (_needed(name) for name in NEEDED)
    for package in PACKAGES:
        _resolve(package)
    # what pdoc calls for the docstring format "numpy"
    pdoc.docstrings.numpy = lambda text: markdown(text, latex.convert)
    pdoc.render.configure(docformat="numpy", footer_text="cactus-theory", show_source=False)
    pdoc.pdoc(*PACKAGES, output_directory=args.out)
    print(args.out / "index.html")
    return 0


def _needed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        package = name.partition(".")[0]
        raise RuntimeError(f"{package} is not installed; make setup does that") from None


def _resolve(package: str) -> None:
    """Set what a package imports when it is first asked for: pdoc looks at what is there."""
    module = importlib.import_module(package)
    for name in module.__all__:
        setattr(module, name, getattr(module, name))
