"""What stops a server, what does not, and what is left alone: in real engines."""

import json
import shutil

import pytest

import cactus_theory as ct
from tests.vllm_engine.jobs import engine, request, texts_of
from tests.vllm_engine.laws import PAIR, PROMPT

POLICY = "band:price=2.0"


def job(**speculative):
    return {"engine": engine(**speculative), "requests": [request(PROMPT, 1)]}


WRONG = {"CACTUS_POLICY": "bnad:price=2"}
# what bypasses the hook: arguments of the engine, whether the fault is left in
STARTS = {
    "method": (engine(rejection_sample_method="block"), False),
    "fault": (engine(), True),
}
BAD = ["bnad", {"price": 1}, 3, "x.py:f", [{}], "typical", "band:price=4", "g" * 10**6]
CAP, LOWER, CAPPED, TOKENS, BLOCKS = 0.05, 0.01, 12, 40, 16


def test_a_bad_setting_stops_with_one_line_of_the_valid_ones(run):
    ended = run(job(), wanted=False, **WRONG)
    assert ended.answer is None and ended.code != 0 and "Traceback" not in ended.text
    last_line = ended.text.strip().splitlines()[-1]
    assert last_line.startswith("cactus-theory: ")
    for word in ("CACTUS_POLICY", "bnad", *ct.list_policies()):
        assert word in last_line


def test_a_bad_setting_stops_an_engine_in_a_process_of_its_own(run):
    ended = run(job(processes=3) | {"late": WRONG}, processes=3, wanted=False)
    assert ended.answer is None and ended.code != 0
    (line,) = [own for own in ended.text.splitlines() if "CACTUS_POLICY: policy: must be" in own]
    assert "band" in line and "bnad" in line


@pytest.fixture(scope="module")
def untouched(run):
    """The same requests without our plugin and with it, but no policy asked for."""
    sampled = {"engine": engine(), "requests": [request(PROMPT, 200), request(PROMPT, 9, seeds=3)]}
    without = run(sampled, VLLM_PLUGINS="tests_repair")
    return without, run(sampled), sampled


def test_without_a_setting_the_tokens_are_those_without_the_package(untouched):
    without, installed, sampled = untouched
    assert installed.answer["tokens"] == without.answer["tokens"]
    assert len({tuple(text) for text in without.answer["tokens"]}) > 50
    assert not any(name.startswith("cactus:") for name in installed.answer["counters"])
    assert texts_of(installed.answer, sampled)[1] != texts_of(installed.answer, sampled)[0][:9]


@pytest.fixture(scope="module")
def asked_badly(run):
    starts = [{"engine": own, "fault": fault} for own, fault in STARTS.values()]
    own = job() | {"starts": starts, "bad": [{"cactus": given} for given in BAD]}
    own["requests"] = [request(PROMPT, 20)]
    return run(own, CACTUS_POLICY=POLICY, CACTUS_VERIFIER="block").answer


def test_servers_that_would_bypass_the_hook_are_refused(asked_badly):
    said = dict(zip(STARTS, asked_badly["stopped"], strict=True))
    assert "rejection_sample_method must be standard" in said["method"]
    assert "55005" in said["fault"]
    assert all(line.startswith("cactus-theory: ") for line in said.values())


def test_bad_requests_are_refused_on_submission_and_the_engine_lives(asked_badly):
    refused = asked_badly["refused"]
    assert len(refused) == len(BAD)
    assert all(line.startswith("VLLMValidationError: extra_args['cactus']") for line in refused)
    assert len(asked_badly["tokens"]) == 20


@pytest.fixture(scope="module")
def capped(run, tmp_path_factory):
    """Requests under a cap on so few blocks that some are preempted."""
    file = tmp_path_factory.mktemp("readings") / "readings.jsonl"
    long = {"max_tokens": TOKENS, "temperature": 1.0}
    requests = [request(PROMPT, CAPPED, **long)]
    requests += [request(PROMPT, CAPPED, **long, extra_args={"cactus_cap": LOWER})]
    job = {"engine": engine(), "requests": requests}
    job["engine"] |= {"num_gpu_blocks_override": BLOCKS, "block_size": 32}
    asked = {"CACTUS_CAP": str(CAP), "CACTUS_READINGS": str(file)}
    ended = run(job, CACTUS_POLICY="band:price=0.1", **asked)
    return ended, [json.loads(line) for line in file.read_text().splitlines()]


def test_every_answer_keeps_its_cap_through_preemption(capped):
    ended, readings = capped
    assert ended.answer["preemptions"] > 0
    assert len(ended.answer["tokens"]) == len({own["request"] for own in readings}) == 2 * CAPPED
    for cap in (CAP, LOWER):
        own = [reading for reading in readings if reading["cap"] == cap]
        assert len(own) == CAPPED
        shares = [one["emitted_kl"] / (cap * one["num_tokens"]) for one in own]
        assert max(shares) <= 1 and sum(shares) / CAPPED > 0.5  # a cap is there to be spent
        assert all(0 < one["num_accepted_tokens"] <= one["num_draft_tokens"] for one in own)
        assert {one["num_tokens"] for one in own} == {TOKENS}
        # beyond the limit: what the last two rounds have emitted after it
        counted = [one["num_calls"] + one["num_accepted_tokens"] for one in own]
        assert min(counted) >= TOKENS and max(counted) <= TOKENS + 2 * 4


def test_a_head_alone_is_served_with_the_target_that_it_names(run, tmp_path):
    """As train-head writes it: the target's full path, and how many tokens it drafts."""
    head = shutil.copytree(PAIR / "head", tmp_path / "head")
    text = (head / "config.json").read_text()
    assert '"simulations/pair/target"' in text
    named = text.replace("simulations/pair/target", str(PAIR / "target"))
    (head / "config.json").write_text(named)
    own = engine() | {
        "model": str(head),
        "speculative_config": {"draft_sample_method": "probabilistic"},
    }
    asked = {"engine": own, "requests": [request(PROMPT, 20, max_tokens=12)]}
    ended = run(asked, CACTUS_POLICY=POLICY, CACTUS_METER="1")
    assert [len(text) for text in ended.answer["tokens"]] == [12] * 20
    drafted, accepted = (
        ended.answer["counters"][f"cactus:{name}_tokens_total"][POLICY]
        for name in ("drafted", "accepted")
    )
    assert 0 < accepted < drafted
    places = ended.answer["counters"]["cactus:drafted_tokens_per_pos_total"][POLICY]
    assert places == drafted > 20 * 4  # a head of four tokens a draft
