"""Tests of a published chat model, SmolLM2-135M-Instruct: ``make smollm-test`` makes and names it.

``CACTUS_THEORY_SMOLLM`` is its folder; without it the tests of this folder are skipped.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cactus_theory.decoding import load_pair
from cactus_theory.decoding.load import Pair

FOLDER = os.environ.get("CACTUS_THEORY_SMOLLM", "")
OWN = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not FOLDER:
        for item in items:
            if OWN in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs the model: make smollm-test"))


@pytest.fixture(scope="session")
def smollm() -> Path:
    """Return the folder of the model."""
    return Path(FOLDER).absolute()


@pytest.fixture(scope="session")
def pair(smollm: Path) -> Iterator[Pair]:
    """Return the model as a target and its own draft, which nobody changes."""
    yield load_pair(smollm, smollm)
