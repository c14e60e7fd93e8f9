"""The site's markup: docstrings as Markdown, and formulas as MathML, which needs no script."""

import re
from typing import Any

import griffe
from latex2mathml.converter import convert

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
    text = BLOCK.sub(lambda match: f"\n$${match[2]}$$\n", "".join(parts))
    text = re.sub(r":math:`([^`]+)`", r"$\1$", text)
    text = ROLE.sub(lambda match: f"`{match[1].removeprefix('cactus_theory.')}`", text)
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    text = PROMPT.sub(lambda match: f"\n```pycon\n{match[0].rstrip()}\n```\n\n", text)
    return with_formulas(text)


def entries(text: str) -> str:
    """Return a section's entries as a list; a line without a meaning below or beside it stays."""
    lines = []
    for entry in re.split(r"\n(?! |\n)", text.strip("\n")):
        head, _, below = entry.strip("\n").partition("\n")
        names, colon, meaning = head.partition(" : ")
        sentence = " ".join(f"{meaning}\n{below}".split())
        stays = not sentence or not (colon or below)
        lines.append(f"\n{entry.strip()}\n" if stays else f"- **{literal(names)}**: {sentence}")
    return "\n".join(lines) + "\n\n"


def literal(names: str) -> str:
    """Return names so that Markdown leaves their stars and underscores alone."""
    return names.replace("*", "\\*").replace("_", "\\_")


CODE = re.compile(r"(^ *```.*?^ *```[^\n]*$|`[^`\n]*`)", flags=re.DOTALL | re.MULTILINE)
FENCED = re.compile(r"^( *)```math\n(.*?)^ *```", flags=re.DOTALL | re.MULTILINE)
DISPLAYED = re.compile(r"\$\$(.+?)\$\$", flags=re.DOTALL)
INLINE = re.compile(r"(?<![\\$\w])\$(?!\s)([^$]+?)(?<!\s)\$(?![\w$])")


def with_formulas(text: str) -> str:
    """Return Markdown with the TeX between dollars, outside of code, as MathML."""
    text = FENCED.sub(lambda match: f"$${match[2]}$$", text)
    parts = CODE.split(text)
    parts[::2] = [_converted(part) for part in parts[::2]]
    return "".join(parts)


def _converted(text: str) -> str:
    text = DISPLAYED.sub(lambda match: f"\n\n<div>{_mathml(match[1], 'block')}</div>\n\n", text)
    # of a line that begins with <math> Markdown would make a block of its own
    return INLINE.sub(lambda match: f"<span>{_mathml(match[1], 'inline')}</span>", text)


def _mathml(tex: str, display: str) -> str:
    # a brace by its name is not known beside an operator
    tex = tex.replace("\\lbrace", "\\{").replace("\\rbrace", "\\}")
    return convert(" ".join(tex.split()), display=display)
