"""A trace that a real engine writes, against what that engine has counted."""

import json
import math

import pytest

from cactus_theory.cli import main
from cactus_theory.traces import Trace, expect, replay
from cactus_theory.traces.expect import Expectation
from tests.vllm_engine.jobs import engine, request, with_ngrams
from tests.vllm_engine.laws import PROMPT, draft_row, target_row

POLICY, TIMES, TOKENS = "band:price=1.0", 100, 24
# standard errors of the coins: beyond, a count is not of these rows (2e-5 a test by chance)
SURE = 4.3
# total variation, twice: half an ulp of float16 log-probabilities below 8, and the logits of two
# libraries' kernels, of which the smallest that a cut keeps may be another
CLOSE = 2e-2
NUMBERS = ("num_calls", "num_drafts", "num_accepted_tokens", "num_draft_tokens")
LIKELY = 100  # tokens among which the first one of an answer is looked for
HOT = {"temperature": 0.7, "top_p": 0.9, "top_k": 200}


def traced(run, folder, sample="probabilistic", verifier="chain", **environment):
    """Return the traces that an engine has written, and its counters."""
    requests = [request(PROMPT, TIMES, max_tokens=TOKENS)]
    requests += [request(PROMPT, TIMES // 2, max_tokens=TOKENS, **HOT)]
    requests += [request(PROMPT, 3, temperature=0.0)]
    job = {"engine": engine(sample), "requests": requests}
    job["bad"] = [{"cactus_trace": str(folder / "other")}, {"cactus_trace_bytes": 1e12}]
    asked = {"CACTUS_POLICY": POLICY, "CACTUS_VERIFIER": verifier}
    ended = run(job, **asked, CACTUS_TRACE=str(folder / "traces"), **environment)
    traces = [Trace.open(path) for path in (folder / "traces").iterdir()]
    return sorted(traces, key=lambda own: -own.header.temperature), ended


@pytest.fixture(scope="module", params=["sampled", "deterministic", "block"])
def found(request, run, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    sample = "greedy" if request.param == "deterministic" else "probabilistic"
    verifier = "block" if request.param == "block" else "chain"
    return request.param, verifier, *traced(run, folder, sample, verifier)


def test_a_trace_replays_to_what_the_engine_has_counted(found):
    """All coins are integrated out of a replay: what is left are the engine's own."""
    _, verifier, traces, ended = found
    totals = {name: sum(own.values()) for name, own in ended.answer["counters"].items()}
    expected, variance, drafted, steps = 0.0, 0.0, 0, 0.0
    for trace in traces:
        seen = replay(trace, POLICY, verifier)
        expected += float(seen.accepted.sum())
        drafted += trace.manifest.total("target_rows") - len(trace)
        variance += coins(expect(trace, POLICY, verifier))
        steps += float(seen.cycles.sum())
    assert totals["cactus:drafted_tokens_total"] == drafted > TIMES * TOKENS / 2
    emitted = totals["cactus:emitted_tokens_total"]
    assert emitted - totals["cactus:accepted_tokens_total"] == steps
    assert emitted >= (TIMES + TIMES // 2) * TOKENS  # none is missing; behind the ends are more
    accepted = totals["cactus:accepted_tokens_total"]
    assert abs(accepted - expected) < SURE * math.sqrt(variance)
    lossless = sum(float(replay(own, "speculative", verifier).accepted.sum()) for own in traces)
    assert abs(accepted - lossless) > SURE * math.sqrt(variance)  # it is the policy that counts


def test_steps_without_a_draft_are_in_every_rate_and_answers_have_their_length(run, tmp_path):
    """N-grams seldom find anything: rates of the rounds with a draft are not the engine's."""
    requests = [request(2 * PROMPT, TIMES, max_tokens=TOKENS), request(PROMPT, 9, temperature=0.0)]
    job = {"engine": with_ngrams(), "requests": requests}
    file, asked = tmp_path / "readings", {"CACTUS_POLICY": POLICY, "CACTUS_VERIFIER": "block"}
    where = {"CACTUS_TRACE": str(tmp_path / "traces"), "CACTUS_READINGS": str(file)}
    ended = run(job, **asked, **where)
    (trace,) = [Trace.open(path) for path in (tmp_path / "traces").iterdir()]
    readings = [json.loads(line) for line in file.read_text().splitlines()]
    lengths = [len(text) for text in ended.answer["tokens"]]
    assert sorted(own["num_tokens"] for own in readings) == sorted(lengths)
    assert {own["finish_reason"] for own in readings} == {"length"}
    sampled = [own for own in readings if own["policy"] is not None]
    calls, drafts, accepted, drafted = (sum(own[name] for own in sampled) for name in NUMBERS)
    assert TIMES / 5 < drafts < calls / 2 and calls + accepted >= TIMES * TOKENS
    seen = replay(trace, POLICY, "block")
    assert (seen.cycles.sum(), seen.drafts.sum(), seen.drafted.sum()) == (calls, drafts, drafted)
    assert 1 < seen.tokens_per_call.value < 1 + drafted / calls
    counters = {name: sum(own.values()) for name, own in ended.answer["counters"].items()}
    assert counters["cactus:emitted_tokens_total"] == calls + accepted
    assert counters["cactus:undrafted_tokens_total"] == calls - drafts
    assert main(["promise", "--cap", "50", "--readings", str(file)]) == 0
    with pytest.raises(ValueError, match=f"name one of those in it: {trace.folder.name}"):
        Trace.open(tmp_path / "traces")


def coins(expectation: Expectation) -> float:
    """Return a bound on the variance of accepted tokens given the rows: of their sum, by round.

    Each round's count N of K has E[N²] = Σ (2 i − 1) P_i and E[N] = Σ P_i; Jensen bounds the
    squares of the latter, from below, by that of the mean.
    """
    mean = [share.value for share in expectation.accepted]
    second = sum((2 * place + 1) * share for place, share in enumerate(mean))
    return expectation.rounds * (second - sum(mean) ** 2)


def test_rows_are_those_of_both_models_as_they_were_cut(found):
    """The token before the first round is not in a trace: it is the one that its row follows."""
    kind, _, traces, _ = found
    assert [own.header.temperature for own in traces] == [1.0, 0.7]
    for trace, heat in zip(traces, ({}, HOT), strict=True):
        for name in ("top_p", "top_k"):
            assert trace.header.details[name] == heat.get(name, {"top_p": 1.0, "top_k": 0}[name])
        cycle = next(iter(trace))
        ids, rows = cycle.draft_token_ids.tolist(), cycle.target_probs
        first = target_row((), **heat).topk(LIKELY).indices.tolist()
        near = [float((rows[0] - target_row((token,), **heat)).abs().sum()) for token in first]
        path = [first[near.index(min(near))], *ids]
        assert cycle.position == 1 and len(ids) == 3 and rows[-1].amax() == 1
        for place in range(len(ids)):
            before = tuple(path[: place + 1])
            assert float((rows[place] - target_row(before, **heat)).abs().sum()) < CLOSE
            if kind == "deterministic":
                assert cycle.draft_probs is None
            else:  # which vLLM does not cut
                law = draft_row(before, **heat)
                assert float((cycle.draft_probs[place] - law).abs().sum()) < CLOSE


def test_greedy_requests_leave_nothing_and_no_request_has_a_say(found):
    *_, traces, ended = found
    assert [own.texts for own in traces] == [TIMES, TIMES // 2]
    assert all("must be one of cactus, cactus_cap" in line for line in ended.answer["refused"])
    assert not (traces[0].folder.parent.parent / "other").exists()
    assert ended.text.count("rounds are written to") == len(traces)
