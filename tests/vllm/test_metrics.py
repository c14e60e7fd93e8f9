"""Counters of a server, and what its meter reads."""

import pytest
import torch

import cactus_theory as ct
from cactus_theory.vllm import settings
from cactus_theory.vllm.batch import verify_flat
from cactus_theory.vllm.metrics import Reporter, Tally
from tests.amounts import amount
from tests.vllm import fake
from tests.vllm.flat import CHAIN, emitted, random_batch

BAND = "band:price=1.0"


def tally(meter="1", policy=BAND, **environment):
    read = settings.read({"CACTUS_POLICY": policy, "CACTUS_METER": meter} | environment)
    return Tally(read)


def serve(own, batches, policies=None, width=3):
    """Verify batches and return, row by row, (policy, charged rows of q and p, emitted)."""
    charged = []
    for seed in range(batches):
        counts = [3, 0, 2, 3] if seed % 2 else [3, 3]
        batch = random_batch(
            seed, counts, greedy=[False, False, seed % 4 == 1, False][: len(counts)]
        )
        rules = policies or [own.settings.policy]
        chosen = [rules[row % len(rules)] for row in range(len(counts))]
        output, seen = verify_flat(own.settings.verifier, chosen, batch)
        own.add(batch.draft, seen, [chosen[row] for row in batch.drafted])
        for place, row in enumerate(batch.drafted):
            if not batch.greedy[row]:
                tokens, count = emitted(output)[row], batch.counts[row]
                rows = slice(batch.starts[place], batch.starts[place] + min(len(tokens), count))
                q = batch.target_logits[rows].softmax(-1)
                charged.append((chosen[row], q, batch.draft_probs[rows], tokens, count))
    return charged


@pytest.mark.parametrize("verifier", ["chain", "block"])
def test_counts_and_divergence_are_those_of_the_rows_up_to_each_refusal(verifier):
    own = tally(CACTUS_VERIFIER=verifier, policy="cactus:delta=0.5")
    torch.manual_seed(0)
    charged = serve(own, amount(12, 60))
    total = own.totals("cactus:delta=0.5")
    assert total["verified_rows"] == sum(len(q) for _, q, *_ in charged)
    assert total["drafted_tokens"] == sum(count for *_, count in charged)
    assert total["emitted_tokens"] == sum(len(tokens) for *_, tokens, _ in charged)
    assert total["accepted_tokens"] == total["emitted_tokens"] - len(charged)
    assert total["measured_rows"] == total["verified_rows"]
    # a draft of two tokens is no refusal at the third place
    expected = [[0, 0] for _ in range(3)]
    for *_, tokens, count in charged:
        for place in range(count):
            expected[place][0] += 1
            expected[place][1] += place < len(tokens) - 1
    assert [list(both) for both in own.counts["cactus:delta=0.5"].positions] == expected
    assert expected[0][0] > expected[2][0] > expected[2][1] > 0
    kl = ct.divergence("kl")
    spent = sum(
        float(kl.value(ct.emitted_law(rule, one, other), one.double()).sum())
        for rule, q, p, *_ in charged
        for one, other in zip(q, p, strict=True)
    )
    assert total["emitted_divergence_nats"] == pytest.approx(spent, rel=1e-5)  # rows are float32


def test_a_sampled_meter_reads_what_the_whole_one_does():
    every, some = tally("1"), tally("5")
    for own in (every, some):
        torch.manual_seed(1)
        serve(own, amount(50, 300))
    whole, part = every.totals(BAND), some.totals(BAND)
    assert whole["verified_rows"] == part["verified_rows"]
    # the number is binomial; 5 of its standard deviations: false alarm 1e-6, seeds are fixed
    mean, deviation = whole["verified_rows"] / 5, (whole["verified_rows"] * 0.16) ** 0.5
    assert abs(part["measured_rows"] - mean) < 5 * deviation
    ratio = part["emitted_divergence_nats"] / whole["emitted_divergence_nats"]
    assert 0.5 < ratio < 1.5  # about 4 standard errors of some 80 rows


def test_every_row_is_measured_with_the_same_chance():
    gaps = torch.tensor([own._gap() for own in [tally("4")] for _ in range(10_000)]).double()
    # geometric; 5 standard errors: false alarm 1e-6
    assert abs(float(gaps.mean()) - 3) < 5 * 12**0.5 / 100
    assert abs(float((gaps == 0).double().mean()) - 0.25) < 5 * 0.433 / 100


def test_no_request_is_always_the_one_that_is_measured():
    """Two requests of one drafted token a step: every second row would be the same one's."""
    own = tally("2")
    rules = [ct.policy("mixture:alpha=1"), ct.policy("lenience:lenience=0.1")]
    for seed in range(20):
        batch = random_batch(seed, [1, 1])
        own.add(batch.draft, verify_flat(CHAIN, rules, batch)[1], rules)
    assert all(0 < own.totals(rule.spec)["measured_rows"] < 20 for rule in rules)


def test_a_meter_that_is_off_measures_nothing():
    own = tally("off")
    serve(own, 5)
    total = own.totals(BAND)
    assert total["verified_rows"] > 0 and total["measured_rows"] == 0
    assert not own.counts[BAND].meter.waiting and total["emitted_divergence_nats"] == 0


def test_each_policy_has_a_label_of_its_own():
    own, specs = tally(), [BAND, "band:price=4.0", "speculative"]
    serve(own, 9, [ct.policy(spec) for spec in specs])
    assert set(own.counts) == set(specs)
    for spec in specs:
        total = own.totals(spec)
        assert total["measured_rows"] == total["verified_rows"] > 0
    own.counts[BAND].tokens["emitted_tokens"] = 12_345_678
    assert f"{BAND}: " in own.line() and "emitted_tokens 12345678, " in own.line()


def test_prometheus_and_the_log_follow_the_totals(monkeypatch):
    fake.install(monkeypatch)
    own, logged = tally(), []
    reporter = Reporter(own, logged.append, 0.0, model="served", engine=3, send=0.0)
    serve(own, 10)
    reporter.step()
    serve(own, 10)
    own.add_undrafted(own.settings.policy)
    reporter.step()
    labels = {"policy": BAND, "model_name": "served", "engine": "3"}
    for name, value in own.totals(BAND).items():
        unit = {"divergence": "kl"} if "divergence" in name else {}
        assert fake.shown(f"cactus:{name}") == [(labels | unit, pytest.approx(value))]
    for part, name in enumerate(("drafted_tokens_per_pos", "accepted_tokens_per_pos")):
        assert fake.shown(f"cactus:{name}") == [
            (labels | {"position": str(place)}, both[part])
            for place, both in enumerate(own.counts[BAND].positions)
            if both[part]
        ]
    assert len(logged) == 2 and "undrafted_tokens 1, " in logged[1]
    assert logged[0].startswith(f"Cactus metrics: {BAND}: verified_rows ")
    reporter.interval = reporter.send_interval = 1e9
    ((_, before),) = fake.shown("cactus:measured_rows")
    serve(own, 10)
    reporter.step()  # counts are current, the meter waits
    verified = own.counts[BAND].tokens["verified_rows"]
    assert fake.shown("cactus:verified_rows") == [(labels, verified)]
    assert fake.shown("cactus:measured_rows") == [(labels, before)] and len(logged) == 2
    reporter.send()
    assert fake.shown("cactus:measured_rows") == [(labels, own.totals(BAND)["measured_rows"])]


def test_nothing_is_counted_where_no_policy_decides():
    own = tally()
    batch = random_batch(0, [2, 2], greedy=[True, True])
    policies = [own.settings.policy] * 2
    own.add(batch.draft, verify_flat(CHAIN, policies, batch)[1], policies)
    assert BAND not in own.counts
