"""Medians, intervals and costs, on records whose answer is known."""

import numpy as np
import pytest

from simulations.common.grid import Config, Grid
from simulations.throughput import COLUMNS
from simulations.throughput import speed_rows as rows


def made_up(seconds: dict[str, list[float]]) -> list[dict]:
    lines = [Config("plain", 0), Config("speculative", 4)]
    grid = Grid(lines, prompts=1, repeats=len(seconds["plain"]) - 1)
    results = grid.fill(
        lambda job: {"seconds": seconds[job.config.policy][job.repeat], "tokens": 8}
    )
    return rows(grid.runs(results))


def test_ratios_are_medians_of_runs_made_side_by_side() -> None:
    plain, drafted = made_up({"plain": [9.0, 1.0, 2.0, 4.0], "speculative": [9.0, 0.5, 1.0, 4.0]})
    assert plain["speedup_over_plain"] == 1
    assert drafted["speedup_over_plain"] == 2
    ends = [drafted[f"speedup_over_plain_{end}"] for end in ("low", "high")]
    assert ends == [2, 2]  # of one prompt every resample is the same
    assert plain["tokens_per_second"] == 4 and plain["tokens_per_second_max"] == 8


def test_the_interval_is_over_prompts_and_not_over_their_repeats() -> None:
    """Repeats of one prompt say nothing of others: by hand, a point; of unlike ones it is wide."""
    equal = [9.0] + [2.0] * 9
    plain, drafted = made_up({"plain": equal, "speculative": [*equal[:-1], 200.0]})
    assert plain["tokens_per_second_low"] == plain["tokens_per_second_high"] == 4
    assert drafted["tokens_per_second_low"] == 4 and drafted["tokens_per_second_min"] == 0.04
    grid = Grid([Config("plain", 0)], prompts=16, repeats=2)
    records = grid.fill(lambda job: {"seconds": 1.0 + job.group % 2, "tokens": 8})
    (row,) = rows(grid.runs(records))
    drawn = 8 / (1 + np.random.default_rng(0).binomial(16, 0.5, 4000) / 16)
    assert row["tokens_per_second_low"] == pytest.approx(np.percentile(drawn, 5), rel=0.03)
    assert row["tokens_per_second_high"] == pytest.approx(np.percentile(drawn, 95), rel=0.03)
    assert row["speedup_over_plain_low"] == row["speedup_over_plain_high"] == 1


def test_costs_come_from_metered_repeats_and_speed_from_the_others() -> None:
    line = Config("band:price=2", 4, batch=2)
    grid = Grid([line], prompts=4, repeats=3, metered=2)

    def record(job) -> dict:
        metered = job.repeat < 2
        kept = {"seconds": 50.0 if metered else 2.0, "tokens": 8}
        cost = {"kl": 0.5 + job.repeat, "largest_row_kl": 0.25 * job.group}
        return kept | cost if metered else kept

    (row,) = rows(grid.runs(grid.fill(record)))
    assert row["tokens_per_second"] == 4
    assert row["emitted_kl_per_token"] == pytest.approx((0.5 + 0.5 + 1.5 + 1.5) / 32)
    assert row["largest_row_kl"] == 0.25
    assert row.keys() == dict.fromkeys(COLUMNS).keys()
