"""Readings of a request: their definitions, the identities between them, and vLLM's names."""

import json
import math

import pytest
import torch

from cactus_theory.decoding import ModelDrafter, generate
from cactus_theory.decoding.readings import VLLM_SUMMARY, Reading
from tests.amounts import some
from tests.decoding.test_ragged import SEEDS, alone, padded, prompts

# sums of a few dozen float64 numbers
ROUNDING = 1e-12


def test_vllms_numbers_for_one_request_are_found_under_vllms_names():
    """The example in vLLM's documentation of its answer to one request."""
    rounds = {(3, 0, False): 39, (3, 1, False): 1, (3, 3, False): 3}
    found = Reading(rounds, num_tokens=53).speculative_decoding()
    assert found == {
        "mean_acceptance_length": 1.2325581395348837,
        "draft_acceptance_rate": 0.07751937984496124,
        "acceptance_histogram": (39, 1, 0, 3),
        "num_spec_steps": 43,
        "num_accepted_draft_tokens": 10,
        "num_draft_tokens": 129,
        "num_spec_tokens": 3,
    }


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


def check_identities(found):
    counts, kept = found.acceptance_histogram, found.num_accepted_tokens_per_pos
    assert sum(counts) == found.num_drafts
    assert sum(a * own for a, own in enumerate(counts)) == found.num_accepted_tokens == sum(kept)
    assert kept == tuple(sum(counts[place + 1 :]) for place in range(len(kept)))
    marginal = sum(found.marginal_acceptance_rates)
    assert found.mean_acceptance_length == pytest.approx(1 + marginal, abs=ROUNDING)


CASES = [(verifier, stop) for verifier in ("chain", "block") for stop in (None, 0.4)]


@pytest.mark.parametrize(("verifier", "stop"), some(CASES, 3))
def test_each_row_reads_as_it_does_alone_and_all_add_up(tiny, verifier, stop):
    rows = prompts(seed=3)
    ids, mask = padded(rows)
    options = {"max_new_tokens": 25, "num_draft_tokens": 5, "eos_token_ids": (7, 13, 15)}
    options |= {"verifier": verifier, "policy": "cactus:delta=0.4"}
    drafter = ModelDrafter(tiny[1], stop=stop)
    result = generate(tiny[0], drafter, ids, attention_mask=mask, seed=SEEDS, **options)
    readings, pooled = result.readings(), result.reading
    for row, seed, found, length in zip(rows, SEEDS, readings, result.row_lengths, strict=True):
        check_identities(found)
        single = alone(tiny[0], drafter, row, seed, **options)
        own = single.reading
        assert found.num_tokens == length and found.num_calls == own.num_calls
        assert found.acceptance_histogram == own.acceptance_histogram
        assert found.emitted_divergence == pytest.approx(
            single.reading.emitted_divergence, abs=ROUNDING
        )
        assert found.largest_row_divergence == pytest.approx(
            single.reading.largest_row_divergence, abs=ROUNDING
        )
    check_identities(pooled)
    for name in (
        "num_drafts",
        "num_draft_tokens",
        "num_accepted_tokens",
        "num_tokens",
        "num_calls",
    ):
        assert getattr(pooled, name) == sum(getattr(own, name) for own in readings)
    assert pooled.emitted_divergence == pytest.approx(
        result.reading.emitted_divergence, abs=ROUNDING
    )
    assert len({own.emitted_divergence for own in readings}) == len(rows)


def test_tokens_have_their_charge_in_their_own_place(tiny):
    """Charges stand where tokens were verified, in order; bonus tokens have none."""
    ids = torch.tensor([[1, 5, 9]])
    result = generate(*tiny, ids, policy="cactus:delta=0.3", num_draft_tokens=3,
                      max_new_tokens=30, record_rows=True, seed=4)  # fmt: skip
    flags, expected, rows = result.rows.accepted.tolist(), [], iter(_charges(result))
    run = 0
    for kept in flags:
        expected.append(next(rows))
        run = run + 1 if kept else 0
        width = min(3, 30 - len(expected) + run - 1)  # as planned when the round began
        if run == width:
            expected.append(0.0)
            run = 0
    assert result.token_charges[0, : len(expected)].tolist() == pytest.approx(
        expected, abs=ROUNDING
    )
    assert sum(own == 0.0 for own in expected) > 2


def _charges(result):
    import cactus_theory as ct

    rows = result.rows
    law = ct.emitted_law(ct.policy("cactus:delta=0.3"), rows.target_probs, rows.draft_probs)
    return ct.divergence("kl").value(law, rows.target_probs).tolist()


def test_json_has_every_field_and_the_meters_divergence(tiny):
    result = generate(*tiny, torch.tensor([[1, 5, 9]]), policy="cactus:delta=0.3",
                      max_new_tokens=10, meter="total_variation")  # fmt: skip
    (found,) = result.readings()
    held = json.loads(json.dumps(found.as_dict()))
    assert held["emitted_total_variation"] == pytest.approx(result.reading.emitted_divergence)
    assert set(VLLM_SUMMARY) < set(held["speculative_decoding"])
    assert "num_drafts" in held and "emitted_kl" not in held
