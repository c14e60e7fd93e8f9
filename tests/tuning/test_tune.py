"""What is chosen is the fastest on one half of the texts, what is reported is from the other."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.cli import main
from cactus_theory.decoding import ByPosition, Ledger
from cactus_theory.traces import Cycle, Trace, replay, save_trace
from cactus_theory.traces.replays import replay_widths
from cactus_theory.tuning import Costs, tune
from cactus_theory.tuning.choices import Halves, Tuned
from cactus_theory.tuning.report import notes, payload, sentence
from tests.amounts import amount, some

LEVEL = 0.05
FEW = ["lenience:lenience", "mixture:alpha"]
ROUNDING = 1e-12
# the package has a function of this name, too
tune_module = sys.modules["cactus_theory.tuning.tune"]


@pytest.fixture(scope="module")
def tuned(trace, cheap) -> Tuned:
    return tune(trace, cheap, LEVEL, policies=FEW, widths=[1, 2, 4])


def test_the_fastest_of_one_half_is_reported_from_the_other(trace, cheap, tuned) -> None:
    halves = tuned.halves
    assert sorted(halves[0] + halves[1]) == list(range(trace.texts))
    assert len(halves[0]) == len(halves[1])
    by_hand = {}
    for own in tuned.choices:
        again = replay(trace, own.policy, own.verifier, num_draft_tokens=own.num_draft_tokens)
        assert again.divergence_per_token().value <= LEVEL * 1.01
        first, second = (
            again.part(half).tokens_per_call.value
            / (1 + 0.1 + own.num_draft_tokens * (0.05 + 0.01))
            for half in halves
        )
        assert own.chosen_by.value == pytest.approx(first, rel=ROUNDING)
        assert own.speed.value == pytest.approx(second, rel=ROUNDING)
        by_hand[own.policy, own.verifier, own.num_draft_tokens] = first
    best = tuned.best
    assert by_hand[best.policy, best.verifier, best.num_draft_tokens] == max(by_hand.values())
    assert len(by_hand) == 3 * 4  # K × (lossless by both verifiers, two families)


def test_the_fastest_lossless_setting_is_beside_it(tuned) -> None:
    lossless = [own for own in tuned.choices if own.policy == "speculative"]
    assert len(lossless) == 6
    fastest = max(lossless, key=lambda own: own.chosen_by.value)
    assert tuned.lossless is fastest
    assert tuned.lossless.replay.divergence_per_token().value < 1e-12
    assert tuned.best.chosen_by.value > fastest.chosen_by.value > tuned.plain == 1


@pytest.mark.parametrize(
    ("factor", "best", "lossless"), [(0.98, True, True), (1.02, True, False), (3.0, False, False)]
)
def test_plain_decoding_wins_where_drafting_does_not_pay(trace, factor, best, lossless) -> None:
    """A call costs ``factor`` times the least that a lossless one emits on a half of the texts."""
    lossless_calls = replay(trace, "speculative", num_draft_tokens=1)
    least = min(
        lossless_calls.part(half).tokens_per_call.value
        for half in Halves.of([range(trace.texts)])[:2]
    )
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
    assert not sentence(
        replace(tuned, choices=(replace(lucky, chosen_by=slow, speed=slow),))
    ).endswith("only.")


def test_costs_that_are_measured_say_the_same_as_the_same_costs_given(trace, cheap, tuned) -> None:
    asked = []

    def measure(settings) -> Costs:
        asked.extend(settings)
        return cheap

    again = tune(trace, measure, LEVEL, policies=FEW, widths=[1, 2, 4])
    for one, other in zip(tuned.choices, again.choices, strict=True):
        assert (one.policy, one.verifier, one.num_draft_tokens) == (
            other.policy, other.verifier, other.num_draft_tokens,
        )  # fmt: skip
        assert one.speed.value == other.speed.value
    for own in asked:
        if own.policy != "speculative":  # what is timed is the knob that was solved
            timed = replay(trace, own.policy, own.verifier, num_draft_tokens=own.width)
            assert timed.divergence_per_token().value == pytest.approx(LEVEL, rel=0.01)
    families = {own.family for own in asked}
    assert families == {own.family.key for own in tuned.choices}
    assert {(own.family, own.width) for own in asked} == {
        (family, width) for family in families for width in (1, 2, 4)
    }


def test_a_family_that_stays_within_at_some_k_only_is_timed_there(trace) -> None:
    spec = "mixture:alpha=0.3"
    every = {width: replay(trace, spec, num_draft_tokens=width) for width in (1, 4)}
    spent = {width: own.divergence_per_token().value for width, own in every.items()}
    level = (spent[1] + spent[4]) / 2
    assert min(spent.values()) < level < max(spent.values())
    found = tune(trace, lambda own: _with(own), level, policies=[spec], widths=[1, 4])
    assert len({own.num_draft_tokens for own in found.choices if own.policy == spec}) == 1


def _with(settings) -> Costs:
    keys = {own.family for own in settings}
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


def test_parts_of_a_replay_are_replays_of_parts(trace) -> None:
    whole, texts = replay(trace, "band:price=1"), [0, 2]
    part, alone = whole.part(texts), replay(trace.part(texts), "band:price=1")
    np.testing.assert_array_equal(part.tokens, alone.tokens)
    np.testing.assert_array_equal(part.accepted_at, alone.accepted_at)
    with pytest.raises(ValueError, match="same texts"):
        whole.part([0, 1]).tokens_per_call - part.tokens_per_call


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"level": 0.0}, r"divergence-per-token: must lie in \(0"),
        ({"level": float("inf")}, "divergence-per-token: must be finite"),
        ({"level": 0.1, "divergence": "kll"}, "'kll'"),
        ({"level": 0.1, "widths": [5]}, "num-draft-tokens: must be at most the 4 logged; got 5"),
        ({"level": 0.1, "widths": [0]}, "num-draft-tokens: must be an integer of at least 1"),
        ({"level": 0.1, "widths": []}, "num-draft-tokens: must hold at least one"),
        ({"level": 0.1, "policies": ["soft"]}, "'soft'"),
        ({"level": 0.1, "policies": ["band:prize"]}, "must be a policy with its knobs, or one of"),
    ],
)
def test_bad_requests_are_named(trace, cheap, options, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tune(trace, cheap, **options)


def test_fewer_texts_than_expect_takes_are_too_few(trace, cheap, capsys) -> None:
    """Of two texts each half was one, without an error."""
    with pytest.raises(ValueError, match="cannot say: errors .* at least 5 with a draft; got"):
        tune(trace.part(range(2)), cheap, 0.1)
    with pytest.raises(ValueError, match="texts: must be numbers from 0 to"):
        trace.part([99])


def test_a_cap_on_every_answer_is_named_with_what_it_costs(trace, cheap) -> None:
    """The texts' own means from a replay by hand; the cap by a ledger on the same rounds."""
    asked = {"policies": ["band:price"], "widths": [2, 4]}
    found = tune(trace, cheap, LEVEL, **asked, capped=True)
    assert tune(trace, cheap, LEVEL, **asked).answers is None
    own = found.answers
    free = next(c for c in found.choices if c.family.name == "band:price").replay
    means = free.spent["kl"] / free.tokens
    assert own.num_draft_tokens == free.num_draft_tokens and own.verifier == free.verifier
    assert own.above == (means > LEVEL).mean() and own.worst == means.max() > LEVEL
    assert LEVEL < own.upper <= own.worst
    capped = replay(
        trace, Ledger(own.policy, LEVEL), own.verifier, num_draft_tokens=own.num_draft_tokens
    )
    assert own.ratio.value == pytest.approx((capped.tokens_per_call / free.tokens_per_call).value)
    assert 0.8 < own.ratio.value < 1.05 and own.ratio.standard_error > 0
    assert ct.policy(own.policy).price < ct.policy(free.policy).price
    said = notes(found)
    assert f"--cap {LEVEL:g}, for" in said[0] and f"the worst at {own.worst:.3g}" in said[0]
    assert "allows an answer of 64 tokens 3.2 nats: 90 % of the target becomes 0 %" in said[1]
    assert payload(found)["answers"]["worst"] == own.worst


@pytest.mark.parametrize("verifier", some(["chain", "block"], 1))
def test_a_schedule_is_replayed_as_its_policies_are(trace, verifier) -> None:
    """One policy at every place is that policy; before its first step ends it is lossless."""
    free = replay(trace, "band:price=0.5", verifier)
    again = replay(trace, ByPosition([(0, "band:price=0.5")]), verifier)
    assert np.array_equal(free.spent["kl"], again.spent["kl"])
    assert np.array_equal(free.tokens, again.tokens)
    late = replay(trace, ByPosition([(0, "speculative"), (10**6, "band:price=0.5")]), verifier)
    assert late.divergence_per_token().value == 0.0
    half = replay(trace, ByPosition([(0, "speculative"), (8, "band:price=0.5")]), verifier)
    assert 0 < half.divergence_per_token().value < free.divergence_per_token().value
    capped = replay(trace, Ledger("band:price=0.25", LEVEL), verifier, num_draft_tokens=2)
    assert 0.5 * LEVEL < capped.divergence_per_token().value < 1.2 * LEVEL
    assert np.array_equal(
        capped.tokens,
        replay(trace, Ledger("band:price=0.25", LEVEL), verifier, num_draft_tokens=2).tokens,
    )


EASY, HARD = (0.45, 0.35, 0.2), (0.05, 0.15, 0.8)


@pytest.fixture(scope="module")
def two_kinds(tmp_path_factory) -> Trace:
    """Forty texts of six rounds of one token, every other one easy."""
    source, folder = torch.Generator().manual_seed(0), tmp_path_factory.mktemp("kinds") / "t"
    rows = torch.tensor([[0.5, 0.3, 0.2]] * 2, dtype=torch.float64)
    kinds = [torch.tensor([p], dtype=torch.float64) for p in (HARD, EASY)]
    texts = [[Cycle(text, 0, torch.multinomial(kinds[text % 2][0], 1, generator=source), rows,
                    kinds[text % 2]) for _ in range(6)] for text in range(40)]  # fmt: skip
    save_trace(folder, texts, vocab_size=3, num_draft_tokens=1)
    manifest = folder / "manifest.json"
    details = {"prompts": 2, "groups": {"kind": ["hard", "easy"]}}
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"details": details}))
    return Trace.open(folder)


SPEC = "mixture:alpha=0.5"
KINDS = {"policies": [SPEC], "widths": [1]}


def test_every_number_of_a_line_is_of_the_same_texts(two_kinds, capsys) -> None:
    """A free draft of one token: tokens a call are the times of plain decoding."""
    asked = f"tune --trace {two_kinds.folder} --cost-ratio 0 --divergence-per-token 0.5 --json"
    for more in ("--seed 1", "--by kind"):
        assert main([*asked.split(), "--policies", SPEC, *more.split()]) == 0
        found = json.loads(capsys.readouterr().out)
        line = found["recommended"]
        assert line["over_plain"] == pytest.approx(line["tokens_per_call"], rel=ROUNDING)
        whole = replay(two_kinds, line["policy"])
        spent = whole.divergence_per_token()
        assert line["divergence_per_token"] != spent.value  # of a half
        off = line["divergence_per_token"] - spent.value, line["over_plain"] - \
            whole.tokens_per_call.value  # fmt: skip
    assert max(map(abs, off)) < 0.02  # ten texts of each kind


def test_halves_are_drawn_by_the_seed_alike_in_every_group(two_kinds) -> None:
    drawn = [tune(two_kinds, Costs.ratios(0.1), 0.5, **KINDS, seed=seed, by=by).halves
             for seed, by in ((0, None), (0, None), (1, None), (0, "kind"))]  # fmt: skip
    assert drawn[0] == drawn[1] != drawn[2]
    for half in drawn[3]:
        assert len(half) == 20 and sum(text % 2 for text in half) == 10
    with pytest.raises(ValueError, match="must keep the column 'task'"):
        tune(two_kinds, Costs.ratios(0.1), LEVEL, by="task")


def test_knobs_of_few_texts_are_said_to_be_uncertain(two_kinds, cheap) -> None:
    for source, told in ((two_kinds.part(range(5)), True), (two_kinds, False)):
        found = tune(source, cheap, LEVEL, policies=["band:price"], widths=[1])
        band = next(one for one in found.choices if one.family.name == "band:price")
        spent = band.replay.divergence_per_token()
        share = spent.standard_error / spent.value
        said = f"of all {source.texts} texts is known to {share:.0%} ({band.policy}, "
        assert (share > 0.2) == told == any(said in line for line in notes(found))


def test_calls_that_were_timed_shorter_than_a_plain_step_are_named(trace, cheap) -> None:
    found = tune(trace, cheap, LEVEL, policies=["band:price"], widths=[1])
    assert not any("busy machine" in line for line in notes(found))
    slow = found.at_costs(replace(cheap, plain=2.0))
    assert any(line.startswith("Warning: a call was timed at 0.") for line in notes(slow))
