"""One thread, reproducible examples, and shape annotations checked on every call."""

import importlib.util
import os

import hypothesis
import pytest
import torch
from jaxtyping import install_import_hook

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


# what `make mutate` runs against every mistake: files, and single tests of larger files
CORE = (
    "tests/decoding/test_cache.py",
    "tests/decoding/test_greedy.py::test_equals_plain_greedy[",
    "tests/decoding/test_ragged.py::test_seven_rows_equal_each_alone",
    "tests/test_band.py::test_ordinary_rows",
    "tests/test_band.py::test_delta_price_and_acceptance",
    "tests/test_band.py::test_price_is_what",
    "tests/test_band_ends.py",
    "tests/test_divergences.py",
    "tests/test_emitted.py::test_audit",
    "tests/test_emitted.py::test_fast_law_equals_enumeration_on_rough_rows",
    "tests/test_policies.py",
    "tests/testing/test_registry_laws.py",
    "tests/verify/test_chain.py::test_rows_of_different_lengths",
    "tests/verify/test_chain.py::test_one_generator_per_row",
    "tests/verify/test_chain.py::test_extreme_coins",
)


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
