"""Write a page for every public package, from the docstrings: ``python -m simulations reference``.

The pages need no network: formulas are MathML, and search runs in the page. Modules and names with
an underscore are left out, and so is what a package does not export.
"""

import argparse
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

HEADING = re.compile(r"^([A-Z][A-Za-z ]+)\n-{3,}\n", flags=re.MULTILINE)
# text under these is left alone
FREE = ("Examples", "Returns")
# $$…$$ and \\(…\\) are what pdoc makes of ``.. math::`` and ``:math:`` (of one line)
BLOCK = re.compile(r"\$\$(.+?)\$\$", flags=re.DOTALL)
INLINE = re.compile(r"\\\\\((.+?)\\\\\)|:math:`(.+?)`", flags=re.DOTALL)
Convert = Callable[..., str]


def markdown(docstring: str, mathml: Convert) -> str:
    """Return a docstring, without indentation, as Markdown.

    ``mathml`` turns TeX into MathML, as ``latex2mathml.converter.convert`` does.
    """
    first, *rest = HEADING.split(docstring)
    parts = [first]
    for heading, text in zip(rest[::2], rest[1::2], strict=True):
        parts.append(f"**{heading}**\n\n" + (text if heading in FREE else entries(text)))
    return with_formulas("".join(parts), mathml)


def entries(text: str) -> str:
    """Return a section's entries as a list; a line without a meaning below or beside it stays."""
    out = []
    for entry in re.split(r"\n(?! |\n)", text.strip("\n")):
        head, _, below = entry.strip("\n").partition("\n")
        names, colon, meaning = head.partition(" : ")
        told = " ".join(f"{meaning}\n{below}".split())
        stays = not told or not (colon or below)
        out.append(f"\n{entry.strip()}\n" if stays else f"- **{_literal(names)}**: {told}")
    return "\n".join(out) + "\n\n"


def _literal(names: str) -> str:
    return names.replace("*", "\\*").replace("_", "\\_")


def with_formulas(text: str, mathml: Convert) -> str:
    """Return the text with its TeX as MathML, which browsers show without a script."""
    text = BLOCK.sub(lambda found: f"\n\n<div>{_one(found[1], mathml, 'block')}</div>\n\n", text)
    return INLINE.sub(lambda found: _one(found[1] or found[2], mathml, "inline"), text)


def _one(tex: str, mathml: Convert, display: str) -> str:
    return mathml(" ".join(tex.split()), display=display)


OUT = Path("docs")
# with the modules that they export
PACKAGES = (
    "cactus_theory",
    "cactus_theory.decoding",
    "cactus_theory.decoding.drafters",
    "cactus_theory.divergences",
    "cactus_theory.kernels",
    "cactus_theory.losses",
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
