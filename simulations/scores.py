"""Scores for ``throughput --score FILE.py:NAME``: (prompt, completion) in, a number out."""

import ast
import warnings


def parses(prompt: str, completion: str) -> int:
    """Return 1 if ``ast.parse`` takes both up to their last whole line, else 0."""
    text = prompt + completion
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as an invalid escape in a string
        try:
            ast.parse(text[: text.rfind("\n") + 1])
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            return 0
    return 1
