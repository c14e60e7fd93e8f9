"""What is kept of single requests: caps through preemption, ends, aborts, and readings."""

import json
import os
import platform
import resource
import sys
from datetime import UTC, datetime

import pytest
import torch

import cactus_theory as ct
from cactus_theory.cli import main
from cactus_theory.policies.cactus import Cactus
from cactus_theory.vllm.accounts import reporter_of
from cactus_theory.vllm.batch import verify_flat
from tests.amounts import amount
from tests.vllm import fake
from tests.vllm.fake import end, requests, seeded
from tests.vllm.flat import CHAIN, random_batch

SCHEDULER = "vllm.v1.core.sched.scheduler"
CAP, LOOSE = 0.05, "band:price=0.1"
ROUNDING = 1e-6  # the meter adds float32 rows up in another order, some hundred of them


@pytest.fixture
def started(server, tmp_path):
    """Return a function that starts a fake server: its runner's class, its hook, its readings."""

    def start(readings=False, **environ):
        file = tmp_path / "readings"
        file.unlink(missing_ok=True)
        own = {"CACTUS_READINGS": str(file)} if readings else {"CACTUS_METER": "off"}
        found = server(LOOSE, **(own | environ))
        return found.runner, found.hook, file

    return start


def step(runner, seed, names, counts):
    """Let the requests of these names take a step, in this order."""
    batch = random_batch(seed, counts, generators=seeded(9, len(counts)))
    return fake.step(runner, batch, names)


def lines_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("verifier", ["chain", "block"])
def test_every_answer_keeps_its_cap_at_every_length(started, verifier):
    """Of three requests, in batches of other orders and sizes; r2 has a cap of its own."""
    kind, hook, _ = started(True, CACTUS_CAP=str(CAP), CACTUS_VERIFIER=verifier)
    asked = requests(None, "speculative", None)
    asked["r2"].sampling_params.extra_args = {"cactus_cap": CAP / 10}
    runner = kind(**asked)
    for seed in range(amount(12, 200)):
        absent = f"r{seed % 4}"  # preempted, as it were; at 3 there is none
        names = [name for name in ("r2", "r0", "r1") if name != absent][:: 1 - 2 * (seed % 2)]
        before = {name: hook.requests[name].followed.state for name in hook.requests}
        step(runner, seed, names, [2 + (seed + own) % 2 for own in range(len(names))])
        for name, own in hook.requests.items():
            if name == absent:
                assert own.followed.state is before[name]
            cap = CAP / 10 if name == "r2" else CAP
            spent = own.meter.sums()[1]
            assert spent <= cap * own.emitted + ROUNDING
            assert spent == pytest.approx(own.followed.state.spent, abs=ROUNDING)
    found = {name: own.meter.sums()[1] for name, own in hook.requests.items()}
    assert found["r0"] > 0.3 * CAP * hook.requests["r0"].emitted  # it is there to be spent
    assert found["r1"] == 0 < found["r2"]


def test_an_account_ends_with_its_request_or_its_abort(started):
    kind, hook, file = started(True, CACTUS_CAP=str(CAP))
    runner = kind(**requests(None, None))
    emitted = 0
    for seed in range(4):
        output = step(runner, seed, ["r0", "r1"], [3, 2])
        emitted += int((output[0] >= 0).sum())
    assert file.read_text() == ""
    end(runner, "r0", "unknown")
    assert set(hook.requests) == {"r1"} and "r0" not in runner.requests
    (found,) = lines_of(file)
    host, _, process = found["server"].rpartition(":")
    assert host == platform.node() and int(process) == os.getpid()
    assert found["request"] == "r0" and found["cap"] == CAP and found["num_tokens"] == emitted
    assert found["num_draft_tokens"] == 12 and found["num_accepted_tokens"] == emitted - 4
    assert found["num_drafts"] == found["num_calls"] == 4
    assert 0 < found["emitted_kl"] <= CAP * emitted
    runner.requests |= requests(None)  # the same id, asked anew
    step(runner, 9, ["r0", "r1"], [3, 2])
    again = hook.requests["r0"]
    assert again.emitted <= 4 and hook.requests["r1"].emitted > 4
    runner.requests = requests(None)  # and without that its end was told
    step(runner, 1, ["r0"], [3])
    assert hook.requests["r0"] is not again


def test_counters_have_all_that_the_readings_have_once_no_request_is_left(started):
    """Under a cap, whose rows other prices judge: they count as the request's own policy."""
    kind, hook, file = started(True, CACTUS_CAP=str(CAP))
    runner = kind(**requests(None, None, "speculative"))
    names = list(runner.requests)
    step(runner, 0, names, [3, 2, 1])
    hook.reporter.send_interval = 1e9  # as if a second never passed
    for seed in range(1, amount(6, 30)):
        step(runner, seed, names, [3, 2, 1])
    end(runner, "r0", "r2")
    end(runner, "r1")
    readings = lines_of(file)
    spent = {LOOSE: 0.0, "speculative": 0.0}
    for own in readings:
        spent[own["policy"]] += own["emitted_kl"]
    assert spent[LOOSE] > 0 == spent["speculative"]
    # a float32 row is summed in another order
    shown = {labels["policy"]: own for labels, own in fake.shown("cactus:emitted_divergence_nats")}
    assert shown == {LOOSE: pytest.approx(spent[LOOSE], abs=ROUNDING)}
    hook.reporter.send()  # an answer is entered once
    answers = {labels["policy"]: own for labels, own in fake.shown("cactus:answer_divergence_nats")}
    assert answers == {label: pytest.approx(own, abs=ROUNDING) for label, own in spent.items()}
    verified = fake.shown("cactus:verified_rows")
    assert verified == fake.shown("cactus:measured_rows") and len(verified) == 2
    names = {"drafted": "num_draft_tokens", "accepted": "num_accepted_tokens"}
    for name, of_reading in (names | {"emitted": "num_tokens"}).items():
        counted = sum(own for _, own in fake.shown(f"cactus:{name}_tokens"))
        assert counted == sum(own[of_reading] for own in readings)


def test_the_meter_reads_rows_under_a_cap_by_the_price_that_judged_them(started):
    shown = []
    for readings in (True, False):
        kind, *_ = started(readings, CACTUS_CAP=str(CAP), CACTUS_METER="1")
        runner = kind(**requests(None, None))
        for seed in range(6):
            step(runner, seed, ["r0", "r1"], [3, 3])
        end(runner, "r0", "r1")
        shown += fake.shown("cactus:emitted_divergence_nats")
    (labels, spent), metered = shown
    assert spent > 0 and metered == (labels, pytest.approx(spent, abs=ROUNDING))


def test_a_reading_says_when_what_and_why(started):
    """A request that vLLM decides (greedy), and one that never had a draft, have theirs, too."""
    kind, _, file = started(True)
    runner = kind(**requests(None, None, None))
    runner._sample(None, None)
    greedy = fake.Metadata(None, all_greedy=True, all_random=False)
    fake.step(runner, random_batch(0, [3]), ["r0"], greedy)  # the fake one emits no token
    mixed = fake.Metadata(torch.tensor([0.0, 1.0]), all_random=False)
    output = fake.step(runner, random_batch(0, [3, 3]), ["r0", "r1"], mixed)
    first = int((output[0] >= 0).sum())
    scheduler = sys.modules[SCHEDULER].Scheduler()
    for name, reason, length in (("r0", "length", 9), ("r1", "stop", 2)):
        scheduler._free_request(fake.Request(name, reason, length))
    runner._update_states(scheduler.schedule())
    assert scheduler.schedule().cactus_ends == {}  # said once
    end(runner, "r2")  # by a scheduler that is not vLLM's own
    found = {own["request"]: own for own in lines_of(file)}
    assert {name: own["finish_reason"] for name, own in found.items()} == {
        "r0": "length", "r1": "stop", "r2": None,
    }  # fmt: skip
    assert [found[name]["policy"] for name in ("r0", "r1", "r2")] == [None, LOOSE, LOOSE]
    assert (found["r0"]["num_draft_tokens"], found["r0"]["num_calls"]) == (6, 3)
    assert found["r0"]["num_accepted_tokens"] == first - 2  # of the step that emitted none, too
    assert [found[name]["num_tokens"] for name in ("r0", "r1", "r2")] == [9, 2, 1]
    assert found["r0"]["emitted_kl"] == 0 and {own["model"] for own in found.values()} == {"served"}
    ended = datetime.fromisoformat(found["r1"]["time"])
    assert abs((datetime.now(UTC) - ended).total_seconds()) < 60
    ((labels, spent),) = fake.shown("cactus:answer_divergence_nats")  # the greedy one costs nothing
    assert (labels["policy"], spent) == (LOOSE, found["r1"]["emitted_kl"])


def test_readings_go_to_the_log_in_one_line_each(server):
    found = server(LOOSE, CACTUS_READINGS="log")
    name = "evil\n\x1b[31m" + "x" * 10**5
    runner = found.runner(**{name: requests(None)["r0"]})
    step(runner, 0, [name], [3])
    end(runner, name)
    (line,) = [own for own in found.logged if own.startswith("Cactus reading: ")]
    assert line.isprintable() and len(line) < 1000


def test_by_default_nothing_is_kept_of_a_request_but_its_policy(started):
    kind, hook, _ = started()
    runner = kind(**requests(None))
    step(runner, 0, ["r0"], [3])
    own = hook.requests["r0"]
    assert own.followed.state is None and own.meter is None and hook.write is None
    end(runner, "r0")
    assert not hook.requests


def limited(size):
    """Let no file of this process grow beyond so many bytes, as a full disk does."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@pytest.mark.parametrize("before", ["", '{"request": "whole"}\n'])
def test_a_line_is_there_whole_or_not_at_all(tmp_path, monkeypatch, before):
    """A disk that fills up tears none, the next one is not glued to it; one warning a minute."""
    file, warned = tmp_path / "readings", []
    seconds = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: seconds[0])
    file.write_text(before)
    write = reporter_of(str(file), print, warned.append)
    try:
        limited(len(before) + 40)
        for seconds[0] in (5.0, 6.0, 64.9, 65.0, 66.0):
            write({"request": "r0" * 40})
    finally:
        limited(resource.RLIM_INFINITY)
    assert file.read_text() == before
    said = "cactus-theory: readings that were not written so far: {} (no space is left)"
    assert warned == [said.format(1), said.format(4)]
    write({"request": "r2"})
    assert file.read_text() == before + '{"request": "r2"}\n'


@pytest.mark.parametrize("capped", [False, True])
def test_promise_reads_what_an_engine_writes(started, capsys, capped):
    """Tokens behind the end are in no answer, and what they were charged is within its cap."""
    names = ["r0", "r1", "r2"]
    kind, _, file = started(True, **({"CACTUS_CAP": str(CAP)} if capped else {}))
    runner, scheduler = kind(**requests(None, None, None)), sys.modules[SCHEDULER].Scheduler()
    runner._sample(None, None)
    for seed in range(6):
        step(runner, seed, names, [3, 2, 3])
    for name in names:
        scheduler._free_request(fake.Request(name, "length", 7))
    runner._update_states(scheduler.schedule())
    found = lines_of(file)
    assert [own["num_tokens"] for own in found] == [7] * 3
    amount = ["--per-token", str(CAP)] if capped else ["--cap", "50"]
    assert main(["promise", *amount, "--tokens", "7", "--readings", str(file), "--json"]) == 0
    bound = json.loads(capsys.readouterr().out)["confidence_bound"]
    assert bound["mean"] == pytest.approx(sum(own["emitted_kl"] for own in found) / 3)


def test_a_cap_counts_steps_without_a_draft(started):
    """After t tokens an answer was charged at most t times the cap, whatever was drafted."""
    spent = []
    for undrafted in (0, 40):
        kind, hook, _ = started(CACTUS_CAP=str(CAP))
        runner = kind(**requests(None))
        for _ in range(undrafted):
            runner._sample(None, None)
        for seed in range(3):
            step(runner, seed, ["r0"], [3])
        own = hook.requests["r0"]
        spent.append(own.followed.state.spent)
        assert spent[-1] <= CAP * own.emitted and own.undrafted == undrafted
    assert spent[1] > spent[0] > 0


def test_a_policy_that_raises_in_a_step_costs_that_step_its_policies_and_no_more(
    server, monkeypatch
):
    own = server(LOOSE, CACTUS_POLICIES=fake.offered("cactus:delta=0.5"))
    runner = own.runner(**requests("cactus:delta=0.5", None))
    step(runner, 0, ["r0", "r1"], [3, 2])
    monkeypatch.setattr(Cactus, "gamma", lambda *given: 1 / 0)
    found = step(runner, 1, ["r0", "r1"], [3, 2])
    lossless = ct.policy("speculative")
    first = random_batch(1, [3, 2], generators=seeded(9, 2))
    verify_flat(CHAIN, [lossless], first)  # the numbers that the failed attempt took
    again = random_batch(1, [3, 2], generators=first.generators)
    assert torch.equal(found, verify_flat(CHAIN, [lossless], again)[0])
    assert any("ZeroDivisionError" in line and "without loss" in line for line in own.logged)
