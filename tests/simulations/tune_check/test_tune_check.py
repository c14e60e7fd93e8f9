"""The whole grid is tuned and decoded once, a finished run is judged without tuning again."""

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
