"""Intervals and curves, on numbers whose answer is known."""

import numpy as np
import pytest

from simulations.common.statistics import hermite, interval, monotone_curve, resamples, spread


def test_hermite_is_exact_on_cubics_and_empty_outside():
    x = np.array([0.0, 1.0, 3.0])
    assert hermite(2.2, x, x**3 - x, 3 * x**2 - 1) == pytest.approx(2.2**3 - 2.2)
    assert hermite(3.1, x, x, x) is None and hermite(-0.1, x, x, x) is None
    assert hermite(3 + 1e-13, x, x, np.ones(len(x)), slack=1e-12) == pytest.approx(3)
    assert hermite(0.0, x[:1], x[:1], x[:1]) is None


def test_a_curve_is_flat_where_its_points_turn_and_takes_one_of_equal_places() -> None:
    x, y, slope = monotone_curve(np.array([2.0, 0.0, 1.0, 1.0]), np.array([0.0, 0.0, 1.0, 1.0]))
    assert x.tolist() == [0, 1, 2] and y.tolist() == [0, 1, 0]
    assert slope.tolist() == [1, 0, -1]


def test_an_interval_is_over_the_same_resamples_for_the_same_seed() -> None:
    draws = resamples(5, 3)
    assert (draws == resamples(5, np.random.default_rng(3))).all()
    assert set(np.unique(draws)) == set(range(5))
    drawn = np.array([1.0, 2.0, 3.0, 4.0, 100.0])[draws]
    found = spread("speed", np.array([1.0, 3.0, 100.0]), drawn)
    assert found["speed"] == 3 and found["speed_low"] < 3 < found["speed_high"]
    assert [found["speed_low"], found["speed_high"]] == interval(np.median(drawn, axis=1))
