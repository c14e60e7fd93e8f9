"""The small pair in what kernels read, and the kernels interpreted or in torch."""

import pytest
import torch

from cactus_theory.decoding.device import verify
from tests.kernels.conftest import device  # noqa: F401


@pytest.fixture(scope="module")
def single(make_model, make_draft):
    """The small pair in float32, which kernels read."""
    target = make_model(dtype=torch.float32)
    return target, make_draft(target)


@pytest.fixture
def interpreted(device):  # noqa: F811
    """Let kernels run on the CPU."""
    if device != "cpu":
        pytest.skip("kernels are compiled here, not interpreted")


@pytest.fixture
def in_torch(monkeypatch):
    """Let the step take what the kernels have in torch: the same streams, and quick on a CPU."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(verify, "runs_kernels", lambda device: True)  # noqa: F811
    monkeypatch.setattr(verify, "find_spec", lambda name: True)
