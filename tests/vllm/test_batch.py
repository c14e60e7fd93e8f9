"""Flat batches emit what each request would emit alone, coin by coin."""

import dataclasses

import pytest
import torch

import cactus_theory as ct
from cactus_theory.vllm.batch import toss, verify_flat
from tests.amounts import amount
from tests.vllm.flat import (
    BLOCK,
    CHAIN,
    alone,
    emitted,
    random_batch,
    random_coins,
)

VERIFY = {"chain": (CHAIN, ct.verify_chain), "block": (BLOCK, ct.verify_block)}
RULES = ("speculative", "band:price=1", "cactus:delta=0.5", "mixture:alpha=0.5",
         "band:price=1,tilt=0.3", "speculative:tilt=0.4")  # fmt: skip
COUNTS = ([3, 3, 3], [2, 0, 3, 1], [0, 0, 2, 2], [1], [4, 0, 4, 0])
SEEDS = amount(6, 30)


def assert_as_alone(name, rules, batch, coins):
    verifier, verify = VERIFY[name]
    output, _ = verify_flat(verifier, rules, batch, coins)
    assert output.dtype == torch.int32 and output.shape == (len(batch.counts), batch.width + 1)
    expected, place = [], 0
    for row, count in enumerate(batch.counts):
        own = None if not count else (coins[0][place], coins[1][place : place + 1])
        rule = rules[row] if len(rules) > 1 else rules[0]
        expected.append(alone(verify, rule, batch, row, own))
        place += bool(count)
    assert emitted(output) == expected


@pytest.mark.parametrize("name", VERIFY)
@pytest.mark.parametrize("deterministic", [False, True], ids=["sampled", "deterministic"])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_requests_emit_what_they_would_alone(name, deterministic, counts):
    for seed in range(SEEDS):
        batch = random_batch(seed, counts, deterministic)
        rules = [ct.policy(RULES[(seed + row) % len(RULES)]) for row in range(len(counts))]
        assert_as_alone(name, rules[:1], batch, random_coins(seed, batch))
        assert_as_alone(name, rules, batch, random_coins(seed, batch))


@pytest.mark.parametrize("deterministic", [False, True], ids=["sampled", "deterministic"])
def test_greedy_rows_placeholders_and_lost_rows_in_one_batch(deterministic):
    rule = [ct.policy("band:price=0.5")]
    met = set()
    for seed in range(20 * SEEDS):
        counts = [3, 3, 0, 2, 3]
        batch = random_batch(seed, counts, deterministic, greedy=[False, True, False, True, False])
        ids = batch.ids.clone()
        best = batch.target_logits.argmax(-1).int()
        ids[3:5] = best[3:5]  # so that greedy drafts are sometimes accepted
        ids[6:8] = best[6:8]
        ids[seed % 3] = -1
        batch = dataclasses.replace(batch, ids=ids, unknown=frozenset({4} if seed % 2 else ()))
        assert_as_alone("chain", rule, batch, random_coins(seed, batch))
        met.add(tuple(len(row) for row in emitted(verify_flat(CHAIN, rule, batch)[0])))
    assert {lengths[1] for lengths in met} == {3, 4}  # refused at the last place, and the bonus
    assert {lengths[3] for lengths in met} == {3}


def test_a_batch_without_drafts_emits_its_bonus_tokens():
    batch = random_batch(0, [0, 0])
    output, seen = verify_flat(CHAIN, [ct.policy("speculative")], batch)
    assert seen is None and output.tolist() == batch.bonus[:, None].tolist()


@pytest.mark.parametrize("name", VERIFY)
@pytest.mark.parametrize("coin", [0.0, 1 - 2**-53])
def test_excluded_tokens_are_never_emitted(name, coin):
    for seed in range(10 * SEEDS):
        batch = random_batch(seed, [2, 2, 2], holes=0.6)
        coins = torch.full((3, 2), coin).double(), torch.full((3,), coin).double()
        output, _ = verify_flat(VERIFY[name][0], [ct.policy("band:price=0.5")], batch, coins)
        for row, tokens in enumerate(emitted(output)):
            for place, token in enumerate(tokens[:2]):
                assert batch.target_logits[2 * row + place, token] > -torch.inf


def test_a_request_with_its_own_generator_does_not_depend_on_its_batch():
    rule = [ct.policy("band:price=1")]
    for seed in range(3 * SEEDS):
        batch = random_batch(seed, [2, 3, 1])
        own = dataclasses.replace(
            batch,
            ids=batch.ids[:2],
            counts=[2],
            width=2,
            draft_probs=batch.draft_probs[:2],
            target_logits=batch.target_logits[:2],
            bonus=batch.bonus[:1],
            generators={0: torch.Generator().manual_seed(5)},
        )
        among = {0: torch.Generator().manual_seed(5)}
        batch = dataclasses.replace(batch, generators=among)
        torch.manual_seed(seed)
        together = emitted(verify_flat(CHAIN, rule, batch)[0])[0]
        assert emitted(verify_flat(CHAIN, rule, own)[0])[0] == together
        assert own.generators[0].get_state().equal(among[0].get_state())  # as many numbers taken


def test_coins_come_from_the_default_generator_and_are_not_shared():
    batch = random_batch(0, [3] * 50)
    torch.manual_seed(3)
    accept, draw = toss(batch)
    torch.manual_seed(3)
    again = toss(batch)
    assert torch.equal(accept, again[0]) and torch.equal(draw, again[1])
    assert len(torch.cat([accept.flatten(), draw]).unique()) == 200


def test_rows_that_are_not_numbers_are_seen():
    batch = random_batch(0, [2, 1])
    assert not batch.has_nan
    batch.target_logits[2, 4] = torch.nan
    assert dataclasses.replace(batch).has_nan
    batch.target_logits[2] = -torch.inf
    assert dataclasses.replace(batch).has_nan


def test_equal_counts_are_verified_without_copies():
    batch = random_batch(0, [2, 2, 2])
    assert batch.draft_rows.data_ptr() == batch.draft_probs.data_ptr()
    torch.testing.assert_close(
        batch.target_rows[:, :2].reshape(6, -1), batch.target_logits.softmax(-1), rtol=0, atol=0
    )
