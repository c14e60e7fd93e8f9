"""Families compared at equal KL, on curves whose answer is known."""

import numpy as np
import pytest

from simulations.common.grid import Config, Runs
from simulations.throughput.table import LEVELS, equal_kl_rows, families_of

PRICES = (8, 4, 2, 1, 0.5, 0.25)
DELTAS = (0.001, 0.01, 0.1, 1)
FAMILIES = ("band:price", "cactus:delta")
CLOSE = 1e-3


def member(kl: float, speed: float, noise: np.ndarray) -> Runs:
    judged = [{"kl": kl * 100, "tokens": 100} for _ in noise]
    timed = [{"tokens": speed * (1 + own), "seconds": 1.0} for own in noise]
    return Runs(judged, [timed, timed])


def run(factor: float, noise: float = 0.0, slope: float = 100.0) -> dict[Config, Runs]:
    """Return band and Cactus on one straight line in ln KL, Cactus ``factor`` times as fast."""
    generator, made = np.random.default_rng(1), {}
    for width in (3, 7):
        for place, price in enumerate(PRICES):
            kl = 0.01 * 2.3**place
            wild = noise * generator.standard_normal(9)
            made[Config(f"band:price={price}", width, 1)] = member(
                kl, 1500 + slope * np.log(kl), wild
            )
        for place, delta in enumerate(DELTAS):
            kl = 0.004 * 4.0**place
            wild = noise * generator.standard_normal(9)
            made[Config(f"cactus:delta={delta}", width, 1)] = member(
                kl, factor * (1500 + slope * np.log(kl)), wild
            )
    return made


def test_the_ratio_is_read_at_equal_kl_and_the_same_k() -> None:
    found = equal_kl_rows(run(0.8), FAMILIES)
    assert [(row["num_draft_tokens"], row["kl"]) for row in found] == [
        (width, level) for width in (3, 7) for level in LEVELS
    ]
    for row in found:
        assert row["ratio"] == pytest.approx(1 / 0.8, rel=CLOSE)
        assert row["ratio_low"] == pytest.approx(1 / 0.8, rel=CLOSE) == row["ratio_high"]
        assert row["tokens_per_second_first"] == pytest.approx(1500 + 100 * np.log(row["kl"]))


def test_intervals_hold_the_truth_and_widen_with_the_noise() -> None:
    width = []
    for noise in (0.01, 0.05):
        found = equal_kl_rows(run(1.0, noise), FAMILIES)
        assert np.mean([row["ratio_low"] <= 1 <= row["ratio_high"] for row in found]) > 0.7
        width.append(np.mean([row["ratio_high"] - row["ratio_low"] for row in found]))
    assert 0 < width[0] < width[1] / 3


def test_nothing_is_said_outside_a_curve_or_where_a_family_is_alone() -> None:
    made = run(1.0)
    short = {line: own for line, own in made.items() if "delta=1" not in line.method}
    assert max(row["kl"] for row in equal_kl_rows(short, FAMILIES)) == 0.05
    alone = {line: own for line, own in made.items() if line.width == 3 or "band" in line.method}
    assert {row["num_draft_tokens"] for row in equal_kl_rows(alone, FAMILIES)} == {3}


def test_the_same_policy_by_two_verifiers_makes_two_families() -> None:
    faster = {
        Config(line.method, line.width, line.batch, "block"): Runs(
            own.metered, [[record | {"seconds": 0.5} for record in each] for each in own.timed]
        )
        for line, own in run(0.8).items()
    }
    made, names = run(0.8) | faster, ("band:price@block", "band:price")
    assert families_of(names, list(made)) == names
    for row in equal_kl_rows(made, names):
        assert row["ratio"] == pytest.approx(2, rel=CLOSE) and row["first"] == names[0]
    assert equal_kl_rows(made, FAMILIES) == equal_kl_rows(run(0.8), FAMILIES)
    with pytest.raises(ValueError, match="band:delta@block needs .* band:price, band:price@block"):
        families_of(["band:delta@block", "band:price"], list(made))


def test_families_asked_for_must_be_there() -> None:
    lines = list(run(1.0))
    assert families_of(None, lines) == FAMILIES
    assert families_of(None, lines[:3]) is None
    assert families_of(["cactus:delta", "band:price"], lines) == ("cactus:delta", "band:price")
    with pytest.raises(ValueError, match="--compare: band:delta needs at least two.*band:price"):
        families_of(["band:delta", "cactus:delta"], lines)
