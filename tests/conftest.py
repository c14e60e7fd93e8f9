"""One thread, no network, reproducible examples, and shapes checked while tests run."""

import gc
import importlib.util
import os
from pathlib import Path

import hypothesis
import pytest
import torch

from tests import amounts, shapes

ROOT = Path(__file__).resolve().parents[1]
torch.set_num_threads(1)
os.environ["HF_HUB_OFFLINE"] = "1"  # read when the first model is loaded

if importlib.util.find_spec("beartype") is not None:  # before anything imports the package
    shapes.install("cactus_theory")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="many more examples and tests")


def pytest_configure(config: pytest.Config) -> None:
    """Say how much is to run before a test is imported."""
    amounts.THOROUGH = config.getoption("thorough")
    shapes.ONE_IN = amounts.amount(32, 4)
    hypothesis.settings.register_profile(
        "cactus",
        deadline=None,
        derandomize=True,
        database=None,
        max_examples=amounts.amount(12, 200),
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("cactus")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not amounts.THOROUGH:
        left = [item for item in items if item.get_closest_marker("thorough") is not None]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Collect seldom: each collection looks through what stays for the whole run."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_unconfigure() -> None:
    gc.unfreeze()  # extension modules count at exit what is still there


@pytest.fixture(scope="session")
def shipped():
    """Return the shipped pair of models, which no test changes."""
    from cactus_theory.decoding import load_pair

    return load_pair(ROOT / "simulations/pair/target", ROOT / "simulations/pair/draft")
