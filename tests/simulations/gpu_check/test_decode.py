"""Where the numbers of timed decodes come from, and what is derived from them, by hand."""

import pytest
import torch

from cactus_theory.decoding import generate
from cactus_theory.decoding._text import left_padded
from simulations.gpu_check import decode
from simulations.gpu_check.decode import COLUMNS, Decodes
from simulations.gpu_check.timing import Bench
from simulations.inflate import SHAPES, step_bytes

CPU = torch.device("cpu")
PLAIN = {"policy": "plain", "verifier": "chain", "num_draft_tokens": 0, "tokens_per_call": 1.0}
PLAIN |= {"tokens_per_second": 200.0, "roofline_ms": 8.0}
BAND = {"policy": "band:price=1", "verifier": "block", "num_draft_tokens": 4, "c": 0.1, "v": 1.1}
BAND |= {"tokens_per_second": 360.0, "tokens_per_call": 3.0, "step_ms": 10.0, "verify_ms": 0.5}
POLICIES = ["speculative", "cactus:delta=0.01", "soft_band:price=0.8@block"]
NEW = 4
STEP = {"policy": "speculative", "verifier": "chain", "batch": 2, "drafted": 2}
STEP |= {"vocabulary": 151_936, "torch_us": 700.0, "kernel_us": None}


def decodes():
    return Decodes(Bench(CPU, tiny=True), "8b", "0.6b", 2)


@pytest.fixture(scope="module")
def rows():
    bench = Bench(CPU, tiny=True, seed=3, bandwidth=100.0, tables={"verify": [STEP]})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "policies", lambda tiny: POLICIES)
        patch.setattr(decode, "TINY_SETUPS", [("tiny", "tiny-draft", 2)])
        patch.setattr(decode, "TINY_NEW_TOKENS", NEW)
        patch.setattr(decode, "REPEATS", 1)
        return [row for _, job in decode.jobs(bench) for row in job()]


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
    assert all(list(row) == COLUMNS and row["tokens_per_second"] > 0 for row in rows)


def test_rows_are_what_the_usual_loop_measures(rows):
    pair = decode.inflated(CPU, "tiny", "tiny-draft")
    ids, mask = left_padded(decode.prompts(2), pair.target)
    options = {"policy": "cactus:delta=0.01", "num_draft_tokens": 2, "max_new_tokens": NEW}
    result = generate(pair.target, pair.draft, ids, attention_mask=mask, seed=3, **options)
    row, spent = rows[2], result.reading.emitted_divergence
    assert row["tokens_per_call"] == result.tokens_per_call
    assert row["accepted_per_call"] == result.accepted_per_call
    assert row["emitted_kl_per_token"] == pytest.approx(spent / (2 * NEW), rel=1e-4)
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
    context = max(map(len, decode.prompts(2))) + NEW // 2
    least = step_bytes(SHAPES["tiny"], context, batch=2, width=4)
    assert [row["roofline_ms"] for row in rows] == pytest.approx([1e3 * least / 100e9] * 4)


def test_what_a_round_takes_beyond_its_passes():
    costs = {"c": 0.1, "v": 1.2, "step_ms": 10.0, "prefill_ms": 40.0}
    row = {"num_draft_tokens": 4, "seconds": 0.5}
    assert decode.fixed_ms(costs, row, rounds=20) == pytest.approx(23 - 16)
    assert decode.fixed_ms(costs | {"c": None, "v": 1.0}, row | {"num_draft_tokens": 0}, 20) == (
        pytest.approx(23 - 10)
    )


def test_speed_is_compared_with_plain_decoding_the_roofline_and_the_prediction():
    own = decodes()
    plain, row = own.completed(PLAIN), own.completed(BAND | {"unknown": 1})
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
    own, read = decodes(), {"tokens": 100, "prefill_ms": 100.0}
    plain = own.completed(PLAIN | read | {"seconds": 0.6})  # 100 tokens in .5 s
    row = own.completed(BAND | read | {"seconds": 0.35, "prefill_ms": 150.0})  # 100 in .2 s
    assert plain["share_of_roofline"] == pytest.approx(8.0 / 10.0)
    assert row["speedup"] == pytest.approx(1.8) and row["net_speedup"] == pytest.approx(2.5)
    assert row["share_of_predicted"] == pytest.approx(2.5 / 2)
    assert row["round_ms"] == pytest.approx(1e3 * 6 / 500)


def test_without_plain_decoding_nothing_is_compared():
    with pytest.raises(RuntimeError, match="plain decoding failed"):
        decodes().completed(BAND)


@pytest.mark.gpu
def test_an_8b_on_the_device_computes_what_the_shipped_target_does():
    from simulations.common.inputs import PAIR, load_model

    pair = decode.inflated(torch.device("cuda"), "8b", "0.6b")
    ids = torch.randint(1, 2048, (1, 40), generator=torch.Generator().manual_seed(0))
    small = load_model(PAIR / "target")
    with torch.inference_mode():
        exact = small(ids).logits.softmax(-1)
        found = pair.target(ids.cuda()).logits.float().softmax(-1).cpu()
    apart = (found[..., :2048] - exact).abs().sum(-1).mean().item() / 2
    assert apart < 0.03 and found[..., 2048:].sum() == 0  # bfloat16: 0.008 measured at 216 wide
