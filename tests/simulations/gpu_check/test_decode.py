"""The decode section: where its numbers come from, and what is derived from them, by hand."""

import json
import types
from dataclasses import replace

import pytest
import torch

from cactus_theory.decoding import Reading, generate
from cactus_theory.decoding._text import left_padded
from cactus_theory.decoding.device import BY_KERNELS
from simulations.common.grid import Config
from simulations.common.inputs import PAIR
from simulations.gpu_check import decode, pairs
from simulations.gpu_check.decode import COLUMNS, finisher, policies
from simulations.gpu_check.pairs import Setup
from simulations.gpu_check.sections import Bench, Budget, Note, Settings
from simulations.inflate import SHAPES, step_cost
from tests.amounts import amount

SETUP = Setup("8b", "0.6b", 2)
PLAIN = {"policy": "plain", "verifier": "chain", "num_draft_tokens": 0, "tokens_per_call": 1.0}
PLAIN |= {"tokens_per_second": 200.0, "roofline_ms": 8.0}
BAND = {"policy": "band:price=1", "verifier": "block", "num_draft_tokens": 4, "c": 0.1, "v": 1.1}
BAND |= {"tokens_per_second": 360.0, "tokens_per_call": 3.0, "step_ms": 10.0, "verify_ms": 0.5}
POLICIES = ["speculative", "cactus:delta=0.01", "soft_band:price=0.8@block"]
NEW = 4
STEP = {"policy": "speculative", "verifier": "chain", "batch": 2, "drafted": 2}
STEP |= {"vocabulary": 151_936, "torch_us": 700.0, "kernel_us": None}
FACTS = [{"quantity": "copy bandwidth", "value": 100.0, "unit": "GB/s"}]


@pytest.fixture(scope="module")
def rows():
    bench = Bench(
        Settings("cpu", tiny=True, seed=3), Budget(600), {"device": FACTS, "verify": [STEP]}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "policies", lambda tiny: POLICIES)
        patch.setattr(decode, "TINY_SETUPS", [SETUP])
        patch.setattr(pairs, "TINY_NEW_TOKENS", NEW)
        patch.setattr(pairs, "REPEATS", 1)
        return list(decode.rows(bench))


def test_plain_decoding_comes_first_then_every_policy(rows):
    found = [(row["policy"], row["knob"], row["verifier"], row["num_draft_tokens"]) for row in rows]
    assert found == [
        ("plain", "", "chain", 0),
        ("speculative", "", "chain", 2),
        ("cactus", "delta=0.01", "chain", 2),
        ("soft_band", "price=0.8", "block", 2),
    ]
    assert {row["loop"] for row in rows} == {"device"}
    assert {row["tokens"] for row in rows} == {2 * NEW}
    assert all(row["tokens_per_second"] > 0 for row in rows)


def test_rows_are_what_the_usual_loop_measures(rows):
    pair = pairs.inflated("cpu", "8b", "0.6b", tiny=True)
    ids, mask = left_padded(pairs.prompts(2), pair.target)
    options = {"policy": "cactus:delta=0.01", "num_draft_tokens": 2, "max_new_tokens": NEW}
    result = generate(pair.target, pair.draft, ids, attention_mask=mask, seed=3, **options)
    row = rows[2]
    assert row["tokens_per_call"] == result.tokens_per_call
    assert row["accepted_per_call"] == result.accepted_per_call
    assert row["emitted_kl_per_token"] == pytest.approx(
        result.reading.emitted_divergence_per_token, rel=1e-4
    )
    assert rows[1]["emitted_kl_per_token"] == 0 < row["emitted_kl_per_token"]
    assert rows[0]["emitted_kl_per_token"] is None and rows[0]["tokens_per_call"] == 1


def test_rows_say_what_a_round_costs(rows):
    plain, *drafted = rows
    assert plain["c"] is None and plain["v"] == 1
    for row in drafted:
        assert row["c"] > 0 and row["v"] > 0
        assert row["prefill_ms"] > plain["prefill_ms"] > 0 and row["step_ms"] == plain["step_ms"]
        assert row["fixed_ms"] == drafted[0]["fixed_ms"] != plain["fixed_ms"]
    assert [row["verify_ms"] for row in rows] == [None, 0.7, None, None]


def test_the_floor_is_bytes_over_bandwidth(rows):
    pair = pairs.inflated("cpu", "8b", "0.6b", tiny=True)
    context = max(map(len, pairs.prompts(2))) + NEW // 2
    least = step_cost(SHAPES["tiny"], context, batch=2, width=4).bytes
    assert pair.roofline_ms(context, 2, 100.0) == pytest.approx(1e3 * least / 100e9)
    assert {row["roofline_ms"] for row in rows} == {pair.roofline_ms(context, 2, 100.0)}


def test_what_a_round_takes_beyond_its_passes():
    costs = {"c": 0.1, "v": 1.2, "step_ms": 10.0, "prefill_ms": 40.0}
    row = {"num_draft_tokens": 4, "seconds": 0.5}
    assert pairs.fixed_ms(costs, row, rounds=20) == pytest.approx(23 - 16)
    assert pairs.fixed_ms(costs | {"c": None, "v": 1.0}, row | {"num_draft_tokens": 0}, 20) == (
        pytest.approx(23 - 10)
    )


def test_a_pair_is_made_once_and_one_is_held():
    first = pairs.inflated("cpu", "8b", "0.6b", tiny=True)
    assert pairs.inflated("cpu", "14b", "0.6b", tiny=True) is first
    assert len(pairs._LAST_PAIR) == 1
    with pytest.raises(ValueError, match="target_shape: must be one of .*; got '9b'"):
        pairs.inflated("cpu", "9b", "0.6b")


def test_prompts_start_again_where_there_are_not_enough():
    found = pairs.prompts(40)
    assert len(found) == 40 and found[0] == found[32] and min(map(len, found)) > 1


def test_speed_is_compared_with_plain_decoding_the_roofline_and_the_prediction():
    finish = finisher(SETUP)
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
    finish = finisher(SETUP)
    read = {"tokens": 100, "prefill_ms": 100.0}
    plain = finish(PLAIN | read | {"seconds": 0.6})  # 100 tokens in .5 s
    row = finish(BAND | read | {"seconds": 0.35, "prefill_ms": 150.0})  # 100 tokens in .2 s
    assert plain["share_of_roofline"] == pytest.approx(8.0 / 10.0)
    assert row["speedup"] == pytest.approx(1.8) and row["net_speedup"] == pytest.approx(2.5)
    assert row["share_of_predicted"] == pytest.approx(2.5 / 2)
    assert row["round_ms"] == pytest.approx(1e3 * 6 / 500)


def test_without_costs_nothing_is_predicted():
    finish = finisher(SETUP)
    finish(PLAIN)
    row = finish(BAND | {"c": None})
    assert row["speedup"] == pytest.approx(1.8)
    assert {row[name] for name in ("predicted_speedup", "share_of_predicted", "draft_ms")} == {None}


def test_specs_that_name_a_file_show_no_folder():
    finish = finisher(SETUP)
    finish(PLAIN)
    [soft, *_] = [spec for spec in policies(tiny=False) if spec.startswith("soft_band")]
    row = finish(BAND | {"policy": soft.partition("@")[0]})
    assert row["knob"] == "price=1.5,values=values.json"


def workload(broken=(), complete=lambda row, timed: {}):
    """Return a pair whose decodes are made up; those of some policies fail."""

    class MadeUp(pairs.Workload):
        def decode(self, line, *, meter):
            if line.method in broken:
                raise RuntimeError("no such kernel\nand more")
            seconds = types.SimpleNamespace(total=0.5)
            known = {"num_tokens": 100, "tokens_per_call": 2.0, "accepted_per_call": 1.0}
            reading = Reading({}, 100, 3.0, 0.5) if meter else Reading({}, 100)
            return [types.SimpleNamespace(**known, seconds=seconds, reading=reading, loop="x")] * 2

    return MadeUp(None, None, [], 0, {}, complete)


def test_the_groups_of_a_line_count_together():
    line = Config("band:price=1", 4, 1)
    own = workload()
    row = decode.measured(line, own.decode(line, meter=True), own.decode(line, meter=False))
    assert (row["tokens"], row["seconds"], row["tokens_per_second"]) == (200, 1.0, 200.0)
    assert (row["emitted_kl_per_token"], row["largest_row_kl"]) == (6 / 200, 0.5)


def test_a_policy_that_fails_is_named_and_the_next_ones_follow(monkeypatch):
    names = ["speculative", "typical", "band:price=1@block"]
    monkeypatch.setattr(decode, "policies", lambda tiny: names)
    monkeypatch.setattr(decode, "TINY_WIDTHS", (2, 4))
    own = workload(["typical"], lambda row, timed: {"c": 0.2 * row["num_draft_tokens"]})
    found = list(decode.decoded(own, decode.lines(1, tiny=True), SETUP))
    notes = [row for row in found if isinstance(row, Note)]
    assert notes[0] == Note("failed", "typical, K = 2 at 8b + 0.6b, batch 2", "no such kernel")
    rows = [row for row in found if not isinstance(row, Note)]
    kept = [("speculative", "chain"), ("band", "block")]
    assert [(row["policy"], row["verifier"], row["num_draft_tokens"]) for row in rows] == [
        ("plain", "chain", 0), *((*kind, width) for width in (2, 4) for kind in kept),
    ]  # fmt: skip
    assert [row["c"] for row in rows] == [0.0, 0.4, 0.4, 0.8, 0.8]


def test_without_plain_decoding_a_place_fails(monkeypatch):
    monkeypatch.setattr(pairs, "at_real_sizes", lambda bench, place: workload(["plain"]))
    found = list(decode.rows(Bench(Settings("cpu", tiny=True), Budget(60))))
    assert [note.kind for note in found] == ["failed", "failed"]


def test_the_verification_of_a_round_is_the_one_timed_alone():
    step = {"policy": "band:price=1", "verifier": "block", "batch": 2, "drafted": 4}
    step |= {"vocabulary": 151_936, "torch_us": 700.0, "kernel_us": 90.0}
    steps = [step | {"drafted": 8, "torch_us": 9.0}, step | {"vocabulary": 32_000, "torch_us": 1.0}]
    steps.append(step)
    bench = Bench(Settings("cpu"), Budget(1), {"verify": steps})
    assert pairs.verification(bench, BAND, batch=2) == 0.7
    fused = BAND | {"loop": BY_KERNELS}
    assert pairs.verification(bench, fused, batch=2) == 0.09
    step["kernel_us"] = None
    assert pairs.verification(bench, fused, batch=2) is None
    assert pairs.verification(bench, BAND | {"loop": "device, by torch …"}, batch=2) == 0.7
    assert pairs.verification(bench, BAND, batch=1) is None
    assert pairs.verification(bench, BAND | {"policy": "typical"}, batch=2) is None


def test_a_place_leaves_time_to_the_next(monkeypatch):
    now = [0.0]
    bench = Bench(Settings("cpu", tiny=True), Budget(100.0, lambda: now[0]))

    def slow(row, timed):
        now[0] += 30
        return {}

    monkeypatch.setattr(pairs, "at_real_sizes", lambda bench, place: workload((), slow))
    found = list(decode._at(bench, Setup("8b", "0.6b", 1, 0.5)))
    assert len(found) == 3 and isinstance(found[2], Note)
    assert found[2].what == "what came after speculative, K = 2 at 8b + 0.6b, batch 1"


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
    assert pairs.final_number(text) == number


CHECKPOINTS = Settings("cpu", tiny=True, target=PAIR / "target", draft=PAIR / "draft")


def test_answers_are_scored_and_the_cost_is_metered(tmp_path, monkeypatch):
    lines = [{"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"} for i in range(3)]
    path = tmp_path / "asked.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    texts = iter(["2", "#### 9", "1", "2"] * 9)
    monkeypatch.setattr(pairs, "TINY_NEW_TOKENS", 4)
    monkeypatch.setattr(decode, "policies", lambda tiny: ["speculative", "band:price=0.5"])
    monkeypatch.setattr(decode, "_setups", lambda bench: [Setup("a", "b", 1)])
    load = pairs.load_pair

    def talking(*args, **kind):
        pair = load(*args, **kind)
        monkeypatch.setattr(pair.tokenizer, "decode", lambda ids, **_: next(texts))
        return pair

    monkeypatch.setattr(pairs, "load_pair", talking)
    bench = Bench(replace(CHECKPOINTS, prompts=path), Budget(60))
    plain, lossless, band = decode.rows(bench)
    assert [row["policy"] for row in (plain, lossless, band)] == ["plain", "speculative", "band"]
    assert (plain["score"], plain["scored"]) == (0.0, 2)  # answers 1 and 2, said 2 and 9
    assert lossless["score"] == 1.0  # said 1 and 2
    assert lossless["emitted_kl_per_token"] < 1e-12 < band["emitted_kl_per_token"]
    assert band["c"] > 0 and band["v"] > 0 and band["tokens_per_call"] >= 1
    assert {plain["target"], plain["draft"]} == {"a", "b"} and plain["step_ms"] == band["step_ms"]


def test_checkpoints_go_by_their_folders():
    names = [place.name for place in decode._setups(Bench(CHECKPOINTS, Budget(1)))]
    assert names == ["target + draft, batch 1", "target + draft, batch 2"]


def test_without_answers_nothing_is_scored():
    prompts, answers = pairs.prompts_and_answers(replace(CHECKPOINTS, num_prompts=amount(1, 8)), 1)
    assert len(prompts) == 1 and answers == []


def test_a_question_goes_through_the_chat_template():
    def template(messages, **options):
        assert messages[0]["content"] == "why?" and options["add_generation_prompt"]
        return [1, 2]

    talks = types.SimpleNamespace(chat_template="x", apply_chat_template=template)
    assert pairs.token_ids(talks, "why?", ask=True) == [1, 2]


@pytest.mark.gpu
def test_the_shipped_pair_decodes_on_the_device():
    place = Setup("target", "draft", 2)
    bench = Bench(replace(CHECKPOINTS, device="cuda"), Budget(120))
    lines = decode.lines(2, tiny=True)
    rows = list(decode.decoded(pairs.checkpoints(bench, place), lines, place))
    assert len(rows) == 5 and all(row["tokens_per_second"] > 0 for row in rows)
    assert torch.cuda.is_available()


@pytest.mark.gpu
def test_an_8b_on_the_device_computes_what_the_shipped_target_does():
    from simulations.common.inputs import PAIR, load_model

    pair = pairs.inflated("cuda", "8b", "0.6b")
    ids = torch.randint(1, 2048, (1, 40), generator=torch.Generator().manual_seed(0))
    small = load_model(PAIR / "target")
    with torch.inference_mode():
        exact = small(ids).logits.softmax(-1)
        found = pair.target(ids.cuda()).logits.float().softmax(-1).cpu()
    apart = (found[..., :2048] - exact).abs().sum(-1).mean().item() / 2
    assert apart < 0.03 and found[..., 2048:].sum() == 0  # bfloat16: 0.008 measured at 216 wide
