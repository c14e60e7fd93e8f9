"""Ends of text, limits, counts and the meter."""

import copy
import functools
import json
import math
import time

import pytest
import torch

import cactus_theory as ct
from cactus_theory.base.tensors import normalised
from cactus_theory.decoding import Callbacks, ModelDrafter, NGram, generate, rounds
from cactus_theory.decoding.models import cache_check, projections
from cactus_theory.decoding.readings import Reading
from cactus_theory.divergences import read_divergence
from cactus_theory.emitted import emitted_law, raised_off_head
from cactus_theory.policies import read_policy
from cactus_theory.verify import Assignment, find_verifier
from tests.amounts import some
from tests.decoding.test_ragged import padded, prompts

PROMPT = torch.tensor([[1, 5, 9]])


def run(tiny, spec="speculative", width=4, new=20, **options):
    return generate(
        *tiny, PROMPT, policy=spec, num_draft_tokens=width, max_new_tokens=new, **options
    )


def check_counts(result):
    ended_by_draft = result.num_accepted + result.target_calls - result.num_tokens
    reading = result.reading
    assert reading.num_calls == result.target_calls
    assert ended_by_draft in ((0, 1) if result.ended else (0,))
    assert reading.accepted_per_call == result.num_accepted / result.target_calls
    assert reading.tokens_per_call == result.num_tokens / result.target_calls
    return ended_by_draft


@pytest.mark.parametrize("width", [1, 2, 5, 8])
@pytest.mark.parametrize("new", [1, 2, 7, 20])
def test_never_exceeds_the_limit(tiny, width, new):
    for seed in range(3):
        result = run(tiny, width=width, new=new, seed=seed)
        assert result.num_tokens == new
        assert len(result.reading.acceptance_histogram) == min(width, new - 1) + 1
        check_counts(result)


@pytest.mark.parametrize("fast", [True, False])
def test_what_is_prepared_once_is_no_part_of_decoding(tiny, monkeypatch, fast):
    models, wait = copy.deepcopy(tiny), 0.2
    for place, name in ((projections, "_half"), (cache_check, "_whole")):
        own = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *given, own=own: time.sleep(wait) or own(*given))
    first, second = (run(models, fast_forward=fast) for _ in range(2))
    assert first.seconds.preparation > wait and second.seconds.preparation == 0
    assert first.seconds.other >= 0 and first.statistics()["preparation_seconds"] > wait
    parts = ("draft", "target", "verify", "other")
    assert first.seconds.total == sum(getattr(first.seconds, part) for part in parts)
    monkeypatch.setattr(rounds, "warm", functools.cache(lambda: time.sleep(wait)))
    assert run(models, fast_forward=fast).seconds.preparation > wait


ENDS = {"eos_token_ids": lambda end: end, "stop": lambda end: lambda ids, _: ids[0, -1] == end}


@pytest.mark.parametrize("by", ENDS)
@pytest.mark.parametrize(
    ("spec", "verifier"), [("cactus:delta=0.5", "chain"), ("band:price=0.5", "block")]
)
def test_end_of_text_stops_everywhere(tiny, spec, verifier, by):
    """Make every token of a text its end in turn: accepted, recovered and bonus tokens."""
    options = {"new": 30, "seed": 4, "verifier": verifier, "log_probs": True}
    whole = run(tiny, spec, **options).output_token_ids[0].tolist()
    kinds = set()
    for end in set(whole):
        result = run(tiny, spec, **options, **{by: ENDS[by](end)})
        assert result.ended
        assert result.output_token_ids[0].tolist() == whole[: whole.index(end) + 1]
        # of an end inside a draft, nothing behind it is charged or counted
        rounds, charges = result.reading.rounds.items(), result.token_charges
        assert charges.shape == result.log_probs.target.shape == (1, result.num_tokens)
        assert float(charges.sum()) == pytest.approx(result.reading.emitted_divergence)
        refused = sum(times for (of, kept, cut), times in rounds if kept < of and not cut)
        assert result.reading.rows == result.num_accepted + refused
        kinds.add(check_counts(result))
    assert kinds == {0, 1}


def test_a_seed_fixes_everything_and_global_state_is_left_alone(tiny):
    before = torch.random.get_rng_state()
    texts = [run(tiny, seed=5).output_token_ids.tolist() for _ in range(2)]
    assert texts[0] == texts[1]
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ("speculative", "kl"),
        ("cactus:delta=0.3", "pearson_chi2"),
        ("band:price=2.0", "total_variation"),
    ],
)
def test_the_meter_equals_a_recomputation(tiny, spec, kind):
    result = run(tiny, spec, new=40, record_rows=True, seed=2, meter=kind)
    meter, rule = result.reading, read_policy(spec)
    q, p = (
        normalised(torch.stack([torch.from_numpy(getattr(node, name)) for node in result.rows]))
        for name in ("q", "offers")
    )
    spent = read_divergence(kind).value(emitted_law(rule, q, p), q)
    assert meter.rows == len(result.rows) > 10
    assert meter.emitted_divergence == pytest.approx(float(spent.sum()), abs=1e-12)
    assert meter.emitted_divergence_per_row == pytest.approx(float(spent.mean()), abs=1e-12)
    assert meter.emitted_divergence_per_token == pytest.approx(float(spent.sum()) / 40, abs=1e-12)
    assert meter.largest_row_divergence == pytest.approx(float(spent.max()), abs=1e-12)
    kept = p * rule.acceptance_row(q, p)
    assert meter.expected_accepted == pytest.approx(float(kept.sum()), abs=1e-12)
    beyond = raised_off_head(emitted_law(rule, q, p), q)
    assert meter.raised_off_head == pytest.approx(float(beyond.sum()), abs=1e-12)
    assert meter.num_accepted_tokens == result.num_accepted > 3
    assert (meter.emitted_divergence > 0.01) == (spec != "speculative")
    assert f"emitted_{kind}_per_token" in result.statistics()


def test_the_meter_costs_nothing_when_off_and_changes_no_token(tiny):
    on, off = run(tiny, seed=6), run(tiny, seed=6, meter=False)
    assert off.reading.emitted_divergence is None
    assert on.output_token_ids.tolist() == off.output_token_ids.tolist()
    # another process may interrupt any one of them
    again = [run(tiny, seed=6, meter=False).seconds.meter for _ in range(4)]
    assert min(off.seconds.meter, *again) < 0.2 * on.seconds.meter
    parts = on.seconds.draft + on.seconds.target + on.seconds.verify + on.seconds.other
    assert on.seconds.total == pytest.approx(parts)
    assert on.tokens_per_second == pytest.approx(20 / on.seconds.total)


def test_ragged_drafts_by_hand():
    """Drafts of 3 with 0, 2 and 3 kept, of 2 kept whole, of 3 cut by an end; a call without."""
    rounds = {
        (3, 0, False): 1,
        (3, 2, False): 1,
        (3, 3, False): 1,
        (2, 2, False): 1,
        (3, 1, True): 1,
        (0, 0, False): 1,
    }
    found = Reading(rounds, 13, 0.75, 0.5)
    assert (found.num_drafts, found.num_draft_tokens, found.num_accepted_tokens) == (5, 14, 8)
    assert found.num_accepted_tokens_per_pos == (4, 3, 1)
    assert found.acceptance_histogram == (1, 1, 2, 1)
    assert found.marginal_acceptance_rates == (4 / 5, 3 / 5, 1 / 5)
    assert found.conditional_acceptance_rates == (4 / 5, 3 / 3, 1 / 2)
    assert (found.acceptance_rate, found.mean_acceptance_length) == (8 / 14, 1 + 8 / 5)
    assert (found.num_calls, found.tokens_per_call) == (6, 13 / 6)
    assert found.emitted_divergence_per_token == 0.75 / 13


def test_nothing_drafted_is_no_rate():
    found = Reading({(0, 0, False): 4}, 4)
    assert (found.num_drafts, found.acceptance_histogram, found.num_calls) == (0, (0,), 4)
    assert math.isnan(found.acceptance_rate) and found.marginal_acceptance_rates == ()
    assert found.emitted_divergence is None and found.tokens_per_call == 1


def test_json_has_every_field_and_the_meters_divergence(tiny):
    result = generate(*tiny, torch.tensor([[1, 5, 9]]), policy="cactus:delta=0.3",
                      max_new_tokens=10, meter="total_variation")  # fmt: skip
    (found,) = result.readings()
    held = json.loads(json.dumps(found.as_dict()))
    assert held["emitted_total_variation"] == pytest.approx(result.reading.emitted_divergence)
    assert "num_drafts" in held and "emitted_kl" not in held


# float64 rows of one decode, computed twice
TWICE = 1e-9
KL = ct.divergence("kl")
DRAFTERS = {
    "model": lambda draft: draft,
    "greedy": lambda draft: ModelDrafter(draft, greedy=True),
    "ngram": lambda draft: NGram(2, 1),
}
LOGGED = [
    (policy, verifier, drafter)
    for drafter in DRAFTERS
    for verifier in ("chain", "block")
    for policy in ("cactus:delta=0.1", "band:price=0.7", "band:price=0.7,per_row=True", "typical")
    if policy != ("band:price=0.7,per_row=True" if verifier == "chain" else "typical")
]


@pytest.mark.parametrize(("policy", "verifier", "drafter"), some(LOGGED, 5))
def test_every_token_has_the_values_of_its_row(tiny, policy, verifier, drafter):
    """Those of the verifier's exact law of the round, which is not how the meter finds them."""
    ids, mask = padded(prompts(seed=3))
    rounds, assigned = [[] for _ in ids], Assignment((ct.policy(policy),))

    def on_rows(q, draft, places, before):
        for row, (place, made) in enumerate(zip(places, before, strict=True)):
            rounds[place].append((made, draft.of_text(row), q[row : row + 1]))

    found = generate(
        tiny[0], DRAFTERS[drafter](tiny[1]), ids, attention_mask=mask, policy=policy, seed=5,
        verifier=verifier, max_new_tokens=30, num_draft_tokens=3, eos_token_ids=(7, 13),
        log_probs=True, callbacks=Callbacks(on_rows=on_rows),
    )  # fmt: skip
    scored, charges = found.log_probs, found.token_charges
    kinds = {"accepted": 0, "recovered": 0, "bonus": 0}
    for row, (own, length) in enumerate(zip(rounds, found.row_lengths, strict=True)):
        text = found.output_token_ids[row].tolist()
        ends = [made for made, *_ in own[1:]] + [length]
        for (made, draft, q), end in zip(own, ends, strict=True):
            drafted, h = draft.token_ids[0, : draft.lengths[0]].tolist(), q[0].clone()
            if drafted:
                law = find_verifier(verifier).law(assigned, q, draft)
                h[: len(drafted)] = law.emitted[0, : len(drafted)]
            for i, token in enumerate(text[made:end]):
                kind = "bonus"
                if i < len(drafted):
                    kind = "accepted" if token == drafted[i] else "recovered"
                kinds[kind] += 1
                charge = float(KL.value(h[i], q[0, i])) if i < len(drafted) else 0.0
                expected = math.log(q[0, i, token]), math.log(h[i, token]), charge
                told = (own[row, made + i] for own in (scored.target, scored.emitted, charges))
                assert [float(own) for own in told] == pytest.approx(expected, abs=TWICE)
        assert scored.target[row, length:].isnan().all()
        assert scored.emitted[row, length:].isnan().all()
    assert min(kinds.values()) > 1, kinds
