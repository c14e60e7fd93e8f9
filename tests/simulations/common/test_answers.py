"""Lengths, seconds and scores of whole answers, on records whose numbers are known."""

import numpy as np
import pytest

from simulations.common.answers import COLUMNS, answer_rows
from simulations.common.grid import Config, Grid
from simulations.common.statistics import hermite

PROMPTS, REPEATS = 6, 3
PLAIN, LOSSLESS, BAND = (
    Config("plain", 0, batch=2),
    Config("speculative", 4, batch=2),
    Config("band:price=1", 4, batch=2),
)
LINES = [PLAIN, LOSSLESS, BAND]


def records(job, limit: int = 1000):
    """Return answers of 10, 20, … tokens by prompt and repeat; the band's are twice as long."""
    band = job.config == BAND
    prompts = [2 * job.group, 2 * job.group + 1]
    lengths = [(10 * (prompt + 1) + job.repeat) * (2 if band else 1) for prompt in prompts]
    seconds = sum(lengths) * (0.5 if band else 2.0 if job.config == PLAIN else 1.0)
    return {
        "seconds": seconds, "tokens": sum(lengths), "lengths": [min(n, limit) for n in lengths],
        "ended": [n < limit for n in lengths], "kl": 0.1 * sum(lengths) * band,
        "raised": 0.02 * sum(lengths) * band,
    }  # fmt: skip


def made(timed: bool = True, **options):
    grid = Grid(LINES, PROMPTS, repeats=REPEATS if timed else 0, metered=1)
    runs = grid.runs(grid.fill(lambda job: records(job, **options)))
    return answer_rows(runs, PROMPTS, timed=timed)


def test_ratios_are_those_of_sums_over_all_repeats_with_errors_by_prompt() -> None:
    _, lossless, band = made()
    assert list(band) == COLUMNS and band["answers"] == PROMPTS * (REPEATS + 1)
    assert band["mean_length"] == pytest.approx(2 * (35 + 1.5)) == 2 * lossless["mean_length"]
    # the same factor for every prompt: paired, there is no error
    assert band["length_ratio"] == pytest.approx(2) and band["length_ratio_se"] < 1e-12
    lengths = np.array([20 * (prompt + 1) + 3 for prompt in range(PROMPTS)])
    assert band["mean_length_se"] == pytest.approx(lengths.std(ddof=1) / PROMPTS**0.5)
    # answers to a prompt differ by 0 to 3 tokens, the band's by twice that
    passes, others = np.arange(REPEATS + 1), np.tile(np.arange(REPEATS + 1), 2)
    errors = (own.std(ddof=1) / (PROMPTS * len(own)) ** 0.5 / 36.5 for own in (passes, others))
    assert band["length_ratio_se_given_prompts"] == pytest.approx(2 * np.hypot(*errors))
    assert lossless["length_ratio"] is None and band["cut"] == 0


def test_an_answer_is_as_much_faster_as_tokens_over_length_say() -> None:
    _, lossless, band = made()
    # 0.5 seconds a token beside 1 of the faster lossless line, twice the tokens
    assert band["speed_ratio"] == 2 and band["answer_speed_ratio"] == pytest.approx(1)
    # repeats 1, 2 and 3 are timed: the median one is 2
    assert band["seconds_per_answer"] == pytest.approx(0.5 * 2 * 37)
    assert lossless["seconds_per_answer"] == pytest.approx(37)
    assert lossless["speed_ratio"] is None


def test_without_timed_repeats_there_are_no_seconds() -> None:
    band = made(timed=False)[-1]
    assert band["seconds_per_answer"] is band["speed_ratio"] is band["answer_speed_ratio"] is None


def test_cut_answers_are_counted() -> None:
    band = made(limit=100)[-1]
    # of 24, those of prompts 4 and 5
    assert band["cut"] == pytest.approx(8 / 24) and 1 < band["length_ratio"] < 2
    rows = made(limit=5)
    assert rows[-1]["cut"] == 1 and rows[-1]["length_ratio"] is None


def test_hermite_is_exact_on_cubics_and_empty_outside():
    x = np.array([0.0, 1.0, 3.0])
    assert hermite(2.2, x, x**3 - x, 3 * x**2 - 1) == pytest.approx(2.2**3 - 2.2)
    assert hermite(3.1, x, x, x) is None and hermite(-0.1, x, x, x) is None
    assert hermite(3 + 1e-13, x, x, np.ones(len(x)), slack=1e-12) == pytest.approx(3)
    assert hermite(0.0, x[:1], x[:1], x[:1]) is None
