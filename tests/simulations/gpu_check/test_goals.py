"""Met, not met, not measured; each number by hand."""

import pytest
import torch

from simulations.gpu_check.goals import GOALS, MET, MISSED, UNMEASURED, goal_row, rows
from simulations.gpu_check.sections import Bench, Budget, Settings
from simulations.gpu_check.verify import BAND, LARGE, LOSSLESS

BASE = {"verifier": "chain", "vocabulary": LARGE, "share_of_bandwidth": None, "kernel_us": None}
BASE |= {"torch_over_kernel": None, "over_lossless": None}


def step(policy, batch, drafted, **own):
    return BASE | {"policy": policy, "batch": batch, "drafted": drafted} | own


def decode(policy, **own):
    row = dict.fromkeys(("share_of_roofline", "share_of_predicted", "verify_ms", "round_ms"))
    row |= {"target": "8b", "verifier": "chain", "batch": 1, "num_draft_tokens": 4}
    return row | {"policy": policy, "tokens_per_second": 1.0, "emitted_kl_per_token": None} | own


def verdict(number, **tables):
    row = goal_row(GOALS[number], tables)
    return row["measured"], row["verdict"]


def test_nothing_measured_is_nothing_met():
    assert {goal_row(goal, {})["verdict"] for goal in GOALS} == {UNMEASURED}
    torch_only = [step(LOSSLESS, 64, 8), step(LOSSLESS, 64, 8, verifier="block", kernel_us=1.0)]
    plain = [decode("plain", target="14b", share_of_roofline=0.9)]
    found = {goal_row(goal, {"verify": torch_only, "decode": plain})["verdict"] for goal in GOALS}
    assert found == {UNMEASURED}


def test_a_rehearsal_meets_nothing(monkeypatch):
    tables = {"verify": [step(LOSSLESS, 1, 8, kernel_us=1.0)]}
    for settings in (Settings("cpu", tiny=True), Settings("cpu"), Settings("cuda", tiny=True)):
        found = rows(Bench(settings, Budget(1), tables))
        assert {row["verdict"] for row in found} == {UNMEASURED}
    found = rows(Bench(Settings("cuda"), Budget(1), tables))
    assert [row["verdict"] for row in found].count(MET) == 1


@pytest.mark.parametrize(
    ("number", "kind", "values", "worst", "met"),
    [
        (0, "share_of_bandwidth", (0.9, 0.7), 0.7, MET),
        (0, "share_of_bandwidth", (0.9, 0.69), 0.69, MISSED),
        (2, "torch_over_kernel", (5.0, 9.0), 5.0, MET),
        (2, "torch_over_kernel", (4.9, 9.0), 4.9, MISSED),
    ],
)
def test_the_worst_shape_counts(number, kind, values, worst, met):
    steps = [step(LOSSLESS, 64, k, **{kind: v}) for k, v in zip((4, 8), values, strict=True)]
    steps.append(step("typical", 64, 8))
    steps.append(step(LOSSLESS, 64, 8, verifier="block", **{kind: 0.01}))
    assert verdict(number, verify=steps) == (worst, met)


def test_microseconds_and_the_price_of_the_band():
    steps = [step(LOSSLESS, 1, 8, kernel_us=60.0), step(LOSSLESS, 1, 16, kernel_us=99.0)]
    assert verdict(1, verify=steps) == (60.0, MET)
    assert verdict(1, verify=[step(LOSSLESS, 1, 8, kernel_us=60.1)]) == (60.1, MISSED)
    assert verdict(3, verify=[step(BAND, 64, 8, over_lossless=1.31)]) == (1.31, MISSED)
    assert verdict(3, verify=[step(BAND, 64, 8, over_lossless=1.2)]) == (1.2, MET)


def test_decodes_at_8b():
    assert verdict(4, decode=[decode("plain", share_of_roofline=0.71)]) == (0.71, MET)
    two = [decode("speculative", share_of_predicted=share) for share in (0.95, 0.85)]
    assert verdict(5, decode=two) == (0.85, MISSED)
    assert verdict(5, decode=two[:1]) == (0.95, MET)
    band = decode("band", verify_ms=0.2, round_ms=10.0)
    assert verdict(7, decode=[band, decode("cactus", verify_ms=9, round_ms=9)]) == (0.02, MET)
    assert verdict(7, decode=[band, decode("speculative", verify_ms=1, round_ms=9)])[1] == MISSED


def test_the_lead_over_cactus_is_read_at_equal_kl():
    knots = (0.01, 0.04, 0.2)
    cactus = [decode("cactus", emitted_kl_per_token=kl, tokens_per_second=100.0) for kl in knots]
    band = [
        decode("band", emitted_kl_per_token=kl, tokens_per_second=speed)
        for kl, speed in zip(knots, (110.0, 110.0, 50.0), strict=True)
    ]
    measured, met = verdict(6, decode=[*cactus, *band])
    assert met == MISSED and measured < 0.9  # it falls behind before .1
    block = [row | {"verifier": "block", "tokens_per_second": 120.0} for row in band]
    assert verdict(6, decode=[*cactus, *band, *block]) == (pytest.approx(1.2), MET)
    slow = [row | {"batch": 8, "tokens_per_second": 90.0} for row in block]
    behind = [*cactus, *block, *slow, *(row | {"batch": 8} for row in cactus)]
    assert verdict(6, decode=behind) == (pytest.approx(0.9), MISSED)
    assert verdict(6, decode=[*cactus[:1], *band])[1] == UNMEASURED
    assert verdict(6, decode=band)[1] == UNMEASURED


def test_the_device_is_what_torch_says():
    assert Bench(Settings("cpu"), Budget(1)).device == torch.device("cpu")
