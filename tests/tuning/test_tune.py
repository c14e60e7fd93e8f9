"""What is chosen is the fastest on one half of the texts, what is reported is from the other."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from cactus_theory.cli import main
from cactus_theory.traces import Cycle, Trace, replay, save_trace
from cactus_theory.traces.replays import replay_widths
from cactus_theory.tuning import Costs, tune
from cactus_theory.tuning.report import notes, sentence
from cactus_theory.tuning.tune import Halves, Tuned
from tests.amounts import amount

LEVEL = 0.05
FEW = ["lenience:lenience", "mixture:alpha"]
ROUNDING = 1e-12


@pytest.fixture(scope="module")
def tuned(trace, cheap) -> Tuned:
    return tune(trace, cheap, LEVEL, policies=FEW, widths=[1, 2, 4])


def test_the_fastest_of_one_half_is_reported_from_the_other(trace, cheap, tuned) -> None:
    halves = tuned.halves
    assert sorted(halves[0] + halves[1]) == list(range(trace.texts))
    assert len(halves[0]) == len(halves[1])
    by_hand = {}
    for own in tuned.choices:
        setting = own.replay
        again = replay(
            trace, setting.policy, setting.verifier, num_draft_tokens=setting.num_draft_tokens
        )
        assert again.divergence_per_token().value <= LEVEL * 1.01
        first, second = (
            again.part(half).tokens_per_call.value
            / (1 + 0.1 + setting.num_draft_tokens * (0.05 + 0.01))
            for half in halves
        )
        assert own.chosen_by.value == pytest.approx(first, rel=ROUNDING)
        assert own.speed.value == pytest.approx(second, rel=ROUNDING)
        by_hand[str(setting)] = first
    best, other = tuned.best, tuned.lossless
    assert by_hand[str(best.replay)] == max(by_hand.values())
    assert len(by_hand) == 3 * 4  # K × (lossless by both verifiers, two families)
    lossless = {key: first for key, first in by_hand.items() if key.startswith("speculative,")}
    assert lossless[str(other.replay)] == max(lossless.values())
    assert best.chosen_by.value > other.chosen_by.value > tuned.plain == 1
    ratio, texts = best.speed / other.speed, len(halves[1])
    needed = math.ceil(texts * (2.8016 * ratio.standard_error / (ratio.value - 1)) ** 2)
    assert f"from {max(5, needed)} texts on ({texts} here)" in sentence(tuned)


@pytest.mark.parametrize(
    ("factor", "best", "lossless"), [(0.98, True, True), (1.02, True, False), (3.0, False, False)]
)
def test_plain_decoding_wins_where_drafting_does_not_pay(trace, factor, best, lossless) -> None:
    """A call costs ``factor`` times the least that a lossless one emits on a half of the texts."""
    lossless_calls = replay(trace, "speculative", num_draft_tokens=1)
    least = min(lossless_calls.part(half).tokens_per_call.value for half in Halves.of(trace.texts))
    found = tune(
        trace, Costs.ratios(factor * least - 1), 0.2, policies=["mixture:alpha"], widths=[1]
    )
    assert [found.best is not None, found.lossless is not None] == [best, lossless]
    for own in (found.best, found.lossless):
        assert own is None or min(own.chosen_by.value, own.speed.value) > found.plain


@pytest.mark.parametrize("half", ["chosen_by", "speed"])
def test_a_draft_that_pays_on_one_half_only_is_not_recommended(tuned, half) -> None:
    slow = replace(getattr(tuned.best, half), value=0.99 * tuned.plain)
    lucky = replace(tuned.best, **{half: slow})
    assert replace(tuned, choices=(lucky,)).best is None
    said = sentence(replace(tuned, choices=(lucky,)))
    assert said.startswith("Decode without this draft: plain decoding makes 1.000")
    assert said.endswith("which pays on one half of the texts only.")
    slower = replace(lucky, chosen_by=slow, speed=slow)
    assert not sentence(replace(tuned, choices=(slower,))).endswith("only.")


def test_costs_that_are_measured_say_the_same_as_the_same_costs_given(trace, cheap, tuned) -> None:
    asked = []

    def measure(settings) -> Costs:
        asked.extend(settings)
        return cheap

    again = tune(trace, measure, LEVEL, policies=FEW, widths=[1, 2, 4])
    for one, other in zip(tuned.choices, again.choices, strict=True):
        assert str(one.replay) == str(other.replay)
        assert one.speed.value == other.speed.value
    for _, own in asked:
        if own.policy != "speculative":  # what is timed is the knob that was solved
            timed = replay(trace, own.policy, own.verifier, num_draft_tokens=own.num_draft_tokens)
            assert timed.divergence_per_token().value == pytest.approx(LEVEL, rel=0.01)
    families = {family for family, _ in asked}
    assert families == {own.family.key for own in tuned.choices}
    assert {(family, own.num_draft_tokens) for family, own in asked} == {
        (family, width) for family in families for width in (1, 2, 4)
    }


def test_a_family_that_stays_within_at_some_k_only_is_timed_there(trace) -> None:
    spec = "mixture:alpha=0.3"
    every = {width: replay(trace, spec, num_draft_tokens=width) for width in (1, 4)}
    spent = {width: own.divergence_per_token().value for width, own in every.items()}
    level = (spent[1] + spent[4]) / 2
    assert min(spent.values()) < level < max(spent.values())
    found = tune(trace, lambda own: _with(own), level, policies=[spec], widths=[1, 4])
    settings = [own.replay for own in found.choices]
    assert len({own.num_draft_tokens for own in settings if own.policy == spec}) == 1


def _with(settings) -> Costs:
    keys = {family for family, _ in settings}
    costs = vars(Costs.ratios(0.1)) | {"verify": dict.fromkeys(keys, (0.0, 0.0))}
    return Costs(**costs)


def test_one_pass_at_the_longest_k_is_what_every_k_is_on_its_own(trace, tmp_path) -> None:
    policies = [
        ("band:price=2", "block"),
        ("band:price=1,per_row=True", "block"),
        ("cactus:delta=0.01", "chain"),
        ("typical", "chain"),
    ]
    for policy, verifier in policies[: amount(3, 4)]:
        shared = replay_widths(trace, policy, verifier, (1, 3, 4))
        for width, own in shared.items():
            alone = replay(trace, policy, verifier, num_draft_tokens=width)
            for name in ("cycles", "tokens", "reached", "accepted_at"):
                np.testing.assert_allclose(getattr(own, name), getattr(alone, name), rtol=ROUNDING)
            np.testing.assert_allclose(own.spent["kl"], alone.spent["kl"], rtol=ROUNDING)


def of_texts(trace: Trace, texts: Sequence[int]) -> Trace:
    shards = tuple(trace.manifest.shards[text] for text in texts)
    return Trace(trace.folder, replace(trace.manifest, shards=shards))


def test_parts_of_a_replay_are_replays_of_parts(trace) -> None:
    whole, texts = replay(trace, "band:price=1"), [0, 2]
    part, alone = whole.part(texts), replay(of_texts(trace, texts), "band:price=1")
    np.testing.assert_array_equal(part.tokens, alone.tokens)
    np.testing.assert_array_equal(part.accepted_at, alone.accepted_at)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"level": 0.0}, r"nats: must lie in \(0"),
        ({"level": float("inf")}, "nats: must be finite"),
        ({"level": 0.1, "divergence": "kll"}, "'kll'"),
        ({"level": 0.1, "widths": [5]}, "num_draft_tokens: must be at most the 4 logged; got 5"),
        ({"level": 0.1, "widths": [0]}, "num_draft_tokens: must be an integer of at least 1"),
        ({"level": 0.1, "widths": []}, "num_draft_tokens: must hold at least one"),
        ({"level": 0.1, "policies": ["soft"]}, "'soft'"),
        ({"level": 0.1, "policies": ["band:prize"]}, "knob: must be one of delta, price"),
    ],
)
def test_bad_requests_are_named(trace, cheap, options, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tune(trace, cheap, **options)


def test_fewer_texts_than_expect_takes_are_too_few(trace, cheap) -> None:
    """Of two texts each half was one, without an error."""
    with pytest.raises(ValueError, match="cannot say: errors .* at least 5 with a draft; got"):
        tune(of_texts(trace, [0, 1]), cheap, 0.1)


def test_the_spread_over_texts_is_told(trace, cheap) -> None:
    found = tune(trace, cheap, LEVEL, policies=["band:price"], widths=[2, 4])
    means = found.best.replay.spent["kl"] / found.best.replay.tokens
    assert f"the worst at {max(means):.3g}" in notes(found)[0] and max(means) > LEVEL


EASY, HARD = (0.45, 0.35, 0.2), (0.05, 0.15, 0.8)


@pytest.fixture(scope="module")
def two_kinds(tmp_path_factory) -> Trace:
    """Forty texts of six rounds of one token, every other one easy."""
    source, folder = torch.Generator().manual_seed(0), tmp_path_factory.mktemp("kinds") / "t"
    rows = torch.tensor([[0.5, 0.3, 0.2]] * 2, dtype=torch.float64)
    kinds = [torch.tensor([p], dtype=torch.float64) for p in (HARD, EASY)]
    texts = [[Cycle(text, 0, torch.multinomial(kinds[text % 2][0], 1, generator=source), rows,
                    kinds[text % 2]) for _ in range(6)] for text in range(40)]  # fmt: skip
    return save_trace(folder, texts, vocab_size=3, num_draft_tokens=1)


SPEC = "mixture:alpha=0.5"


def test_every_number_of_a_line_is_of_the_same_texts(two_kinds, capsys) -> None:
    """A free draft of one token: tokens a call are the times of plain decoding."""
    asked = f"tune --trace {two_kinds.folder} --cost-ratio 0 --nats 0.5 --json"
    assert main([*asked.split(), "--policy", SPEC, "--seed", "1"]) == 0
    line = json.loads(capsys.readouterr().out)["recommended"]
    assert line["over_plain"] == pytest.approx(line["tokens_per_call"], rel=ROUNDING)
    spent = replay(two_kinds, line["policy"]).divergence_per_token()
    assert line["divergence_per_token"] != spent.value  # of a half


def test_halves_are_drawn_by_the_seed() -> None:
    assert Halves.of(40, 0) == Halves.of(40, 0) != Halves.of(40, 1)
    assert sorted(sum(Halves.of(40, 0), [])) == list(range(40))


def test_knobs_of_few_texts_are_said_to_be_uncertain(two_kinds, cheap) -> None:
    for source, told in ((of_texts(two_kinds, range(5)), True), (two_kinds, False)):
        found = tune(source, cheap, LEVEL, policies=["band:price"], widths=[1])
        band = next(one for one in found.choices if one.family.name == "band:price")
        spent = band.replay.divergence_per_token()
        share = spent.standard_error / spent.value
        said = f"of all {source.texts} texts is known to {share:.0%} ({band.replay.policy}, "
        assert (share > 0.2) == told == any(said in line for line in notes(found))


def test_calls_that_were_timed_shorter_than_a_plain_step_are_named(trace, cheap) -> None:
    found = tune(trace, cheap, LEVEL, policies=["band:price"], widths=[1])
    assert not any("busy machine" in line for line in notes(found))
    slow = replace(found, costs=replace(cheap, plain=2.0))
    assert any(line.startswith("Warning: a call was timed at 0.") for line in notes(slow))
    assert not any("--threads 1" in line for line in notes(found))
    crowded = replace(found.costs, target=tuple(9 * found.costs.plain for _ in found.costs.target))
    (said,) = [line for line in notes(replace(found, costs=crowded)) if "--threads 1" in line]
    assert "tokens was timed at 9.00 plain steps" in said
