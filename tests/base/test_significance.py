"""Tests of paired items by enumeration and by hand."""

import itertools
import math

import pytest

from cactus_theory.base.significance import holm, items_needed, mcnemar


@pytest.mark.parametrize(("better", "worse"), [(0, 0), (3, 3), (9, 1), (1, 9), (5, 0), (4, 6)])
def test_mcnemar_is_the_share_of_coins_at_least_as_uneven(better: int, worse: int) -> None:
    count = better + worse
    tosses = [sum(own) for own in itertools.product((0, 1), repeat=count)]
    uneven = sum(abs(2 * own - count) >= abs(better - worse) for own in tosses)
    assert mcnemar(better, worse) == pytest.approx(uneven / len(tosses))


def test_holm_raises_each_p_by_the_tests_that_are_left_and_keeps_their_order() -> None:
    assert holm([0.01, 0.5, 0.02]) == pytest.approx([0.03, 0.5, 0.04])
    assert holm([0.04, 0.03]) == pytest.approx([0.06, 0.06]) and holm([]) == []
    assert holm([0.7, 0.6]) == [1.0, 1.0]


def test_the_items_needed_grow_with_the_square_of_error_over_difference() -> None:
    assert items_needed(0.1, 0.05, 100) == math.ceil(100 * (0.5 * 2.8016) ** 2) == 197
    assert items_needed(-0.05, 0.05, 100) == pytest.approx(4 * 197, abs=4)
    assert items_needed(0.0, 0.05, 100) is items_needed(0.1, math.nan, 100) is None
