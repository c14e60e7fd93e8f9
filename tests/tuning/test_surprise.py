"""Nats with a bound on surprise: the least tilt that keeps it, on rows, on traces, in tune."""

import pytest

import cactus_theory as ct
from cactus_theory.traces import Trace, replay
from cactus_theory.tuning import Costs, tune
from cactus_theory.tuning.knobs import CLOSE_SURPRISE, EXACT, ROUGH
from cactus_theory.tuning.report import payload, sentence, table
from tests.tuning.test_knobs import ROWS


@pytest.fixture(scope="module")
def trace() -> Trace:
    return Trace.open("simulations/data/trace")


@pytest.mark.parametrize("verifier", ["chain", "block"])
def test_both_bounds_hold_on_a_trace_and_the_tilt_is_no_larger(trace, verifier) -> None:
    given = {"nats": 0.05, "surprise": 0, "verifiers": [verifier], "widths": [3]}
    free, line = ct.compare(["band"], trace, **given).lines
    again = replay(trace, line["policy"], verifier, num_draft_tokens=3,
                   divergences=("kl", "surprise"))  # fmt: skip
    assert again.divergence_per_token().value == pytest.approx(0.05, rel=EXACT)
    assert line["surprise"] == again.divergence_per_token("surprise").value
    assert -3 * CLOSE_SURPRISE < line["surprise"] <= CLOSE_SURPRISE
    assert ct.policy(line["policy"]).tilt > 0 and free["surprise"] == 0
    plain = ct.compare(["band"], trace, nats=0.05, verifiers=[verifier], widths=[3]).lines[1]
    assert plain["surprise"] > 0.02 and plain["tokens_per_call"] > line["tokens_per_call"]


def test_both_bounds_hold_on_rows_and_a_rule_without_a_tilt_has_its_sentence() -> None:
    found = ct.compare(["band", "cactus", "speculative:tilt"], ROWS, nats=0.05, surprise=-0.01)
    _, band, cactus, colder = found.lines
    assert -0.01 - 3 * CLOSE_SURPRISE < band["surprise"] <= -0.01 + CLOSE_SURPRISE
    assert band["nats"] == pytest.approx(0.05, rel=EXACT)
    assert "above -0.01, and has no tilt" in cactus["why"] and cactus["nats"] is not None
    assert colder["surprise"] < -0.01 and not colder["why"] and not found.solved


def test_what_no_tilt_can_keep_is_said() -> None:
    (_, line) = ct.compare(["lenience"], ROWS, nats=0.001, surprise=-0.5).lines
    assert "above -0.5, at any tilt" in line["why"]


def test_a_surprise_goes_with_nats(trace) -> None:
    with pytest.raises(ValueError, match="surprise: must be given with nats alone; got acceptance"):
        ct.compare(["band"], ROWS, acceptance=0.7, surprise=0)
    with pytest.raises(ValueError, match="surprise: must be finite"):
        tune(trace, Costs.ratios(0.1), 0.05, surprise=float("inf"))


def test_tune_keeps_it_at_every_k_and_says_so(trace) -> None:
    tuned = tune(trace, Costs.ratios(0.1), 0.05, policies=["band@chain", "cactus"], widths=[1, 3],
                 surprise=0)  # fmt: skip
    for choice in tuned.choices:
        assert choice.replay.divergence_per_token("surprise").value <= CLOSE_SURPRISE
        if not choice.family.lossless:
            assert choice.replay.divergence_per_token().value == pytest.approx(0.05, rel=ROUGH)
            assert ct.policy(choice.replay.policy).tilt > 0
    assert tuned.surprised["cactus:delta"] > 0.05 and not tuned.over
    said = table(tuned) + sentence(tuned)
    assert "surprise" in said and "and a surprise of" in said
    best = payload(tuned)["recommended"]
    assert abs(best["surprise_per_token"]) < 0.1 and best["surprise_per_token_se"] > 0
