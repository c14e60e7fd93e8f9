"""The model of speed against numbers worked out by hand, costs as short decodes and clocks tell."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from cactus_theory.decoding.readings import Reading
from cactus_theory.decoding.result import Seconds
from cactus_theory.decoding.setting import Setting
from cactus_theory.traces import Replay
from cactus_theory.tuning import Costs, Prompts, measure_costs
from cactus_theory.tuning.costs import plain_speed, speed

# sums of a handful of float64 numbers
ROUNDING = 1e-12
# what a renewal process of up to 4 tokens a call still remembers of its start after 40 tokens
SETTLED = 1e-6
MEASURED = Costs(
    unit="seconds",
    batch=2,
    plain=0.010,
    widths=(1, 4, 12),
    draft=(0.001, 0.004, 0.012),
    target=(0.011, 0.014, 0.030),
    other=(0.002, 0.002, 0.002),
    verify={"a": (0.001, 0.001, 0.001), "b": (0.003, 0.009, 0.017)},
    start=0.020,
    plain_start=0.010,
    new_tokens=50.0,
)


def replay_of(tokens: list[float], reached: list[list[float]], cycles: list[float]) -> Replay:
    nothing = np.zeros((len(reached), len(tokens)))
    return Replay(
        policy="speculative", verifier="chain", num_draft_tokens=len(reached), source="s",
        cycles=np.array(cycles), tokens=np.array(tokens),
        spent={"kl": np.zeros(len(tokens))}, reached=np.array(reached), accepted_at=nothing,
        drafts=np.array(cycles), drafted=len(reached) * np.array(cycles),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("width", "family", "wanted"),
    [
        (1, "a", 0.001 + 0.011 + 0.002 + 0.001),
        (4, "b", 0.004 + 0.014 + 0.002 + 0.009),
        (2, "a", 0.002 + 0.012 + 0.002 + 0.001),  # a third of the way from 1 to 4
        (8, "b", 0.008 + 0.022 + 0.002 + 0.013),  # half way from 4 to 12
        (16, "b", 0.016 + 0.038 + 0.002 + 0.021),  # beyond: the last line goes on
    ],
)
def test_a_call_is_the_sum_of_its_parts_read_off_lines(width, family, wanted) -> None:
    assert MEASURED.call(width, family) == pytest.approx(wanted, rel=ROUNDING)


def test_ratios_are_a_line_in_k() -> None:
    costs = Costs.ratios(0.1, 0.02, 0.3)
    for width in (1, 2, 7, 12):
        wanted = 1 + 0.3 + width * (0.1 + 0.02)
        assert costs.call(width, "any") == pytest.approx(wanted, rel=ROUNDING)


def test_the_speed_of_a_text_by_hand() -> None:
    # one drafted token, kept in 3 of 4 calls: X is 1 or 2, E = 1.75, E X² = 3.25
    own = replay_of([7.0], [[4.0]], [4.0])
    calls = (50 + (3.25 / 1.75 - 1) / 2) / 1.75
    seconds = 0.020 + calls * (0.001 + 0.011 + 0.002 + 0.003)
    assert speed(own, MEASURED, "b").value == pytest.approx(50 / seconds, rel=ROUNDING)
    assert plain_speed(MEASURED) == pytest.approx(50 / (0.010 + 50 * 0.010), rel=ROUNDING)


def test_the_speed_of_texts_without_end_is_tokens_over_time() -> None:
    own = replay_of([7.0, 9.0], [[4.0, 5.0]], [4.0, 5.0])
    found = speed(own, Costs.ratios(0.25), "any")
    assert found.value == pytest.approx(16 / 9 / 1.25, rel=ROUNDING)
    # the jackknife over two texts: half the distance of what either one says
    distance = abs(7 / 4 - 9 / 5) / 1.25
    assert found.standard_error == pytest.approx(distance / 2, rel=ROUNDING)


def test_the_overshoot_is_that_of_a_renewal_process() -> None:
    """Calls of a text of 40 tokens, each 1 to 4 tokens, by recursion over what is left."""
    law = np.array([0.3, 0.1, 0.2, 0.4])
    calls = [0.0]
    for left in range(1, 41):
        after = [calls[max(left - count, 0)] for count in range(1, 5)]
        calls.append(1 + float(law @ after))
    more = law[::-1].cumsum()[::-1]  # Pr(X > i), i = 0..3
    own = replay_of([float(more.sum())], [[value] for value in more[:-1]], [1.0])
    costs = Costs(**{**vars(Costs.ratios(0.0)), "new_tokens": 40.0})
    assert 40 / speed(own, costs, "any").value == pytest.approx(calls[-1], rel=SETTLED)


def test_costs_are_those_of_later_rounds_and_of_all_but_the_first_decodes(
    tiny, monkeypatch
) -> None:
    """By hand, from rounds that a decode reports; the first decode of a kind is 100 times slow."""
    seen: list[int] = []

    class Result:
        row_lengths = (5, 6)
        num_tokens = 11

    def decode(target, draft, ids, options) -> Result:
        slow = 1.0 if options.num_draft_tokens in seen else 100.0
        seen.append(options.num_draft_tokens)
        for seconds in ((1.0, 4.0, 6.0, 0.5, 2), (0.3, 1.0, 1.6, 0.2, 2), (0.15, 0.5, 0.8, 0.1, 1)):
            drafting, passes, whole, verifying = (slow * part for part in seconds[:4])
            other = whole - drafting - passes - verifying
            counts = Reading({(3, 1, False): seconds[4]}, 4)
            options.callbacks.on_round(counts, Seconds(drafting, passes, verifying, other))
        result = Result()
        result.seconds = SimpleNamespace(total=10.0 * slow)
        return result

    monkeypatch.setattr("cactus_theory.tuning.measure.decode", decode)
    prompts, setting = Prompts([[1], [2]], 2, 8), ("a", Setting(num_draft_tokens=2))
    costs = measure_costs(*tiny, prompts, [setting], repeats=1)
    parts = *costs.draft, *costs.target, *costs.verify["a"], *costs.other, costs.start
    assert parts == pytest.approx((0.15, 0.5, 0.1, 0.05, (10 - 5 * 0.8) / 2), rel=1e-9)
    assert costs.plain == pytest.approx(0.8, rel=1e-9) and costs.new_tokens == 5.5


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: Costs.ratios(-1), "cost-ratio: must lie in"),
        (lambda: Costs.ratios(0.1, math.inf), "verify-cost: must be finite"),
        (lambda: Costs.ratios(0.1, 0, math.nan), "fixed-cost: must lie in"),
        (lambda: MEASURED.call(2, "c"), "family: must be one of a, b"),
        (lambda: measure_costs(None, None, Prompts([[1]], 1, 4), []), "settings: must hold"),
        (
            lambda: measure_costs(
                None, None, Prompts([[1]], 1, 4),
                [(name, Setting(num_draft_tokens=1 + (name == "b"))) for name in "ab"],
            ),
            "every family must be at the same K",
        ),
        (lambda: measure_costs(None, None, Prompts([[1]], 0, 4), []), "batch: must be an integer"),
    ],
)  # fmt: skip
def test_bad_costs_are_named(call, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()
