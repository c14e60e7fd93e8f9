"""Completions are judged by the Python compiler."""

import pytest

from simulations.throughput.table import parses_so_far


@pytest.mark.parametrize(
    ("prompt", "completion", "verdict"),
    [
        ("def f(x):\n", "    return x\n", True),
        ("def f(x):\n", "    return x\n    retu", True),
        ("def f(x):\n", "return x\n", False),
        ("def f(x):\n", "    return x +\n", False),
        ('def f(x):\n    """Do', "uble x.\n\n", True),
        ("x = (1,\n", "2, 3\n", True),
        ("def f(x):", " pass", None),
        ("def f(:\n", "a\n", None),
    ],
)
def test_completions_are_judged_by_the_python_compiler(prompt, completion, verdict) -> None:
    assert parses_so_far(prompt, completion) is verdict
