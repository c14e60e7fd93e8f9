import ast
import math
import sys
from pathlib import Path

import numpy as np
import pytest

import solvers
from solvers import optimal, per_proposal
from tests.test_layering import SOLVERS_MAY_SEE

Q, P = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.7, 0.1])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"target_probs": np.array([0.5, 0.3, 0.3])}, "target_probs: every row must sum to 1"),
        ({"target_probs": np.array([-0.5, 1.3, 0.2])}, "target_probs: .*negative"),
        ({"draft_probs": np.array([0.5, math.nan, 0.5])}, "draft_probs: .*finite"),
        ({"draft_probs": np.array([0.5, 0.5])}, "draft_probs: vocabulary"),
        ({"target_probs": np.stack([Q, Q])}, r"target_probs: must be one row .*\(2, 3\)"),
        ({"divergence": "kullback"}, "divergence: must be one of .*kullback"),
        ({"divergence": "renyi"}, "needs exactly the knob a"),
        ({"delta": -0.1}, r"delta: must lie in \[0, inf\]; got -0.1"),
        ({"delta": math.nan}, "delta: must lie in"),
        ({"delta": "much"}, "delta: must be a number"),
        ({"support": "draft"}, "support: must be one of target, free"),
    ],
)
def test_the_optimal_program_names_what_is_wrong(change, message):
    arguments = {"target_probs": Q, "draft_probs": P, "delta": 0.1, **change}
    with pytest.raises(ValueError, match=message):
        optimal.solve(**arguments)


@pytest.mark.parametrize(
    "change, kind, message",
    [
        ({"target_probs": np.array([0.5, 0.3, 0.3])}, ValueError, "target_probs: every row"),
        ({"target_probs": np.array([1, 0])}, TypeError, "target_probs: must hold floats"),
        ({"token": 3}, ValueError, r"token: must lie in \[0, 2\]; got 3"),
        ({"token": -1}, ValueError, r"token: must lie in \[0, 2\]; got -1"),
        ({"token": 1.0}, TypeError, "token: must be an integer; got 1.0"),
        ({"token": True}, TypeError, "token: must be an integer; got True"),
        ({"delta": -1}, ValueError, "delta: must lie in"),
    ],
)
def test_the_per_proposal_program_names_what_is_wrong(change, kind, message):
    arguments = {"target_probs": Q, "token": 1, "delta": 0.1, **change}
    with pytest.raises(kind, match=message):
        per_proposal.solve(**arguments)


def test_a_root_needs_a_probability():
    with pytest.raises(ValueError, match=r"q_n: must lie in \[0, 1\]; got 1.5"):
        per_proposal.raised_root(1.5, "kl", 0.1)


def test_a_missing_cvxpy_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "cvxpy", None)
    with pytest.raises(ModuleNotFoundError, match=r"cvxpy is not installed.*\[solvers\]"):
        optimal.solve(Q, P, delta=0.1)
    assert optimal.solve(Q, P, delta=0).solver == "identity"


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_programs_take_no_answer_from_the_library_they_certify():
    files = sorted(Path(solvers.__path__[0]).glob("*.py"))
    assert files
    for file in files:
        for name in _imports(file):
            if name.startswith("cactus_theory"):
                assert name.split(".")[1] in SOLVERS_MAY_SEE, f"{file.name} imports {name}"
