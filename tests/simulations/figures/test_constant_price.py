"""The comparison at equal tokens per call, on sums whose answer is known."""

import numpy as np
import pytest

from simulations.figures.constant_price import SERIES, table

PROMPTS, CALLS = 12, 50


def made_up(factor: float) -> dict[str, np.ndarray]:
    """Return sums where every rule lies on one exponential curve, others ``factor`` above it."""
    found = {}
    for series, specs in SERIES.items():
        for place, spec in enumerate(specs):
            per_call = 2 + 2 * (place + 0.5) / len(specs)
            cost = np.exp(3 * per_call - 10) * (1 if series == "band_price" else factor)
            tokens = per_call * CALLS
            found[spec] = np.tile([tokens, CALLS, cost * tokens], (PROMPTS, 1))
    return found


def test_the_ratio_is_read_at_equal_tokens_per_call() -> None:
    rows = table(made_up(1.4), np.random.default_rng(0))
    assert [row["spec"] for row in rows] == [s for specs in SERIES.values() for s in specs]
    others = [row for row in rows if row["series"] != "band_price"]
    assert len(others) == 12
    for row in others:
        for name in ("kl_ratio", "kl_ratio_low", "kl_ratio_high"):
            assert row[name] == pytest.approx(1.4, rel=1e-9)
    assert all(row["kl_ratio"] is None for row in rows if row["series"] == "band_price")


def test_nothing_is_extrapolated() -> None:
    sums = made_up(1.0)
    sums["cactus:delta=1"] = np.tile([5.0 * CALLS, CALLS, 1.0], (PROMPTS, 1))
    rows = {row["spec"]: row for row in table(sums, np.random.default_rng(0))}
    assert rows["cactus:delta=1"]["kl_ratio"] is None
    assert rows["cactus:delta=1"]["kl_ratio_low"] is None
