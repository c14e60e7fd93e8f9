"""Docstrings as Markdown: what mkdocstrings shows of a public name."""

import re
from typing import Any

import griffe

from .formulas import with_formulas

HEADING = re.compile(r"^([A-Z][A-Za-z ]+)\n-{3,}\n", flags=re.MULTILINE)
# text under these is left alone
FREE = ("Examples", "Returns")
BLOCK = re.compile(r"^( *)\.\. math:: *(.*(?:\n(?:\1 +\S.*| *$))*)", flags=re.MULTILINE)
ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`~?([^`]+)`")
PROMPT = re.compile(r"(?:^>>> .*\n?(?:^(?!\s*$).*\n?)*)+", flags=re.MULTILINE)


class Markdown(griffe.Extension):
    """Let griffe hand on every docstring as Markdown."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Replace the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(docstring: str) -> str:
    """Return a docstring in numpy's format, without indentation, as Markdown."""
    first, *rest = HEADING.split(docstring)
    parts = [first]
    for heading, text in zip(rest[::2], rest[1::2], strict=True):
        parts.append(f"**{heading}**\n\n" + (text if heading in FREE else entries(text)))
    text = BLOCK.sub(lambda found: f"\n$${found[2]}$$\n", "".join(parts))
    text = re.sub(r":math:`([^`]+)`", r"$\1$", text)
    text = ROLE.sub(lambda found: f"`{found[1].removeprefix('cactus_theory.')}`", text)
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    text = PROMPT.sub(lambda found: f"\n```pycon\n{found[0].rstrip()}\n```\n\n", text)
    return with_formulas(text)


def entries(text: str) -> str:
    """Return a section's entries as a list; a line without a meaning below or beside it stays."""
    out = []
    for entry in re.split(r"\n(?! |\n)", text.strip("\n")):
        head, _, below = entry.strip("\n").partition("\n")
        names, colon, meaning = head.partition(" : ")
        told = " ".join(f"{meaning}\n{below}".split())
        stays = not told or not (colon or below)
        out.append(f"\n{entry.strip()}\n" if stays else f"- **{literal(names)}**: {told}")
    return "\n".join(out) + "\n\n"


def literal(names: str) -> str:
    """Return names so that Markdown leaves their stars and underscores alone."""
    return names.replace("*", "\\*").replace("_", "\\_")
