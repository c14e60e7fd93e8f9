"""Every tensor made inside names its device: another default than that of the rows changes nothing.

The meta device stands for a GPU: what is made there has no values.
"""

import ast
import contextlib
from pathlib import Path

import numpy as np
import pytest
import torch

import cactus_theory as ct

HOME = Path(ct.__file__).parent
# the kit has rows of its own, and vLLM sets its own default
ELSEWHERE = ("testing", "vllm")
FILES = [
    path for path in sorted(HOME.rglob("*.py")) if path.relative_to(HOME).parts[0] not in ELSEWHERE
]
# a head is built on meta until its weights are known to fit
MEANT = {"decoding/drafters/eagle3_head.py": ["torch.arange(size)"]}
MAKERS = {"tensor", "as_tensor", "zeros", "ones", "full", "empty", "arange", "eye", "linspace",
          "logspace", "rand", "randn", "randint", "randperm"}  # fmt: skip


def without_device(source: str) -> list[str]:
    """Return the calls of torch that make a tensor where the default says."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [
        ast.unparse(call)
        for call in calls
        if ast.unparse(call.func).removeprefix("torch.") in MAKERS
        and ast.unparse(call.func).startswith("torch.")
        and not {"device", None} & {keyword.arg for keyword in call.keywords}
    ]


def test_a_tensor_without_a_device_is_seen():
    source = "torch.ones(3)\ntorch.ones(3, device=q.device)\ntorch.full(shape, 1.0, **like)"
    assert without_device(source) == ["torch.ones(3)"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(HOME).as_posix())
def test_every_tensor_names_its_device(path):
    meant = MEANT.get(path.relative_to(HOME).as_posix(), [])
    assert without_device(path.read_text(encoding="utf-8")) == meant


def test_another_default_device_changes_nothing():
    q, p = np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.1, 0.8])
    rule, found = ct.policy("band:price=1"), []
    for device in (contextlib.nullcontext(), torch.device("meta")):
        with device:
            best = ct.optimal_acceptance(q, p, delta=0.1)
            found.append([best.target, ct.emitted_law(rule, q, p), ct.audit(rule, q, p).acceptance])
    np.testing.assert_equal(*found)
