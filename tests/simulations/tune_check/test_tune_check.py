"""The whole grid is tuned and decoded once, a finished run is judged without tuning again."""

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")
from simulations import tune_check
from simulations.__main__ import main
from simulations.common.results import read_csv
from tests.amounts import thorough

SMALL = (
    "tune-check --policies mixture:alpha --divergence-per-token 0.05 --batch 1 "
    "--num-draft-tokens 1 2 --cycles 4 --max-new-tokens 5 --num-prompts 2 --repeats 1 --threads 1"
).split()


def row(family: str, speed: float, kl: float, **more) -> dict:
    return {"batch": 1, "level": 0.1, "family": family, "verifier": "chain",
            "num_draft_tokens": 2, "predicted_speed": 100.0, "predicted_kl": 0.1,
            "measured_speed": speed, "measured_kl": kl, "chosen": 0, "chosen_by_ratios": 0,
            } | more  # fmt: skip


@thorough
def test_the_grid_is_measured_and_resumed(tmp_path: Path, monkeypatch, capsys) -> None:
    out = tmp_path / "run"
    asked = [*SMALL, "--out", str(out)]
    assert main(asked) == 0
    rows, notes = read_csv(out / "tune.csv")
    assert notes["dtype"] == "float32"
    assert notes["command"].startswith(
        "python -m simulations tune-check --divergence-per-token 0.05"
    )
    named = {(own["family"], own["verifier"], own["num_draft_tokens"]) for own in rows}
    assert named == {("plain", "", "0")} | {
        (*family, width)
        for family in (
            ("speculative", "chain"),
            ("speculative", "block"),
            ("mixture:alpha", "chain"),
        )
        for width in "12"
    }
    assert sum(int(own["chosen"]) for own in rows) == 1
    for own in rows:
        assert float(own["measured_speed"]) > 0 and float(own["predicted_speed"]) > 0
        relaxed = own["family"] == "mixture:alpha"
        assert (float(own["measured_kl"]) > 1e-6) == relaxed
        # of the half that is not chosen by: the level is that of all texts
        assert float(own["predicted_kl"]) == pytest.approx(0.05 * relaxed, rel=0.9, abs=1e-9)
    kept = (out / "journal.jsonl").read_text()
    assert len(kept.splitlines()) == 1 + 1 + 7 * 2  # settings, tuned, decodes of two prompts
    monkeypatch.setattr(tune_check, "tune", None)
    assert main(asked) == 0 and (out / "journal.jsonl").read_text() == kept
    assert main([*asked, "--repeats", "2"]) == 0  # adds one, and makes none again
    more = (out / "journal.jsonl").read_text()
    assert more.startswith(kept) and len(more.splitlines()) == 1 + 1 + 2 * 7 * 2
    lines = json.loads(kept.splitlines()[1])
    assert set(lines["costs"]["ratios"]) == {"cost_ratio", "verify_cost", "fixed_cost"}
    assert "choices against the measured grid" in capsys.readouterr().out


def test_the_verdict_compares_with_the_best_within_the_level(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    made = [
        row("plain", 80.0, 0.0, predicted_kl=0.0),
        row("slow", 90.0, 0.1, chosen=1, of_the_best_of_other_repeats=0.95),
        row("fast", 100.0, 0.105, chosen_by_ratios=1),
        row("greedy", 500.0, 0.2),  # meters too much to count
    ]
    said = tune_check.verdict(made)
    assert " 0.9 " in said and " 0.95 " in said and "fast@chain, K=2" in said
    assert "greedy" not in said
    assert said.splitlines()[3].endswith("fast@chain")


def test_a_choice_is_compared_with_what_is_fastest_in_other_repeats() -> None:
    """By hand: of two equal settings the luckier one is no better, one that is slower is seen."""
    chosen = row("chosen", 100.0, 0.1, chosen=1, speeds=np.array([100.0, 110.0, 90.0]))
    lucky = row("lucky", 101.0, 0.1, speeds=np.array([110.0, 90.0, 101.0]))
    greedy = row("greedy", 500.0, 0.2, speeds=np.array([500.0, 500.0, 500.0]))
    first, second, _ = tune_check._compared([chosen, lucky, greedy], 0.1)
    # fastest by the other two repeats: chosen (100), lucky (105.5), chosen (105)
    assert first["of_the_best_of_other_repeats"] == pytest.approx(np.median([1.0, 110 / 90, 1.0]))
    assert second["of_the_best_of_other_repeats"] == "" and "speeds" not in first
    faster = row("faster", 120.0, 0.1, speeds=1.2 * chosen["speeds"])
    first, *_ = tune_check._compared([chosen, faster], 0.1)
    assert first["of_the_best_of_other_repeats"] == pytest.approx(1 / 1.2)
    alone = row("alone", 50.0, 0.1, chosen=1, speeds=np.array([50.0]))
    first, *_ = tune_check._compared([alone, row("a", 80.0, 0.1, speeds=np.array([80.0]))], 0.1)
    assert first["of_the_best_of_other_repeats"] == pytest.approx(50 / 80)


def test_settings_are_the_fastest_of_each_family_at_every_level() -> None:
    def line(family: str, verifier: str, width: int, speed: float) -> dict:
        return {"family": family, "verifier": verifier, "num_draft_tokens": width,
                "policy": f"{family}={width}", "predicted_speed": speed}  # fmt: skip

    lossless = [line("speculative", "chain", 2, 9.0), line("speculative", "block", 3, 8.0)]
    results = {
        tune_check.key(1, 0.05): {"lines": [*lossless, line("band:price", "chain", 4, 10.0)]},
        tune_check.key(1, 0.1): {"lines": [*lossless, line("band:price", "chain", 4, 10.0),
                                           line("band:price", "block", 6, 11.0)]},
    }  # fmt: skip
    args = argparse.Namespace(batch=[1], divergence_per_token=[0.05, 0.1])
    assert [tuple(row.values()) for row in tune_check.settings(args, results)] == [
        (0.0, "speculative", "speculative=2", "chain", 2),
        (0.05, "band:price", "band:price=4", "chain", 4),
        (0.1, "band:price", "band:price=6", "block", 6),
    ]


@thorough
def test_settings_of_an_inflated_pair_are_decoded_at_its_cost(tmp_path: Path, capsys) -> None:
    found, out = tmp_path / "settings.csv", tmp_path / "run"
    asked = [*SMALL, "--inflate", "tiny", "--policies", "cactus:delta@block", "band:price"]
    assert main([*asked, "--out", str(tmp_path / "tuned"), "--choices", str(found)]) == 0
    chosen, notes = read_csv(found)
    families = [(row["level"], row["family"]) for row in chosen]
    lossy = [("0.05", "band:price"), ("0.05", "cactus:delta")]
    assert families == [("0", "speculative"), *lossy]
    assert chosen[2]["verifier"] == "block"
    assert "at the cost of 11 M and 1 M parameters" in notes["cost"]
    sizes = ["--num-prompts", "2", "--max-new-tokens", "6", "--repeats", "2", "--metered", "1"]
    asked = ["throughput", "--inflate", "tiny", "--threads", "1", *sizes, "--settings", str(found)]
    assert main([*asked, "--out", str(out)]) == 0
    rows, notes = read_csv(out / "beside_plain.csv")
    assert [row["family"] for row in rows[1:]] == [family for _, family in families]
    assert "at the cost of 11 M and 1 M parameters" in notes["cost"]
    plain, lossless = float(rows[0]["tokens_per_second"]), rows[1]
    assert float(rows[0]["over_plain"]) == 1 and plain > 0
    assert float(lossless["over_lossless"]) == 1 and float(lossless["emitted_kl_per_token"]) < 1e-9
    assert float(rows[2]["emitted_kl_per_token"]) > 1e-6
    assert all(float(row["over_passes"]) > 1 for row in rows[1:])
    assert capsys.readouterr().out.splitlines()[-1].startswith("speeds and costs: the law of")
