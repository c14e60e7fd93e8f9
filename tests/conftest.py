"""One thread, reproducible examples, and shape annotations checked on every call."""

import importlib.util
import os

import hypothesis
import pytest
import torch
from jaxtyping import install_import_hook

from tests.mutation.core import CORE

torch.set_num_threads(1)

SHAPES_CHECKED = importlib.util.find_spec("beartype") is not None
if SHAPES_CHECKED:  # before anything imports the package
    import tests.shapes  # noqa: F401  the hook looks the checker up by name

    install_import_hook("cactus_theory", "tests.shapes.shapes_only")

THOROUGH = os.environ.get("CACTUS_THEORY_THOROUGH", "") not in ("", "0")
hypothesis.settings.register_profile(
    "cactus",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=500 if THOROUGH else 50,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("cactus")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(CORE):
            item.add_marker(pytest.mark.core)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)
