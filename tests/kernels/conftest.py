"""Kernels run by Triton's interpreter here, natively where a CUDA device is."""

import importlib.util
import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HAS_TRITON = importlib.util.find_spec("triton") is not None
VARIABLE = "TRITON_INTERPRET"

if HAS_TRITON and DEVICE == "cpu":  # what is decorated now stays interpreted
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "1"

    import cactus_theory.kernels._launch  # noqa: F401

    os.environ.pop(VARIABLE)
    if before is not None:
        os.environ[VARIABLE] = before


@pytest.fixture
def device(monkeypatch):
    """Return the device that kernels run on, for as long as the test takes."""
    if not HAS_TRITON:
        pytest.skip("Triton is not installed (extra kernels)")
    if DEVICE == "cpu":
        monkeypatch.setenv(VARIABLE, "1")
    return DEVICE
