"""Formulas of Markdown pages as MathML, which browsers show without a script."""

import re

from latex2mathml.converter import convert

CODE = re.compile(r"(^ *```.*?^ *```[^\n]*$|`[^`\n]*`)", flags=re.DOTALL | re.MULTILINE)
FENCED = re.compile(r"^( *)```math\n(.*?)^ *```", flags=re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"\$\$(.+?)\$\$", flags=re.DOTALL)
INLINE = re.compile(r"(?<![\\$\w])\$(?!\s)([^$]+?)(?<!\s)\$(?![\w$])")


def with_formulas(text: str) -> str:
    """Return Markdown with the TeX between dollars, outside of code, as MathML."""
    text = FENCED.sub(lambda found: f"$${found[2]}$$", text)
    parts = CODE.split(text)
    parts[::2] = [_converted(part) for part in parts[::2]]
    return "".join(parts)


def _converted(text: str) -> str:
    text = BLOCK.sub(lambda found: f"\n\n<div>{_mathml(found[1], 'block')}</div>\n\n", text)
    # of a line that begins with <math> Markdown would make a block of its own
    return INLINE.sub(lambda found: f"<span>{_mathml(found[1], 'inline')}</span>", text)


def _mathml(tex: str, display: str) -> str:
    # a brace by its name is not known beside an operator
    tex = tex.replace("\\lbrace", "\\{").replace("\\rbrace", "\\}")
    return convert(" ".join(tex.split()), display=display)
