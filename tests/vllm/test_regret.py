"""Greedy requests of a policy that is charged in regret, alone and beside sampled ones."""

import dataclasses
import json
import math

import pytest
import torch

import cactus_theory as ct
from cactus_theory.policies.regret import Regret
from cactus_theory.vllm import settings
from cactus_theory.vllm.batch import verify_flat
from tests.amounts import amount
from tests.vllm import fake
from tests.vllm.fake import end, requests, seeded, step
from tests.vllm.flat import CHAIN, alone, emitted, greedy, random_batch, random_coins

PRICE = "regret:price=0.7"
ALL_GREEDY = fake.Metadata(None, all_greedy=True, all_random=False)
COUNTS = ([3, 3, 3], [2, 0, 3, 1], [1], [4, 0, 4, 0])


def asked(*heats, **more):
    """Return requests of these temperatures, by their names."""
    found = requests(*[more.get(f"r{place}") for place in range(len(heats))])
    for own, heat in zip(found.values(), heats, strict=True):
        own.sampling_params.temperature = heat
    return found


def warned(server):
    """Return what was logged, but lines of totals, which a slow machine has time for."""
    return [line for line in server.logged if line.startswith("cactus-theory: ")]


def costs_of(logits, ids):
    """Return the regret of drafted tokens, from logits and by hand."""
    logits = logits.double()
    return [float(row.max() - row[token]) for row, token in zip(logits, ids, strict=False)]


def by_hand(batch, row, price, verifier):
    """Return what a greedy request emits, and the regret of that."""
    start, count = sum(batch.counts[:row]), batch.counts[row]
    logits = batch.target_logits[start : start + count]
    ids = batch.ids[start : start + count].tolist()
    ids = ids[: ids.index(-1)] if -1 in ids else ids
    costs = costs_of(logits, ids)
    if verifier == "chain":
        stop = next((at for at, cost in enumerate(costs) if price * cost > 1), len(costs))
    else:
        worth = [stop - price * sum(costs[:stop]) for stop in range(len(costs) + 1)]
        stop = max(stop for stop, value in enumerate(worth) if value >= max(worth) - 1e-6)
    last = int(batch.bonus[row]) if stop == count else int(logits[stop].argmax())
    return [*ids[:stop], last], sum(costs[:stop])


def near(seed, counts, **more):
    """Return a batch whose drafted tokens are likely: every other one is the likeliest."""
    batch = random_batch(seed, counts, **more)
    order = batch.target_logits.argsort(-1, descending=True)
    place = torch.randint(4, batch.ids.shape, generator=torch.Generator().manual_seed(seed))
    ids = order.gather(-1, place.clamp(min=1)[:, None] - 1)[:, 0].int()
    return dataclasses.replace(batch, ids=ids)


@pytest.mark.parametrize("verifier", ["chain", "block"])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_greedy_requests_emit_what_loops_by_hand_do(server, verifier, counts):
    own = server(PRICE, CACTUS_VERIFIER=verifier, CACTUS_METER="1")
    runner, spent, relaxed = own.runner(**asked(*[0.0] * len(counts))), 0.0, 0
    for seed in range(amount(8, 60)):
        batch = near(seed, counts)
        if seed % 3 == 2:  # the drafter has stopped early
            batch.ids[seed % len(batch.ids)] = -1
        due = [by_hand(batch, row, 0.7, verifier) for row in range(len(counts))]
        assert emitted(step(runner, batch, None, ALL_GREEDY)) == [text for text, _ in due]
        spent += sum(cost for _, cost in due)
        strict = [greedy(*given) for given in _rows(batch)]
        relaxed += sum(len(text) for text, _ in due) - sum(map(len, strict))
    assert relaxed > 0 < spent
    totals = own.hook.tally.totals(PRICE)
    assert totals["emitted_divergence_nats"] == pytest.approx(spent, abs=1e-4)
    assert warned(own) == []


def _rows(batch):
    ids = batch.ids.tolist()
    for row, count in enumerate(batch.counts):
        start = sum(batch.counts[:row])
        at = slice(start, start + count)
        yield batch.target_logits[at], ids[at], int(batch.bonus[row])


@pytest.mark.parametrize("verifier", ["chain", "block"])
def test_a_price_of_infinity_is_strict_where_logits_tie_or_rounding_ties_them(server, verifier):
    own = server("regret:price=inf", CACTUS_VERIFIER=verifier)
    runner = own.runner(**asked(0.0, 0.0))
    refused = 0
    for seed in range(amount(10, 60)):
        batch = near(seed, [3, 2], holes=0.5)
        logits = batch.target_logits
        most, best = logits.max(-1, keepdim=True)
        if seed % 2:  # equal ones, as of a model in bfloat16
            logits = logits.bfloat16().float()
        else:  # the one before is less by an ulp, whose softmax is the same
            logits = logits - most  # so that the ulp is below float32's eps
            logits.scatter_(-1, best, 1e-9).scatter_(-1, (best - 1).clamp(min=0), 0.9e-9)
        batch = dataclasses.replace(batch, target_logits=logits)
        due = [greedy(*given) for given in _rows(batch)]
        assert emitted(step(runner, batch, None, ALL_GREEDY)) == due
        refused += any(len(text) < count + 1 for text, count in zip(due, (3, 2), strict=True))
    assert refused


@pytest.mark.parametrize("verifier", ["chain", "block"])
@pytest.mark.parametrize("lost", [False, True])
def test_in_mixed_batches_greedy_requests_are_relaxed_and_others_lossless(server, verifier, lost):
    """Their rows are not used: vLLM's drafter gives greedy requests the argmax of sampled ones."""
    own = server(PRICE, CACTUS_VERIFIER=verifier, CACTUS_METER="1")
    runner, heats = own.runner(**asked(0.0, 1.0, 0.0, 0.7)), torch.tensor([0.0, 1.0, 0.0, 0.7])
    counts, verify = [3, 2, 2, 3], getattr(ct, f"verify_{verifier}")
    for seed in range(amount(8, 60)):
        batch, coins = near(seed, counts, generators=seeded(seed, 4)), {}
        for row, source in seeded(seed, 4).items():
            numbers = torch.rand(counts[row] + 1, generator=source, dtype=torch.float64)
            coins[row] = numbers[:-1], numbers[-1:]
        given = fake.call(
            batch, fake.Metadata(heats, all_random=False, generators=batch.generators)
        )
        if lost:
            given[4], rows = None, batch.draft_probs.split(counts)
            pad = torch.nn.utils.rnn.pad_sequence
            runner._draft_probs = pad([rows[1], rows[3]], batch_first=True)
            runner._draft_prob_req_ids = ["r1", "r3"]
        found = emitted(runner._sample(None, given))
        for row in (0, 2):
            assert found[row] == by_hand(batch, row, 0.7, verifier)[0]
        for row in (1, 3):
            lossless = alone(verify, ct.policy("speculative"), batch, row, coins[row])
            assert found[row] == lossless
    drafted = {
        label: own.hook.tally.totals(label)["drafted_tokens"] for label in (PRICE, "speculative")
    }
    assert drafted == {PRICE: 5 * amount(8, 60), "speculative": 5 * amount(8, 60)}
    said = f"{PRICE} is for temperature 0; requests above it are judged without loss"
    assert [line for line in warned(own) if "lost" not in line] == [f"cactus-theory: {said}"]


def test_other_policies_of_a_server_are_strict_at_temperature_0_and_say_so_once(server):
    offered = {"CACTUS_POLICIES": fake.offered("mixture:alpha=1", PRICE)}
    own = server("band:price=0.5", **offered)
    by_name = {"r1": PRICE, "r2": "speculative", "r3": None}
    runner = own.runner(**asked(0.0, 0.0, 0.0, 0.0, **by_name))
    assert step(runner, near(0, [2]), ["r0"], ALL_GREEDY).unique().tolist() == [fake.STOCK]
    for seed in range(9):
        batch = near(seed, [3, 3, 3, 3])
        found = emitted(step(runner, batch, None, ALL_GREEDY))
        strict = [greedy(*given) for given in _rows(batch)]
        strict[1] = by_hand(batch, 1, 0.7, "chain")[0]
        assert found == strict
    assert set(own.hook.tally.counts) == {PRICE}
    (line,) = warned(own)
    assert line == (
        "cactus-theory: band:price=0.5 relaxes nothing at temperature 0, where vLLM decides; "
        "regret:price=20 does, by 20 tokens a nat of regret"
    )


@pytest.mark.parametrize("verifier", ["chain", "block"])
@pytest.mark.parametrize("policy", ["regret:price=0.1", "regret:delta=0.3"])
def test_a_cap_is_one_of_regret_at_every_length(server, tmp_path, verifier, policy):
    file = tmp_path / "readings"
    more = {"CACTUS_CAP": "0.2", "CACTUS_READINGS": str(file), "CACTUS_VERIFIER": verifier}
    own = server(policy, **more)
    runner, spent = own.runner(**asked(0.0, 0.0, 1.0)), [0.0, 0.0]
    heats = fake.Metadata(torch.tensor([0.0, 0.0, 1.0]), all_random=False)
    for seed in range(amount(12, 80)):
        batch = near(seed, [3, 2, 3])
        found = emitted(step(runner, batch, None, heats))
        for row in (0, 1):
            start = 3 * row
            drafted = batch.ids[start : start + len(found[row][:-1])].tolist()
            spent[row] += sum(costs_of(batch.target_logits[start:], drafted))
            one = own.hook.requests[f"r{row}"]
            assert one.meter.sums()[1] <= 0.2 * one.emitted + 1e-6
    end(runner, "r0", "r1", "r2")
    readings = {one["request"]: one for one in map(json.loads, file.read_text().splitlines())}
    assert [readings[name]["policy"] for name in ("r0", "r1", "r2")] == [
        ct.policy(policy).spec, ct.policy(policy).spec, "speculative",
    ]  # fmt: skip
    assert readings["r2"]["emitted_kl"] == 0 and "emitted_kl" not in readings["r0"]
    charged = [readings[name]["emitted_regret"] for name in ("r0", "r1")]
    tokens = [readings[name]["num_tokens"] for name in ("r0", "r1")]
    assert all(0.05 * own < most for own, most in zip(tokens, charged, strict=True))
    if policy.startswith("regret:price"):  # no coin: what is charged is what was emitted
        assert charged == pytest.approx(spent, abs=1e-4)
    shown = {labels["policy"]: labels["divergence"] for labels, _ in
             fake.shown("cactus:answer_divergence_nats")}  # fmt: skip
    assert shown == {ct.policy(policy).spec: "regret", "speculative": "kl"}
    ((labels, value),) = fake.shown("cactus:emitted_divergence_nats")
    assert labels["divergence"] == "regret" and value == pytest.approx(sum(charged))
    assert own.hook.tally.line().count("divergence regret") == 1


def test_a_large_vocabulary_and_masked_tokens(server):
    own = server("regret:price=0")
    runner = own.runner(**asked(0.0))
    batch = random_batch(0, [3], vocab=151_936)
    batch.ids[0] = int(batch.target_logits[0].argsort()[-1000])
    batch.target_logits[1, batch.ids[1]] = -math.inf
    batch.target_logits[1] *= 100  # where nearly all probabilities are 0 in float32
    due = [int(batch.ids[0]), int(batch.target_logits[1].argmax())]
    assert emitted(step(runner, batch, None, ALL_GREEDY)) == [due]
    batch.target_logits[2] = -math.inf
    assert step(runner, batch, None, ALL_GREEDY).unique().tolist() == [fake.STOCK]


def test_a_policy_that_raises_leaves_greedy_requests_strict(server, monkeypatch):
    own = server("speculative", CACTUS_POLICIES=fake.offered(PRICE))
    runner = own.runner(**asked(0.0, r0=PRICE))
    monkeypatch.setattr(Regret, "row", lambda *given: 1 / 0)
    for seed in range(20):
        batch = near(seed, [3])
        assert emitted(step(runner, batch, None, ALL_GREEDY)) == [greedy(*next(_rows(batch)))]
    assert any("ZeroDivisionError" in line for line in own.logged)


def test_parts_of_a_batch_emit_what_they_do_together():
    rules = [
        ct.policy(spec)
        for spec in ("band:price=1", "cactus:delta=0.5", "speculative", "band:price=2")
    ]
    for seed in range(20):
        batch = random_batch(seed, [2, 3, 0, 1], greedy=[False, True, False, False],
                             unknown=frozenset({3}), generators=seeded(seed, 4))  # fmt: skip
        together = verify_flat(CHAIN, rules, batch, random_coins(seed, batch))[0]
        assert batch.parts([False] * 4) == [([0, 1, 2, 3], batch)]
        (rows, part), (_, other) = batch.parts([True, False, False, True])
        assert rows == [1, 2] and part.greedy == [True, False] and not part.unknown
        assert part.generators == {place: batch.generators[row] for place, row in enumerate(rows)}
        found = verify_flat(CHAIN, [rules[1], rules[2]], part)[0]
        assert torch.equal(found, together[rows])  # no coin: one is greedy, one without a draft
        assert (other.greedy, other.draft_probs, other.relaxed) == (None, None, True)
        assert torch.equal(other.ids, batch.ids[[0, 1, 5]]) and not other.unknown


def test_settings_take_regret_and_its_cap():
    found = settings.read({"CACTUS_POLICY": "regret:price=20", "CACTUS_CAP": "0.1"})
    assert found.policy == ct.policy("regret", price=20.0) and found.cap == 0.1
    with pytest.raises(ValueError, match="CACTUS_POLICY"):
        settings.read({"CACTUS_POLICY": "regret:price=20,delta=1"})
