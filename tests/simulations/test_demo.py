"""The main job end to end, at its smallest."""

from pathlib import Path

import pytest

from simulations.__main__ import main
from simulations.common.results import read_csv

SMALL = ["--num-prompts", "1", "--max-new-tokens", "8", "--repeats", "1", "--num-draft-tokens", "2"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo")
    policies = ("speculative", "cactus:delta=0.1", "band:price=0.5", "band:delta=0.1")
    named = [word for spec in policies for word in ("--policy", spec)]
    assert main(["demo", *SMALL, *named, "--out", str(out)]) == 0
    return out


def test_the_demo_writes_its_tables_and_pictures(written: Path) -> None:
    for name in ("policies", "band_row"):
        assert (written / f"{name}.png").stat().st_size > 10_000
    rows, _ = read_csv(written / "policies.csv")
    assert [row["policy"] for row in rows] == ["plain", "speculative", "cactus", "band", "band"]
    assert all(float(row["tokens_per_second"]) > 0 for row in rows)


def test_lossless_costs_nothing_and_budgets_are_judged(written: Path) -> None:
    found, _ = read_csv(written / "policies.csv")
    rows = {row["policy"] + ":" + row["knob"]: row for row in found}
    assert float(rows["speculative:"]["emitted_kl_per_token"]) < 1e-12
    assert rows["speculative:"]["held"] == "True"
    band = rows["band:delta=0.1"]
    assert band["held"] == "True" and float(band["largest_row_kl"]) <= 0.1 + 1e-9
    assert rows["cactus:delta=0.1"]["share_over_budget"] != ""
