"""The decode section: where its numbers come from, and what is derived from them, by hand."""

import json
import types

import pytest
import torch

from cactus_theory.decoding.device import BY_KERNELS
from simulations.gpu_check import checkpoints, decoding
from simulations.gpu_check.budget import Budget
from simulations.gpu_check.decoding import policies
from simulations.gpu_check.derived import COLUMNS, Place, finisher
from simulations.gpu_check.sections import Bench, Note, Settings
from tests.amounts import amount

PLACE = Place("8b", "0.6b", 2)
PLAIN = {"policy": "plain", "verifier": "chain", "num_draft_tokens": 0, "tokens_per_call": 1.0}
PLAIN |= {"tokens_per_second": 200.0, "roofline_ms": 8.0}
BAND = {"policy": "band:price=1", "verifier": "block", "num_draft_tokens": 4, "c": 0.1, "v": 1.1}
BAND |= {"tokens_per_second": 360.0, "tokens_per_call": 3.0, "step_ms": 10.0, "verify_ms": 0.5}


def test_speed_is_compared_with_plain_decoding_the_roofline_and_the_prediction():
    finish = finisher(PLACE)
    plain, row = finish(PLAIN), finish(BAND | {"unknown": 1})
    assert list(plain) == list(row) == COLUMNS
    # a step of plain decoding takes 2 / 200 s for two texts
    assert plain["speedup"] == 1 and plain["share_of_roofline"] == pytest.approx(0.8)
    assert (row["policy"], row["knob"], row["target"], row["batch"]) == ("band", "price=1", "8b", 2)
    assert row["speedup"] == pytest.approx(1.8)
    assert row["predicted_speedup"] == pytest.approx(3 / (4 * 0.1 + 1.1))
    assert row["share_of_predicted"] == pytest.approx(0.9)
    # six tokens a round at 360 a second
    assert row["round_ms"] == pytest.approx(1e3 * 6 / 360)
    assert (row["draft_ms"], row["target_ms"]) == (pytest.approx(4), pytest.approx(11))
    assert row["other_ms"] == pytest.approx(row["round_ms"] - 15.5)


def test_reading_the_prompts_is_kept_apart():
    finish = finisher(PLACE)
    read = {"tokens": 100, "prefill_ms": 100.0}
    plain = finish(PLAIN | read | {"seconds": 0.6})  # 100 tokens in .5 s
    row = finish(BAND | read | {"seconds": 0.35, "prefill_ms": 150.0})  # 100 tokens in .2 s
    assert plain["share_of_roofline"] == pytest.approx(8.0 / 10.0)
    assert row["speedup"] == pytest.approx(1.8) and row["net_speedup"] == pytest.approx(2.5)
    assert row["share_of_predicted"] == pytest.approx(2.5 / 2)
    assert row["round_ms"] == pytest.approx(1e3 * 6 / 500)


def test_without_costs_nothing_is_predicted():
    finish = finisher(PLACE)
    finish(PLAIN)
    row = finish(BAND | {"c": None})
    assert row["speedup"] == pytest.approx(1.8)
    assert {row[name] for name in ("predicted_speedup", "share_of_predicted", "draft_ms")} == {None}


def test_specs_that_name_a_file_show_no_folder():
    finish = finisher(PLACE)
    finish(PLAIN)
    [soft, *_] = [spec for spec in policies(tiny=False) if spec.startswith("soft_band")]
    row = finish(BAND | {"policy": soft.partition("@")[0]})
    assert row["knob"] == "price=1.5,values=values.json"


def test_inflated_pairs_are_asked_for_what_they_take(monkeypatch):
    asked = {}

    def decode_rows(device, target_shape, policies, widths, batch, tiny=False):
        asked.update(locals())
        yield PLAIN
        yield {key: value for key, value in BAND.items() if key != "c"}

    def costs(widths):
        return [{"num_draft_tokens": width, "c": 0.2, "v": 1.0} for width in widths]

    module = {"decode_rows": decode_rows, "costs": costs, "roofline": lambda: {"roofline_ms": 4.0}}
    monkeypatch.setattr(decoding, "optional", lambda place, name: module.get(name))
    monkeypatch.setattr(decoding, "bandwidth", lambda bench: 1.0)
    monkeypatch.setattr(decoding, "TINY_WIDTHS", (4,))
    bench = Bench(Settings("cpu", tiny=True), Budget(60))
    rows = [row for row in decoding.rows(bench) if not isinstance(row, Note)]
    assert len(rows) == 4 and asked["batch"] == 2 and asked["tiny"] and asked["widths"] == [4]
    assert (rows[0]["roofline_ms"], rows[1]["v"], rows[1]["c"]) == (8.0, 1.1, 0.2)


def test_a_policy_that_fails_is_named_and_the_next_ones_follow(monkeypatch):
    asked = []

    def decode_rows(policies, widths):
        asked.append((list(policies), widths))
        yield PLAIN
        for spec in policies:
            if spec == "typical":
                raise RuntimeError("no such kernel")
            yield BAND | {"policy": spec, "num_draft_tokens": widths[0]}

    names = ["speculative", "typical", "band:price=1@block"]
    there = {"decode_rows": decode_rows}
    monkeypatch.setattr(decoding, "optional", lambda place, name: there.get(name))
    monkeypatch.setattr(decoding, "bandwidth", lambda bench: 1.0)
    monkeypatch.setattr(decoding, "policies", lambda tiny: names)
    monkeypatch.setattr(decoding, "TINY_WIDTHS", (2, 4))
    found = list(decoding._inflated(Bench(Settings("cpu", tiny=True), Budget(60)), PLACE))
    assert asked == [(names, [2]), (names[2:], [2]), (names, [4]), (names[2:], [4])]
    notes = [row for row in found if isinstance(row, Note)]
    assert notes[0] == Note("failed", "typical, K = 2 at 8b + 0.6b, batch 2", "no such kernel")
    rows = [(row["policy"], row["num_draft_tokens"]) for row in found if not isinstance(row, Note)]
    kept = [names[0], names[2]]
    assert rows == [("plain", 0), *((spec, width) for width in (2, 4) for spec in kept)]


def test_without_plain_decoding_a_place_fails(monkeypatch):
    def decode_rows(policies):
        raise RuntimeError("out of luck")
        yield

    there = {"decode_rows": decode_rows}
    monkeypatch.setattr(decoding, "optional", lambda place, name: there.get(name))
    monkeypatch.setattr(decoding, "bandwidth", lambda bench: 1.0)
    found = list(decoding.rows(Bench(Settings("cpu", tiny=True), Budget(60))))
    assert [note.kind for note in found] == ["failed", "failed"]


def test_the_verification_of_a_round_is_the_one_timed_alone():
    step = {"policy": "band:price=1", "verifier": "block", "batch": 2, "drafted": 4}
    step |= {"vocabulary": 151_936, "torch_us": 700.0, "kernel_us": 90.0}
    steps = [step | {"drafted": 8, "torch_us": 9.0}, step | {"vocabulary": 32_000, "torch_us": 1.0}]
    steps.append(step)
    bench = Bench(Settings("cpu"), Budget(1), {"verify": steps})
    assert decoding._verification(bench, BAND, batch=2) == 0.7
    fused = BAND | {"loop": BY_KERNELS}
    assert decoding._verification(bench, fused, batch=2) == 0.09
    step["kernel_us"] = None
    assert decoding._verification(bench, fused, batch=2) is None
    assert decoding._verification(bench, BAND | {"loop": "device, by torch …"}, batch=2) == 0.7
    assert decoding._verification(bench, BAND, batch=1) is None
    assert decoding._verification(bench, BAND | {"policy": "typical"}, batch=2) is None


def test_a_place_leaves_time_to_the_next():
    now = [0.0]
    bench = Bench(Settings("cpu"), Budget(100.0, lambda: now[0]))

    def slow():
        for row in (PLAIN, BAND, BAND):
            now[0] += 30
            yield row

    found = list(decoding._decoded(bench, Place("8b", "0.6b", 1, 0.5), slow()))
    assert len(found) == 3 and isinstance(found[2], Note)
    assert found[2].what == "what came after band:price=1@block, K = 4 at 8b + 0.6b, batch 1"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 + 4 = 7.\n#### 1,234.50 dollars", 1234.5),
        ("it is -2", -2.0),
        ("12 and then 15", 15.0),
        ("#### 4 and on to the next: 9 #### 5", 4.0),
        ("7 ####", 7.0),
        ("none", None),
    ],
)
def test_the_final_number(text, number):
    assert checkpoints.final_number(text) == number


def test_answers_are_scored_and_the_cost_is_metered(tmp_path, monkeypatch):
    lines = [{"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"} for i in range(3)]
    path = tmp_path / "asked.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    texts = iter(["2", "#### 9", "1", "2"] * 9)
    monkeypatch.setattr(checkpoints, "TINY_NEW_TOKENS", 4)
    monkeypatch.setattr(checkpoints, "policies", lambda tiny: ["speculative", "band:price=0.5"])
    load = checkpoints.load_pair

    def loaded(*args, **kind):
        pair = load(*args, **kind)
        monkeypatch.setattr(pair.tokenizer, "decode", lambda ids, **_: next(texts))
        return pair

    monkeypatch.setattr(checkpoints, "load_pair", loaded)
    bench = Bench(Settings("cpu", tiny=True, prompts=path), Budget(60))
    plain, lossless, band = checkpoints.decoded(bench, batch=1)
    assert [row["policy"] for row in (plain, lossless, band)] == [
        "plain", "speculative", "band:price=0.5",
    ]  # fmt: skip
    assert (plain["score"], plain["scored"]) == (0.0, 2)  # answers 1 and 2, said 2 and 9
    assert lossless["score"] == 1.0  # said 1 and 2
    assert lossless["emitted_kl_per_token"] < 1e-12 < band["emitted_kl_per_token"]
    assert band["c"] > 0 and band["v"] > 0 and band["tokens_per_call"] >= 1


def test_without_answers_nothing_is_scored():
    settings = Settings("cpu", num_prompts=amount(1, 8))
    prompts, answers = checkpoints._texts(settings, 1)
    assert len(prompts) == 1 and answers == []
    assert checkpoints.names(settings) == ("shipped target", "shipped draft")


def test_a_question_goes_through_the_chat_template():
    def template(messages, **options):
        assert messages[0]["content"] == "why?" and options["add_generation_prompt"]
        return [1, 2]

    talks = types.SimpleNamespace(chat_template="x", apply_chat_template=template)
    assert checkpoints._ids(talks, "why?", ask=True) == [1, 2]


@pytest.mark.gpu
def test_the_shipped_pair_decodes_on_the_device():
    bench = Bench(Settings("cuda", tiny=True), Budget(120))
    rows = list(checkpoints.decoded(bench, batch=2))
    assert len(rows) == 5 and all(row["tokens_per_second"] > 0 for row in rows)
    assert torch.cuda.is_available()
