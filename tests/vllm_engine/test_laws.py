"""Tokens that real engines emit, against the exact law of what decided them.

Every engine's seed is fixed. All p-values of lawful runs together must stay above FAMILY, shared
among TESTS of them (Bonferroni): a new version, or other kernels, draw other tokens and fail by
chance with probability 1e-4. A run that must fail its comparison has p below DETERMINISTIC.
"""

import json
from pathlib import Path

import pytest

from tests.vllm_engine.jobs import engine, request, texts_of
from tests.vllm_engine.laws import PROMPT, block_law, chain_law, p_values, target_law

FAMILY, TESTS = 1e-4, 100
DETERMINISTIC = 1e-12
TIMES = 2000
LOSSY = ("cactus:delta=1.0", "band:price=0.5", "typical", "mixture:alpha=0.5")
# what the servers offer: each by its number, and one more
OFFERED = ";".join(f"{number}={spec}" for number, spec in enumerate(LOSSY)) + ";far=band:price=0.3"
BLOCKS = ("speculative", "band:price=0.5", "cactus:delta=1.0")
HOT = {"temperature": 0.7, "top_p": 0.9, "top_k": 200}
NUMBERS = ("num_calls", "num_drafts", "num_draft_tokens", "num_accepted_tokens")
compared = []


def assert_lawful(texts, law, places=(2, 3, 4)):
    found = p_values(texts, law, places)
    compared.extend(found)
    assert len(compared) <= TESTS
    assert min(found) > FAMILY / TESTS, found


def assert_other(texts, law, places=(2, 3, 4)):
    assert min(p_values(texts, law, places)) < DETERMINISTIC


@pytest.fixture(scope="module")
def mixed(run):
    """Every policy, greedy requests and colder ones in the same batches of one engine."""
    requests = [request(PROMPT, TIMES, "speculative", max_tokens=5)]
    requests += [request(PROMPT, TIMES, str(number)) for number in range(len(LOSSY))]
    requests += [request(PROMPT, 50, temperature=0.0)]
    requests += [request(PROMPT, TIMES, "speculative", **HOT), request(PROMPT, TIMES, **HOT)]
    requests += [request(PROMPT, 50, max_tokens=1), request(PROMPT, TIMES, "far")]
    job = {"engine": engine(), "requests": requests}
    ended = run(job, CACTUS_POLICY="band:price=1", CACTUS_METER="1", CACTUS_POLICIES=OFFERED)
    return texts_of(ended.answer, job), ended


def test_the_lossless_policy_emits_the_target(mixed):
    assert_lawful(mixed[0][0], target_law(), (2, 3, 4, 5))


@pytest.mark.parametrize("number", range(len(LOSSY)), ids=LOSSY)
def test_a_lossy_policy_emits_its_own_law_and_not_the_target(mixed, number):
    texts = mixed[0][1 + number]
    assert_lawful(texts, chain_law(LOSSY[number]))
    assert_other(texts, target_law())


def test_greedy_requests_in_the_same_batches_take_the_largest_logit(mixed):
    texts = mixed[0][5]
    law = target_law()
    best = []
    for _ in range(4):
        best.append(int(law(tuple(best)).argmax()))
    assert texts == [best] * len(texts)


def test_temperature_and_truncation_reach_the_law(mixed):
    lossless, servers = mixed[0][6:8]
    assert_lawful(lossless, target_law(**HOT))
    assert_lawful(servers, chain_law("band:price=1", **HOT))
    assert_other(lossless, target_law())


def test_a_request_picks_another_price_of_the_servers_policy(mixed):
    assert_lawful(mixed[0][9], chain_law("band:price=0.3"))


def test_counters_are_beside_those_of_the_engine(mixed):
    counters = mixed[1].answer["counters"]
    totals = {name: sum(own.values()) for name, own in counters.items()}
    judged = totals["cactus:drafted_tokens_total"]
    greedy = totals["vllm:spec_decode_num_draft_tokens_total"] - judged
    assert judged > 10 * TIMES and 0 < greedy <= 50 * 9
    assert totals["cactus:drafted_tokens_per_pos_total"] == judged
    assert totals["cactus:measured_rows_total"] == totals["cactus:verified_rows_total"]
    spent = counters["cactus:emitted_divergence_nats_total"]
    assert spent["band:price=1.0"] > 0 and spent.get("speculative", 0) == 0
    assert counters["cactus:info"] == {"band:price=1.0": 1}
    text = mixed[1].text
    assert "Cactus metrics: " in text and "emitted_divergence_nats" in text
    assert text.count("cactus-theory decides drafts: ") == 1


@pytest.fixture(scope="module")
def blocks(run):
    requests = [request(PROMPT, TIMES, "speculative"), request(PROMPT, TIMES)]
    requests += [request(PROMPT, TIMES, "near")]
    job = {"engine": engine(), "requests": requests}
    asked = {
        "CACTUS_VERIFIER": "block",
        "CACTUS_METER": "off",
        "CACTUS_POLICIES": "near=cactus:delta=1",
    }
    ended = run(job, CACTUS_POLICY="band:price=0.5", **asked)
    return texts_of(ended.answer, job)


@pytest.mark.parametrize("number", range(len(BLOCKS)), ids=BLOCKS)
def test_blocks_emit_the_law_of_their_policy(blocks, number):
    spec = BLOCKS[number]
    assert_lawful(blocks[number], block_law(spec), (2, 3))
    if spec != "speculative":
        assert_other(blocks[number], target_law(), (2, 3))


@pytest.fixture(scope="module")
def deterministic(run):
    requests = [request(PROMPT, TIMES, "speculative"), request(PROMPT, TIMES)]
    requests += [request(PROMPT, 20, seeds=7)]
    job = {"engine": engine("greedy"), "requests": requests}
    return texts_of(run(job, CACTUS_POLICY="band:price=0.5").answer, job)


def test_deterministic_drafts_emit_the_law_of_their_policy(deterministic):
    assert_lawful(deterministic[0], target_law())
    assert_lawful(deterministic[1], chain_law("band:price=0.5", deterministic=True))
    assert_other(deterministic[1], target_law())


def test_a_seeded_request_emits_the_same_alone_and_in_a_batch(deterministic, run):
    job = {"engine": engine("greedy"), "requests": [request(PROMPT, 20, seeds=7)], "alone": True}
    alone = texts_of(run(job, CACTUS_POLICY="band:price=0.5").answer, job)
    assert alone == deterministic[2:]
    assert len({tuple(text) for text in alone[0]}) > 10


def test_processes_of_their_own_emit_the_law_and_count_it(run, tmp_path):
    """What /metrics shows once no request is left, and what each request's reading says."""
    file, policy = tmp_path / "readings", "mixture:alpha=0.5"
    (tmp_path / "metrics").mkdir()
    requests = [request(PROMPT, TIMES), request(PROMPT, 20, temperature=0.0)]
    job = {"engine": engine(processes=3), "requests": requests, "settled": TIMES}
    where = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "metrics"), "CACTUS_READINGS": str(file)}
    ended = run(job, processes=3, CACTUS_POLICY=policy, **where)
    texts, _ = texts_of(ended.answer, job)
    assert_lawful(texts, chain_law(policy))
    assert_other(texts, target_law())
    readings = [json.loads(line) for line in file.read_text().splitlines()]
    assert len({own["request"] for own in readings}) == len(readings) == TIMES + 20
    assert {own["finish_reason"] for own in readings} == {"length"}
    assert {Path(own["model"]).name for own in readings} == {"target"}
    greedy = [own for own in readings if own["policy"] is None]
    assert len(greedy) == 20 and not any(own["emitted_kl"] for own in greedy)
    counters = ended.answer["counters"]
    assert counters["cactus:measured_rows_total"] == counters["cactus:verified_rows_total"]
    # the counter adds up what the requests' meters have read, in another order
    spent = sum(own["emitted_kl"] for own in readings)
    assert counters["cactus:emitted_divergence_nats_total"] == {policy: pytest.approx(spent)}
    assert counters["cactus:answer_divergence_nats_sum"] == {policy: pytest.approx(spent)}
    assert counters["cactus:answer_divergence_nats_count"] == {policy: TIMES}
    assert {own["num_tokens"] for own in readings} == {4}
    sampled = [own for own in readings if own["policy"] is not None]
    judged = {name: sum(own[name] for own in sampled) for name in NUMBERS}
    emitted = judged["num_calls"] + judged["num_accepted_tokens"]
    undrafted = judged["num_calls"] - judged["num_drafts"]
    assert undrafted >= TIMES <= emitted / 4  # a prompt's own step is one of them
    for name, count in (
        ("drafted", judged["num_draft_tokens"]), ("accepted", judged["num_accepted_tokens"]),
        ("emitted", emitted), ("undrafted", undrafted),
    ):  # fmt: skip
        assert counters[f"cactus:{name}_tokens_total"] == {policy: count}
