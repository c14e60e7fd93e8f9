"""Scores of texts for ``throughput --score FILE.py:NAME``: a function of a text, a number out."""

import ast
import warnings


def parses(text: str) -> int:
    """Return 1 if ``ast.parse`` takes the text up to its last whole line, else 0."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as an invalid escape in a string
        try:
            ast.parse(text[: text.rfind("\n") + 1])
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            return 0
    return 1
