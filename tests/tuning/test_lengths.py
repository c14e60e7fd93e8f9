"""Settings are ranked by the answer where the lengths of answers differ."""

import numpy as np
import pytest
import torch

from cactus_theory.decoding import generate
from cactus_theory.traces import Estimate
from cactus_theory.tuning import Prompts, tune
from cactus_theory.tuning.measure import BEYOND_TIMED, TimedSetting, measure_lengths
from cactus_theory.tuning.report import notes, payload

LEVEL = 0.05
PRECISE, VAGUE = 0.01, 0.5


@pytest.fixture(scope="module")
def tuned(trace, cheap):
    return tune(trace, cheap, LEVEL, policies=["band:price", "lenience:lenience"], widths=[2, 4])


def lengths(error: float, **of_places: float):
    """Return a stand-in for decoded answers: 100 tokens, times a factor by place among choices."""

    def measure(choice):
        factor = of_places.get(choice.policy, 1.0)
        around = error * np.array([-1.0, 1.0]) * (not choice.family.lossless)
        return Estimate(100 * factor, 100 * (factor + around), "answers")

    return measure


def top(tuned, **factors: float):
    first, second = tuned.choices[:2]
    return {first.policy: factors["first"], second.policy: factors["second"]}


def test_only_the_two_fastest_and_one_lossless_setting_are_decoded(tuned) -> None:
    asked = []
    made = tuned.with_lengths(lambda choice: asked.append(choice) or lengths(0.0)(choice))
    lossless = next(one for one in tuned.choices if one.family.lossless)
    assert asked == [lossless, *tuned.choices[:2]]
    assert [one.length is not None for one in made.choices] == [
        one in tuned.choices[:2] for one in tuned.choices
    ]
    assert made.best.policy == tuned.best.policy


def test_longer_answers_rank_again_where_the_interval_excludes_one(tuned) -> None:
    first, second = tuned.choices[:2]
    longer = top(tuned, first=1.5, second=1.0)
    made = tuned.with_lengths(lengths(PRECISE, **longer))
    assert made.choices[0].longer == pytest.approx(1.5) and made.choices[1].longer == 1
    assert (made.best.policy, tuned.best.policy) == (second.policy, first.policy)
    assert tuned.with_lengths(lengths(VAGUE, **longer)).best.policy == first.policy


def test_where_both_are_much_longer_a_lossless_setting_or_none_is_best(tuned) -> None:
    made = tuned.with_lengths(lengths(PRECISE, **top(tuned, first=9.0, second=9.0)))
    assert made.best == made.lossless is not None
    ended = tuned.with_lengths(lengths(PRECISE, **top(tuned, first=0.5, second=1.0)))
    assert ended.best.policy == tuned.choices[0].policy


def test_the_report_says_what_an_answer_gains(tuned) -> None:
    made = tuned.with_lengths(lengths(PRECISE, **top(tuned, first=1.1, second=1.0)))
    ratio = (made.choices[0].speed / made.lossless.speed).value
    said = "\n".join(notes(made))
    assert (
        f"{ratio:.2f} times the tokens a second of lossless drafting, 1.100 ± 0.010 times the "
        f"length: {ratio / 1.1:.2f} times as fast an answer." in said
    )
    assert "answers as long as lossless ones (1.000 ± 0.010 times)." in said
    assert "length" not in "\n".join(notes(tuned))
    lines = payload(made)["table"]
    assert [line["length_ratio"] is None for line in lines[:3]] == [False, False, True]


def test_lengths_are_those_of_decodes_each_prompt_as_often(tiny) -> None:
    ids, end = [[1, 2, 3], [4, 5], [6]], [3, 7]
    prompts = Prompts(ids, batch=2, max_new_tokens=9, eos_token_ids=end, seed=5)
    setting = TimedSetting("band:price@chain", "band:price=1", "chain", 2)
    seen: list[tuple[int, int]] = []
    found = measure_lengths(*tiny, prompts, setting, 4, lambda *done: seen.append(done))
    alone = [
        generate(
            *tiny, torch.tensor([ids[text % 3]]), policy="band:price=1", num_draft_tokens=2,
            max_new_tokens=9, eos_token_ids=end, seed=5 + BEYOND_TIMED + text,
        ).num_tokens
        for text in range(6)
    ]  # fmt: skip
    assert found.value == np.mean(alone) and min(alone) < 9
    assert seen == [(2, 6), (4, 6), (6, 6)]
    assert found.left_out[0] == np.mean(alone[1:3] + alone[4:])
