"""Ends of text, limits, counts and the meter."""

import copy
import time

import pytest
import torch

from cactus_theory.decoding import generate
from cactus_theory.decoding.models import cache_check, projections
from cactus_theory.divergences import divergence
from cactus_theory.emitted import emitted_law, raised_off_head
from cactus_theory.policies import policy

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


ENDS = {"eos_token_ids": lambda end: end, "stop": lambda end: lambda ids: ids[0, -1] == end}


@pytest.mark.parametrize("by", ENDS)
@pytest.mark.parametrize(
    ("spec", "verifier"), [("cactus:delta=0.5", "chain"), ("band:price=0.5", "block")]
)
def test_end_of_text_stops_everywhere(tiny, spec, verifier, by):
    """Make every token of a text its end in turn: accepted, recovered and bonus tokens."""
    options = {"new": 30, "seed": 4, "verifier": verifier}
    whole = run(tiny, spec, **options).output_token_ids[0].tolist()
    kinds = set()
    for end in set(whole):
        result = run(tiny, spec, **options, **{by: ENDS[by](end)})
        assert result.ended
        assert result.output_token_ids[0].tolist() == whole[: whole.index(end) + 1]
        assert result.reading.rows <= result.num_tokens
        kinds.add(check_counts(result))
    assert kinds == {0, 1}


def test_a_generator_fixes_everything_and_global_state_is_left_alone(tiny):
    before = torch.random.get_rng_state()
    texts = [
        run(tiny, generator=torch.Generator().manual_seed(5)).output_token_ids.tolist()
        for _ in range(2)
    ]
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
    rows, meter = result.rows, result.reading
    rule = policy(spec)
    spent = divergence(kind).value(
        emitted_law(rule, rows.target_probs, rows.draft_probs), rows.target_probs
    )
    assert meter.rows == len(rows.draft_token_ids) > 10
    assert meter.emitted_divergence == pytest.approx(float(spent.sum()), abs=1e-12)
    assert meter.emitted_divergence_per_row == pytest.approx(float(spent.mean()), abs=1e-12)
    assert meter.emitted_divergence_per_token == pytest.approx(float(spent.sum()) / 40, abs=1e-12)
    assert meter.largest_row_divergence == pytest.approx(float(spent.max()), abs=1e-12)
    kept = rows.draft_probs * rule.acceptance_row(rows.target_probs, rows.draft_probs)
    assert meter.expected_accepted == pytest.approx(float(kept.sum()), abs=1e-12)
    law = emitted_law(rule, rows.target_probs, rows.draft_probs)
    assert meter.raised_off_head == pytest.approx(
        float(raised_off_head(law, rows.target_probs).sum()), abs=1e-12
    )
    assert meter.num_accepted_tokens == int(rows.accepted.sum()) == result.num_accepted
    assert meter.num_accepted_tokens > 3
    assert (meter.emitted_divergence > 0.01) == (spec != "speculative")
    assert f"emitted_{kind}_per_token" in result.statistics()


def test_the_recorded_rows_are_the_models_rows(tiny):
    result = run(tiny, "speculative", new=15, record_rows=True, temperature=0.7, seed=1)
    text = torch.cat([PROMPT, result.output_token_ids], 1)
    with torch.inference_mode():
        full = [(m(input_ids=text).logits[0] / 0.7).softmax(-1) for m in tiny]
    rows = result.rows
    for q, p in zip(rows.target_probs, rows.draft_probs, strict=True):
        position = (full[0] - q).abs().amax(-1).argmin()
        # the library's norms are float32 whatever the model is
        assert (full[0][position] - q).abs().max() < 1e-6
        assert (full[1][position] - p).abs().max() < 1e-6


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
