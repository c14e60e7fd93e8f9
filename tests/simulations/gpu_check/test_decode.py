"""What the decodes at real sizes yield, rehearsed in tiny shapes on a CPU."""

import pytest
import torch

from cactus_theory.decoding import generate
from simulations.gpu_check import decode, inflated, passes
from simulations.inflate import SHAPES, step_cost

PLACE = {"device": "cpu", "target_shape": "8b", "draft_shape": "0.6b", "batch": 2, "tiny": True}
POLICIES = ("speculative", "cactus:delta=0.01", "soft_band:price=0.8@block")
NEW = 4


@pytest.fixture(scope="module")
def rows():
    options = {"policies": POLICIES, "widths": (2,), "new_tokens": NEW, "seed": 3}
    return list(decode.decode_rows(**PLACE, **options))


def test_plain_decoding_comes_first_then_every_policy(rows):
    found = [(row["policy"], row["verifier"], row["num_draft_tokens"]) for row in rows]
    assert found == [
        ("plain", "chain", 0),
        ("speculative", "chain", 2),
        ("cactus:delta=0.01", "chain", 2),
        ("soft_band:price=0.8", "block", 2),
    ]
    assert {row["loop"] for row in rows} == {"device"}
    assert {row["tokens"] for row in rows} == {2 * NEW}
    assert all(row["tokens_per_second"] > 0 for row in rows)


def test_rows_are_what_the_usual_loop_measures(rows):
    pair = inflated.inflated("cpu", "8b", "0.6b", tiny=True)
    given = inflated.prompts(pair, 2) | {"max_new_tokens": NEW, "seed": 3}
    options = {"policy": "cactus:delta=0.01", "num_draft_tokens": 2}
    result = generate(pair.target, pair.draft, **given, **options)
    row = rows[2]
    assert row["tokens_per_call"] == result.tokens_per_call
    assert row["accepted_per_call"] == result.accepted_per_call
    assert row["emitted_kl_per_token"] == pytest.approx(result.meter.kl_per_token, rel=1e-4)
    assert rows[1]["emitted_kl_per_token"] == 0 < row["emitted_kl_per_token"]
    assert rows[0]["emitted_kl_per_token"] is None and rows[0]["tokens_per_call"] == 1


def test_costs_have_a_row_for_plain_decoding_and_every_width(monkeypatch):
    monkeypatch.setattr(passes, "REPEATS", 1)
    found = list(decode.costs(**PLACE, widths=(1,), new_tokens=NEW))
    assert [row["num_draft_tokens"] for row in found] == [0, 1]
    assert found[0]["c"] is None and found[0]["v"] == 1
    for row in found[1:]:
        assert row["c"] > 0 and row["v"] > 0
        assert row["prefill_ms"] > 0 and row["step_ms"] > 0
        assert row["fixed_ms"] == row["fixed_ms"]  # a difference of times: of either sign, no NaN


def test_the_floor_is_bytes_over_bandwidth():
    place = {name: PLACE[name] for name in PLACE if name != "seed"}
    (row,) = decode.roofline(**place, new_tokens=NEW, bandwidth=100.0)
    least = step_cost(SHAPES["tiny"], row["context"], batch=2, width=4).bytes
    assert row["roofline_ms"] == pytest.approx(1e3 * least / 100e9)
    (row,) = decode.roofline(**place, new_tokens=NEW)
    assert row["bandwidth_gb_per_s"] > 0


def test_a_pair_is_made_once_and_one_is_held():
    first = inflated.inflated("cpu", "8b", "0.6b", tiny=True)
    assert inflated.inflated("cpu", "14b", "0.6b", tiny=True) is first
    assert len(inflated._HELD) == 1
    with pytest.raises(ValueError, match="target_shape: must be one of .*; got '9b'"):
        inflated.inflated("cpu", "9b", "0.6b")


def test_prompts_start_again_where_there_are_not_enough():
    pair = inflated.inflated("cpu", "8b", "0.6b", tiny=True)
    given = inflated.prompts(pair, 40)
    assert given["input_ids"].shape == given["attention_mask"].shape
    assert given["input_ids"][0].equal(given["input_ids"][32])
    assert int(given["attention_mask"].sum(-1).min()) > 1


@pytest.mark.gpu
def test_an_8b_on_the_device_computes_what_the_shipped_target_does():
    from simulations.common.inputs import PAIR, load_model

    pair = inflated.inflated("cuda", "8b", "0.6b")
    ids = torch.randint(1, 2048, (1, 40), generator=torch.Generator().manual_seed(0))
    small = load_model(PAIR / "target")
    with torch.inference_mode():
        exact = small(ids).logits.softmax(-1)
        found = pair.target(ids.cuda()).logits.float().softmax(-1).cpu()
    apart = (found[..., :2048] - exact).abs().sum(-1).mean().item() / 2
    assert apart < 0.03 and found[..., 2048:].sum() == 0  # bfloat16: 0.008 measured at 216 wide
