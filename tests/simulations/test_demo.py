"""The main job end to end, at its smallest."""

import math
from pathlib import Path

import pytest

import cactus_theory as ct
from simulations.__main__ import main
from simulations.common.results import read_csv

SMALL = ["--num-prompts", "2", "--max-new-tokens", "8", "--repeats", "1", "--num-draft-tokens", "2"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo")
    policies = ("lenience", "cactus:delta=1", "band")
    named = [word for spec in policies for word in ("--policy", spec)]
    assert main(["demo", *SMALL, *named, "--nats", "0.03", "--out", str(out)]) == 0
    return out


def test_the_demo_writes_its_tables_and_pictures(written: Path) -> None:
    for name in ("policies", "band_row"):
        assert (written / f"{name}.png").stat().st_size > 10_000
    rows, notes = read_csv(written / "policies.csv")
    methods = [row["method"] for row in rows]
    assert methods == ["plain", "speculative", "cactus", "lenience", "band"]
    assert all(float(row["tokens_per_second"]) > 0 for row in rows)
    assert notes["command"].startswith("python -m simulations demo") and "machine" in notes


def test_the_band_makes_most_at_equal_nats_and_published_cactus_spends_its_own(
    written: Path,
) -> None:
    rows, _ = read_csv(written / "equal_nats.csv")
    (published,) = [row for row in rows if row["policy"].startswith("cactus")]
    assert published["held"] == "" and float(published["nats"]) > 0.1
    asked = {float(row["asked"]) for row in rows if row["held"]}
    assert asked == {0.02, 0.03, 0.05, 0.1, 0.2, 0.4}
    for level in (0.02, 0.03, 0.05):
        found = {row["policy"].partition(":")[0]: row for row in rows
                 if row["held"] and float(row["asked"]) == level}  # fmt: skip
        assert float(found["band"]["nats"]) == pytest.approx(level, rel=1e-3)
        assert float(found["band"]["acceptance"]) > float(found["lenience"]["acceptance"])


def test_the_drawn_row_names_what_band_and_cactus_spend_on_it(written: Path) -> None:
    rows, _ = read_csv(written / "band_row.csv")
    for law, nats in (("band", "nats"), ("cactus", "cactus_nats")):
        pairs = [(float(row[law]), float(row["q"])) for row in rows]
        drawn = sum(h * math.log(h / q) for h, q in pairs if h > 0)
        # tokens that are not drawn have less than 1e-4 each
        assert float(rows[0][nats]) == pytest.approx(drawn, abs=0.02), law
    assert float(rows[0]["nats"]) == pytest.approx(float(rows[0]["delta"]), rel=1e-6)


def test_what_is_decoded_is_what_was_solved(written: Path) -> None:
    solved, _ = read_csv(written / "equal_nats.csv")
    decoded, _ = read_csv(written / "policies.csv")
    names = {f"{row['method']}:{row['knob']}" for row in decoded}
    assert {row["policy"] for row in solved if row["asked"] == "0.03"} <= names
    (lossless,) = [row for row in decoded if row["method"] == "speculative"]
    assert float(lossless["emitted_kl_per_token"]) < 1e-12


def test_its_trace_is_one_that_can_be_compared_on(written: Path) -> None:
    (line, _) = ct.compare(["band:price=1"], written / "trace").lines
    assert line["policy"] == "speculative" and ct.traces.Trace.open(written / "trace").texts == 2
