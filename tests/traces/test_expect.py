"""What is expected against hand-made sums, intervals against their promise, and the command."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.base.significance import EXPECTED
from cactus_theory.cli import main
from cactus_theory.traces import (
    Cycle,
    Observation,
    Trace,
    compare_observed,
    expect,
    log_trace,
    save_trace,
)
from cactus_theory.traces.counters import observed_rates, read_metrics
from cactus_theory.traces.estimate import CannotSay
from cactus_theory.traces.expected_acceptance import Expectation, LoggedRounds, critical, wilson
from tests.amounts import amount

EXAMPLE = str(Path(__file__).resolve().parents[2] / "simulations" / "data" / "trace")
EXACT = 1e-12
TABULATED = 1e-4  # of printed quantiles of Student's t


def by_hand(trace: Trace, rule: ct.Policy, end: int = -1, most: int | None = None):
    """Return how many rounds there are, and sums by position of what they reach and accept.

    Nothing follows ``end``; of texts of ``most`` tokens, one of which is not drafted in a round, no
    more is drafted than is left. The last sum is of accepted ends: after them no token is drawn.
    """
    accepted, reached, last, rounds = np.zeros(3), np.zeros(3), 0.0, 0
    for cycle in trace:
        left = 3 if most is None else max(0, most - cycle.position - 1)
        ids, alive = cycle.draft_token_ids[:left], 1.0
        rounds += len(ids) > 0
        for place, token in enumerate(ids.tolist()):
            q = cycle.target_probs[place]
            p = cycle.draft_probs[place] if cycle.draft_probs is not None else torch.eye(5)[token]
            reached[place] += alive
            alive *= float(rule.acceptance(q, p.double(), ids[place : place + 1])[0])
            accepted[place] += alive
            if token == end:
                last += alive
                break
    assert 0 < rounds < len(trace)  # a round without a draft does not count
    return rounds, reached, accepted, last


@pytest.mark.parametrize("behind", [False, True])
def test_expected_are_means_of_products(tmp_path: Path, ragged, behind: bool) -> None:
    """What follows the end of a text may count."""
    sizes = {"vocab_size": 5, "num_draft_tokens": 3, "dtype": "float32", "eos_token_ids": (4,)}
    trace, rule = save_trace(tmp_path / "t", ragged, **sizes), ct.policy("band:price=1")
    seen = expect(trace, rule, behind_ends=behind)
    rounds, reached, accepted, last = by_hand(trace, rule, -1 if behind else 4)
    assert seen.rounds == rounds
    assert [own.value for own in seen.accepted] == pytest.approx(accepted / rounds, abs=EXACT)
    assert [own.value for own in seen.if_reached] == pytest.approx(accepted / reached, abs=EXACT)
    tokens = 1 + (accepted.sum() - last) / rounds
    assert seen.tokens_per_call.value == pytest.approx(tokens, abs=EXACT)


def test_short_ends_count_what_is_left_of_a_text(tmp_path: Path, tiny) -> None:
    trace = log_trace(*tiny, [[1, 2], [3, 4]], tmp_path / "t", num_draft_tokens=3,
                      max_new_tokens=7, cycles=9)  # fmt: skip
    seen = expect(trace).counted(short_ends=True)
    rounds, _, accepted, _ = by_hand(trace, ct.policy("speculative"), most=7)
    assert seen.rounds == rounds
    assert [own.value for own in seen.accepted] == pytest.approx(accepted / rounds, abs=EXACT)
    chances = accepted / [rounds, *accepted[:-1]]
    assert [own.value for own in seen.if_accepted] == pytest.approx(chances, abs=EXACT)


def test_texts_of_a_prompt_are_errors_of_their_own(tmp_path: Path, tiny) -> None:
    trace = log_trace(*tiny, [[1, 2], [3, 4], [5]], tmp_path / "t", num_draft_tokens=2,
                      max_new_tokens=6, cycles=20)  # fmt: skip
    seen = expect(trace)
    assert trace.texts >= 6 and seen.freedom == trace.texts - 3


def test_coins_have_the_variance_that_is_enumerated(tmp_path: Path) -> None:
    rows = torch.tensor([[[0.5, 0.5], [0.75, 0.25]], [[0.875, 0.125], [0.25, 0.75]]])
    rows = torch.cat([rows, rows[:, :1]], 1).double()
    cycles = [Cycle(0, place, torch.zeros(2, dtype=torch.int64), q, None)
              for place, q in enumerate(rows)]  # fmt: skip
    trace = save_trace(
        tmp_path / "t", [cycles, cycles], vocab_size=2, num_draft_tokens=2, dtype="float32"
    )
    seen = expect(trace)
    reached, own = np.zeros(2), np.zeros(2)
    for cycle in trace:
        first, second = (float(q[0]) for q in cycle.target_probs[:2])
        for place, (alive, accepted) in enumerate(((1.0, first), (first, second))):
            rate = seen.if_reached[place].value
            chances = np.array([1 - alive, alive * (1 - accepted), alive * accepted])
            values = np.array([0.0, -rate, 1 - rate])  # accepted minus expected
            own[place] += chances @ values**2 - (chances @ values) ** 2
            reached[place] += alive
    found = [seen.coins(place) for place in range(2)]
    assert found == pytest.approx(own / reached, abs=EXACT)


def test_critical_values_are_students() -> None:
    for freedom, level, value in [(5, 0.95, 2.5706), (10, 0.99, 3.1693), (1, 0.9, 6.3138)]:
        assert critical(1, freedom, level) == pytest.approx(value, abs=TABULATED)
    assert critical(5, 30) == critical(1, 30, 1 - (1 - EXPECTED) / 5)
    assert critical(1, 0) == float("inf")


def made(
    source: np.random.Generator, prompts: int, repeats: int, spread: float, factor: float = 1.0
) -> Expectation:
    """Return an expectation of texts whose prompts accept alike, in two positions."""
    own = np.clip(0.6 + spread * source.standard_normal(prompts), 0.1, 0.9)
    texts = prompts * repeats
    rate = factor * (np.tile(own, repeats) + 0.02 * source.standard_normal(texts))
    text = np.repeat(np.arange(texts), source.integers(8, 16, texts))
    alive = rate[text, None] ** np.arange(3)
    whole = np.full(len(text), 2)
    going, names = np.ones_like(alive, bool), ("made", "chain", "made")
    order = np.tile(np.arange(prompts), repeats)
    return Expectation(LoggedRounds(text, whole, whole, alive, going, order, names))


def test_intervals_hold_together() -> None:
    """Of as many runs fewer than 1 % miss; more than 4 of 300 do so with probability 0.13 %.

    The expected value of a prompt's texts is 0.6 on average, and that of their pairs is known only
    through many of them, as ratios weigh texts by their rounds.
    """
    source, missed, runs = np.random.default_rng(3), 0, amount(60, 300)
    for _ in range(runs):
        own = made(source, 8, 4, 0.0)
        spans = own.intervals([*own.if_reached, own.tokens_per_call])
        wanted = [0.6, 0.6, 1 + 0.6 + 0.36]
        missed += not all(
            low <= value <= high for (low, high), value in zip(spans, wanted, strict=True)
        )
    assert missed <= 4


@pytest.mark.parametrize("value", [0.0, 0.02, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("error", [0.0, 0.01, 0.4])
def test_no_interval_leaves_what_a_share_can_be(value: float, error: float) -> None:
    low, high = wilson(value, error, 4.0, 11, 0.0, 1.0)
    assert 0 <= low <= value <= high <= 1 and (low < high) == (error > 0 or value in (0, 1))
    tokens = wilson(1 + 4 * value, 4 * error, 4.0, 11, 1.0, 4.0)
    assert tokens == pytest.approx((1 + 4 * low, 1 + 4 * high))
    assert wilson(float("nan"), 0.1, 4.0, 11, 0.0, 1.0) == (0, 1)


def test_errors_of_the_same_prompts_leave_out_how_prompts_differ() -> None:
    own = made(np.random.default_rng(0), 8, 4, 0.1)
    first = own.if_reached[0]
    assert own.error(first) < 0.5 * first.standard_error
    assert own.freedom == 32 - 8
    among = Expectation(replace(own.record, prompts=np.arange(32)))
    assert among.freedom == 31
    assert among.error(first) == pytest.approx(first.standard_error, abs=EXACT)


def counts(source: np.random.Generator, factor: float = 1.0, texts: int = 40) -> Observation:
    """Count rounds of other texts than :func:`made` returns, of prompts that accept alike."""
    rates = np.clip(0.6 + 0.02 * source.standard_normal(texts), 0.1, 0.9) * factor
    rates = np.repeat(rates, source.integers(8, 16, texts))
    kept = (source.random((len(rates), 2)) < rates[:, None]).cumprod(-1)
    return Observation(kept.mean(0), len(rates), np.zeros(2), answers=float(texts))


def test_a_healthy_engine_is_seldom_off_and_a_fault_is_still_seen() -> None:
    """Two in a hundred are promised; of 60 more than 6 are with probability 0.1 %."""
    source, runs = np.random.default_rng(11), amount(60, 400)
    alarms = [
        sum(compare_observed(made(source, 24, 1, 0.0), counts(source, factor)).alarm
            for _ in range(runs))
        for factor in (1.0, 0.75)
    ]  # fmt: skip
    assert alarms[0] <= amount(6, 18) and alarms[1] >= 0.8 * runs


def test_what_the_verdict_depends_on_is_asked() -> None:
    """Ends of text: left out, as of vLLM's counters, they are a fault of the second place on."""
    source = np.random.default_rng(5)
    own = made(source, 30, 1, 0.0).record
    ended = source.random(len(own.text)) < 0.3  # at the first drafted token
    going = own.going.copy()
    going[ended, 1:] = False
    healthy = Expectation(replace(own, going=going, left=1 + (source.random(len(own.text)) < 0.3)))
    seen = Observation(np.array([0.6, 0.36]), 4000, np.zeros(2), drafted=8000.0, behind_ends=True)
    assert not compare_observed(healthy.counted(behind_ends=True), seen).alarm
    assert compare_observed(healthy, replace(seen, behind_ends=False)).alarm
    with pytest.raises(ValueError, match="--behind-ends: must say .* the verdict depends on it"):
        compare_observed(healthy, replace(seen, behind_ends=None))
    short = Observation(np.array([0.6, 0.11]), 4000, np.zeros(2), behind_ends=True)
    with pytest.raises(ValueError, match="--drafted: must say how many tokens were drafted"):
        compare_observed(healthy, short)


def test_what_is_expected_is_no_alarm_and_a_gap_is_at_its_position() -> None:
    seen = expect(EXAMPLE)
    rates = np.array([own.value for own in seen.accepted])
    same = compare_observed(seen, Observation(rates, 2000, np.zeros(4)))
    assert not same.alarm and max(abs(gap["errors"]) for gap in same.gaps) < EXACT
    for counts, shown in ((0.4, False), (0.6, True)):  # a count is a whole number
        near = compare_observed(
            seen, Observation(rates + [counts / 2000, 0, 0, 0], 2000, np.zeros(4))
        )
        assert (near.gaps[0]["errors"] > 0) == shown
    lower = rates * [1, 0.3, 0.3, 0.3]
    found = compare_observed(seen, Observation(lower, 2000, np.zeros(4)))
    assert [gap["position"] for gap in found.gaps if gap["off"]] == [2]
    assert found.sentence == "not as expected: off at position 2"
    few = compare_observed(seen, Observation(np.array([0.7, 0.004, 0.0, 0.0]), 1000, np.zeros(4)))
    assert [gap["position"] for gap in few.gaps] == [1, 2]  # 4 rounds reach position 3
    ten = compare_observed(seen, Observation(np.array([0.7, 0.01, 0.0, 0.0]), 1000, np.zeros(4)))
    assert [gap["position"] for gap in ten.gaps] == [1, 2, 3]
    with pytest.raises(ValueError, match="the 4 positions that are expected"):
        compare_observed(seen, Observation(rates[:3], 2000, np.zeros(3)))


VLLM = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 1000.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 500.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 2000.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="m"} 1000.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 1200.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 800.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 4e+02
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 250.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="1"} 200.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 80.0
vllm:request_success_total{engine="1",finished_reason="length",model_name="m"} 10.0
"""


def test_counters_of_vllm(tmp_path: Path) -> None:
    now, before = tmp_path / "now.txt", tmp_path / "before.txt"
    now.write_text(VLLM)
    seen = read_metrics(now, width=2)
    assert seen.rounds == 1500 and seen.drafted == 3000
    assert seen.behind_ends is True and seen.answers == 90
    assert seen.accepted.tolist() == [1050 / 1500, 600 / 1500]
    told = read_metrics(now, width=2, behind_ends=False, answers=30.0)
    assert told.behind_ends is False and told.answers == 30
    before.write_text(VLLM.replace("1000.0", "200.0").replace("500.0", "100.0").replace(
        "2000.0", "400.0").replace("800.0", "150.0").replace("4e+02", "50").replace(
        "250.0", "50.0").replace('position="1"} 200.0', 'position="1"} 10.0'))  # fmt: skip
    between = read_metrics(now, before, width=2)
    assert between.accepted.tolist() == [850 / 1200, 540 / 1200]
    with pytest.raises(ValueError, match="at least 10 drafts since"):
        read_metrics(now, now, width=2)


def counters(engine: str, drafts: int, first: int, second: int, created: float = 0) -> str:
    """What vLLM writes of one engine, with the time of its start if that is told."""
    name, own = "vllm:spec_decode_num", f'engine="{engine}",model_name="m"'
    lines = [f"{name}_drafts_total{{{own}}} {drafts}"]
    lines += [f"{name}_draft_tokens_total{{{own}}} {2 * drafts}"]
    lines += [f'{name}_accepted_tokens_per_pos_total{{{own},position="{place}"}} {count}'
              for place, count in enumerate((first, second))]  # fmt: skip
    lines += [f"{name}_drafts_created{{{own}}} {created}"] * bool(created)
    return "\n".join(lines) + "\n"


def between(tmp_path: Path, before: str, now: str) -> Observation:
    for name, text in (("before", before), ("now", now)):
        (tmp_path / name).write_text(text)
    return read_metrics(tmp_path / "now", tmp_path / "before", width=2)


def test_an_engine_that_restarted_is_counted_from_its_restart(tmp_path: Path) -> None:
    """Counters of each engine by themselves, as Prometheus reads an increase."""
    one, other = counters("0", 1000, 700, 300), counters("1", 5000, 3500, 1500)
    later = counters("0", 9000, 6300, 2700)
    seen = between(tmp_path, one + other, later + counters("1", 500, 350, 150))
    assert seen.rounds == 8500 and seen.drafted == 17000 and seen.restarted == 1
    assert seen.accepted.tolist() == [0.7, 0.3]
    # one counter that fell tells of all of its engine, and a label more is another engine
    seen = between(tmp_path, one + other, later + counters("1", 4000, 3600, 1600))
    assert seen.rounds == 12000 and seen.accepted.tolist() == [9200 / 12000, 4000 / 12000]
    here, there = (f'0",instance="{place}' for place in "ab")
    before = counters(here, 5000, 3500, 1500) + counters(there, 5000, 3500, 1500)
    now = counters(here, 6000, 4200, 1800) + counters(there, 10, 7, 3)
    assert between(tmp_path, before, now).rounds == 1010
    # an engine that joined began at 0; one that was created anew may have counted beyond
    assert between(tmp_path, one, later + other).rounds == 13000
    told = counters("0", 1000, 700, 300, 1.5e9), counters("0", 9000, 6300, 2700, 1.6e9)
    assert between(tmp_path, *told).rounds == 9000


def test_what_two_texts_cannot_tell_is_refused(tmp_path: Path) -> None:
    one, other = counters("0", 1000, 700, 300), counters("1", 5000, 3500, 1500)
    with pytest.raises(ValueError, match="lacks vllm.*'engine': '1'"):
        between(tmp_path, one + other, one.replace("1000", "2000"))
    with pytest.raises(ValueError, match="counter once; got two of vllm.*drafts_total.engine"):
        between(tmp_path, one, one + one.replace("1000", "3000"))
    told = counters("0", 9000, 6300, 2700, 1.5e9), counters("0", 1000, 700, 300, 1.5e9)
    with pytest.raises(ValueError, match="before and after.* has not restarted"):
        between(tmp_path, *told)


def test_shares_are_of_the_rounds_that_drafted_a_position() -> None:
    """With K = 2 a short draft is of one token; else the sum leaves open where drafts end."""
    zero = np.zeros(4)
    least, most = Observation(zero, 1000, zero, drafted=3700.0).drafted_share()
    assert least == pytest.approx([1, 0.9, 0.85, 0.7]) and most.tolist() == [1] * 4
    assert Observation(zero, 1000, zero).drafted_share()[0].tolist() == [1] * 4
    with pytest.raises(ValueError, match="rounds: must lie in"):
        Observation(zero, 0, zero)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nothing 1\n", "must hold vllm"),
        ("sglang:spec_accept_length 2.5\n", "must hold vllm"),
        (VLLM.replace('"m",position="1"', '"n",position="1"'), "one model"),
        (VLLM.replace('position="1"', 'position="2"'), "positions 0, 1"),
        (VLLM.replace("2000.0", "9000.0"), "drafted: must be how many .* got 10000 in"),
        (VLLM.replace("2000.0", "100.0"), "drafted: must be how many .* got 1100 in"),
        (VLLM.replace(" 80.0", " 9e9"), "answers: must lie in"),
        (VLLM.replace("800.0", "-1.0"), "must lie in"),
        (VLLM.replace("4e+02", "900"), "do not rise"),
        (VLLM.replace(" 1000.0", " 0").replace(" 500.0", " 3"), "has just started .*; got 3"),
        (VLLM.replace("1000.0", "9" * 400), "must lie in"),
    ],
)
def test_metrics_that_make_no_sense(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "m").write_text(text)
    with pytest.raises(ValueError, match=said):
        read_metrics(tmp_path / "m", width=2)


def test_printed_rates_know_their_digits() -> None:
    seen = observed_rates("0.8, 0.55", 1000, 2)
    assert seen.rounding == pytest.approx(np.array([0.1, 0.01]) / np.sqrt(12))
    for text, rounds, drafted, said in [
        ("0.8,0.9", 10, None, "do not rise"),
        ("0.8,x", 10, None, "must be a number"),
        ("0.8", 10, None, "the 2 positions"),
        ("0.8,0.5", None, None, "over how many rounds"),
        ("0.8,0.5", 0, None, "--rounds"),
        ("0.8,0.5", float("inf"), None, "--rounds: must lie in"),
        ("0.8,0.5", 100, 300.0, "drafted: must be how many"),
        ("0.8,0.5", 100, 99.0, "drafted: must be how many"),
        ("2.4", 100, None, "do not rise"),
    ]:
        with pytest.raises(ValueError, match=said):
            observed_rates(text, rounds, 2, drafted=drafted)


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_command_reads_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    counted = ("--observed", "0.73,0.5,0.35,0.24", "--rounds", "900")
    wanted = ("--trace", EXAMPLE, "--verifier", "block")
    found = run_json(capsys, "expect", *wanted, *counted)
    seen = expect(EXAMPLE, verifier="block")
    assert found["tokens_per_call"] == seen.tokens_per_call.value
    assert [line["accepted"] for line in found["positions"]] == [own.value for own in seen.accepted]
    assert found["compared"]["alarm"] is False and len(found["compared"]["gaps"]) == 4
    assert found["compared"]["sentence"] == "as expected: every position is inside"
    assert main(["expect", "--trace", EXAMPLE, "--observed", "0.36,0.11,0.03,0.01",
                 "--rounds", "2000"]) == 0  # fmt: skip
    said = capsys.readouterr().out
    assert "not as expected: off at position 1, 2" in said
    assert "same prompts" in said and "`served` reads them" in said


@pytest.mark.parametrize(("counted", "cycles"), [([], 1000), (["900"], 2700), (["9e3"], 6000)])
def test_more_rounds_are_decoded_than_were_counted(counted, cycles, monkeypatch, capsys) -> None:
    drawn = []

    def stop(pair, ids, folder, cycles, **_):
        drawn.append(ids)
        raise ValueError(f"{cycles} rounds")

    monkeypatch.setattr("cactus_theory.commands.expect.log_shown", stop)
    counted = counted and [*MODE, *OBSERVED, "--rounds", *counted]
    assert main(["expect", *PAIR, *counted]) == 2
    assert f"{cycles} rounds" in capsys.readouterr().err
    if not counted:  # a file may be sorted, and few of its prompts are reached
        assert main(["expect", *PAIR, "--seed", "1"]) == 2
        assert drawn[0] != drawn[1] and sorted(drawn[0]) == sorted(drawn[1])


PAIR = ("--target simulations/pair/target --draft simulations/pair/draft "
        "--prompts simulations/data/prompts.jsonl").split()  # fmt: skip
MODELS, MODE = "--target x --draft x --prompts x".split(), ["--draft-mode", "greedy"]
OBSERVED = ["--observed", "0.5,0.4,0.3,0.2"]


def few(folder: Path, texts: int, drafted: int = 1) -> str:
    rows = torch.tensor([[0.5, 0.5], [0.2, 0.8]]).double()
    cycle = Cycle(0, 0, torch.ones(drafted, dtype=torch.int64), rows[: drafted + 1], rows[:drafted])
    own = [[cycle] * 3] * texts
    return str(save_trace(folder, own, vocab_size=2, num_draft_tokens=1).folder)


@pytest.mark.parametrize(("texts", "drafted"), [(1, 1), (2, 1), (4, 1), (6, 0)])
def test_too_few_texts_say_nothing(tmp_path: Path, texts: int, drafted: int, capsys) -> None:
    trace = few(tmp_path / "t", texts, drafted)
    for counted in ([], ["--observed", "0.1", "--rounds", "2000", "--top-k", "0"]):
        assert main(["expect", "--trace", trace, *counted]) == 3
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
        assert "cannot say" in err and "at least 5" in err and "log more" in err
    own = expect(trace)
    with pytest.raises(CannotSay):
        own.intervals([own.tokens_per_call])
    with pytest.raises(CannotSay):
        compare_observed(own, Observation(np.array([0.1]), 2000, np.zeros(1)))


def test_five_texts_are_enough_where_ten_rounds_are(tmp_path: Path, capsys) -> None:
    assert main(["expect", "--trace", few(tmp_path / "t", 5)]) == 0
    assert "(" in capsys.readouterr().out


GENERATION = {"temperature": 0.7, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1}


def test_all_of_a_generation_config_is_asked_for(monkeypatch, capsys) -> None:
    """vLLM follows it by default; what changes no law is nobody's business."""
    from cactus_theory.commands import expect as command
    from cactus_theory.commands import models

    def loaded(args):
        pair = load(args)
        pair.target.generation_config.update(**GENERATION, do_sample=True, top_k=0)
        # as files of published models have them
        pair.target.generation_config.update(output_attentions=False, _from_model_config=True)
        return pair

    def stop(*_, **__):
        raise ValueError("decodes")

    load = models.loaded
    monkeypatch.setattr(models, "loaded", loaded)
    monkeypatch.setattr(command, "log_shown", stop)
    flags = [*PAIR, *MODE, *OBSERVED, "--rounds", "500"]
    for said, more in [
        ("--temperature: must be given, as .* has temperature 0.7", ["--temperature", "0.7"]),
        ("--top-p: must be given", ["--top-p", "0.9"]),
        ("min_p: is not decoded here, .* --ignored min_p", ["--ignored", "min_p"]),
        ("repetition_penalty: is not decoded here", ["repetition_penalty"]),
    ]:
        assert main(["expect", *flags]) == 2
        assert re.search(said, capsys.readouterr().err)
        flags += more
    assert main(["expect", *flags]) == 2 and "decodes" in capsys.readouterr().err
    assert main(["expect", *PAIR]) == 2 and "decodes" in capsys.readouterr().err
