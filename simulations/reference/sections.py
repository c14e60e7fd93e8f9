"""Docstrings as Markdown: the sections as they are written here, formulas as MathML.

pdoc reads ``name : text`` as the name's type. Here it is what the name means, and one entry may
be about several names.
"""

import re
from collections.abc import Callable

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
