"""What CACTUS_TRACE writes: the rounds that were verified, within its bytes, and nothing else."""

from pathlib import Path

import pytest
import torch

from cactus_theory.decoding import Cuts
from cactus_theory.traces import Cycle, Trace, expect, replay, save_trace
from cactus_theory.traces._folder import Folder
from cactus_theory.traces.faults import visible_faults
from cactus_theory.tuning import Costs, tune
from cactus_theory.tuning.report import notes
from cactus_theory.verify.contract import find_verifier
from cactus_theory.vllm import recorder
from tests.vllm import fake
from tests.vllm.fake import end, requests, seeded, step
from tests.vllm.flat import VOCAB, random_batch

BAND = "band:price=0.5"
ASKED = [f"band:price={1 + number}" for number in range(2 * recorder.MOST_SETTINGS)]
# half an ulp of a log-probability below 16 in float16, twice for the division by the row's sum
ROUNDING = 2 * 2.0**-8


@pytest.fixture
def started(server):
    """Return a function that starts a fake server: its runner's class, hook and warnings."""

    def start(folder, **environ):
        where = {} if folder is None else {"CACTUS_TRACE": str(folder)}
        found = server(BAND, CACTUS_POLICIES=fake.offered(*ASKED), **where, **environ)
        return found.runner, found.hook, found.logged

    return start


def traces_in(folder):
    return [Trace.open(path) for path in sorted(Path(folder).iterdir())]


def size_of(folder):
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("verifier", ["chain", "block"])
def test_a_trace_holds_every_round_of_every_request(
    started, tmp_path, deterministic, verifier, monkeypatch
):
    monkeypatch.setattr("cactus_theory.traces.estimate.FEWEST_TEXTS", 2)  # as many as requests
    kind, _, _ = started(tmp_path / "t", CACTUS_VERIFIER=verifier)
    runner, position = kind(**requests(None, None)), {"r0": 1, "r1": 1}
    rounds = {"r0": [], "r1": []}
    runner._sample(None, None)  # their prompts' own
    for seed, counts in enumerate([(3, 2), (1, 3), (0, 3), (2, 2)]):
        batch = random_batch(seed, counts, deterministic, generators=seeded(seed, 2))
        found, start = step(runner, batch), 0
        for name, count, row in zip(rounds, counts, found.tolist(), strict=True):
            own = slice(start, start + count)
            probs = None if deterministic else batch.draft_probs[own]
            q = batch.target_logits[own].softmax(-1)
            bonus = int(batch.bonus[len(rounds[name]) and 0 if name == "r0" else 1])
            if count:
                rounds[name].append((position[name], batch.ids[own].tolist(), q, probs, bonus))
            position[name] += sum(token >= 0 for token in row)
            start += count
    assert not list((tmp_path / "t").rglob("*.safetensors"))  # nothing of a request that goes on
    end(runner, "r1")
    end(runner, "r0")
    (trace,) = traces_in(tmp_path / "t")
    assert trace.texts == 2 and len(trace) == 7 and trace.undrafted == [1, 2]
    for text, name in enumerate(["r1", "r0"]):
        cycles = [cycle for cycle in trace if cycle.text == text]
        for cycle, (place, ids, q, p, bonus) in zip(cycles, rounds[name], strict=True):
            assert (cycle.position, cycle.draft_token_ids.tolist()) == (place, ids)
            torch.testing.assert_close(cycle.target_probs[:-1], q.double(), rtol=ROUNDING, atol=0)
            assert int(cycle.target_probs[-1].argmax()) == bonus
            assert float(cycle.target_probs[-1].amax()) == 1
            assert (cycle.draft_probs is None) == deterministic
            if p is not None:
                torch.testing.assert_close(cycle.draft_probs, p.double(), rtol=ROUNDING, atol=0)
    header = trace.header
    assert (header.vocab_size, header.num_draft_tokens, header.draft) == (VOCAB, 3, "draft")
    assert (header.details["policy"], header.details["verifier"]) == ("band:price=0.5", verifier)
    assert replay(trace, BAND, verifier).tokens_per_call.value > 1
    if deterministic:
        with pytest.raises(ValueError, match="every draft in it was deterministic"):
            trace.rows()
    assert expect(trace, BAND, verifier).rounds == 7
    faults = {fault.name for fault in visible_faults(trace, find_verifier(verifier))}
    assert "rows-late" not in faults and "rows-early" in faults  # no row follows the last token
    *_, said = notes(tune(trace, Costs.ratios(0.1), 0.05, policies=["mixture:alpha"], widths=[2]))
    assert "7 of 10 target calls had a draft" in said


def test_steps_without_a_draft_are_in_every_rate(started, tmp_path, monkeypatch):
    """As with n-grams, which seldom find anything: a trace is replayed as what the engine did."""
    monkeypatch.setattr("cactus_theory.traces.estimate.FEWEST_TEXTS", 4)  # as many as requests
    kind, hook, logged = started(tmp_path / "t", CACTUS_METER="1")
    names = ["r0", "r1", "r2", "r3"]
    runner = kind(**requests(*[None] * 4))
    runner.input_batch = fake.InputBatch(names)
    runner.discard_request_mask.np = [False, True, False, False]  # r1's prompt goes on
    runner._sample(None, None)
    runner.discard_request_mask.np = [False] * 4
    calls, drafts, tokens = 3, 0, 3
    for seed in range(20):
        counts = (0, 0, 0, 0) if seed % 4 else (3, 0, 2, 0)
        if any(counts):
            output = step(runner, random_batch(seed, counts, True), names)
            tokens += int((output >= 0).sum())
        else:
            runner._sample(None, None)
            tokens += 4
        calls, drafts = calls + 4, drafts + sum(count > 0 for count in counts)
    end(runner, *names)
    (trace,) = traces_in(tmp_path / "t")
    assert trace.texts == 4 and len(trace) == drafts and sum(trace.undrafted) == calls - drafts
    seen = replay(trace, "speculative")
    assert (seen.cycles.sum(), seen.drafts.sum()) == (calls, drafts)
    assert seen.tokens_per_call.value == pytest.approx(1 + seen.accepted_at.sum() / calls)
    assert seen.undrafted.startswith(f"10 of {calls} target calls had a draft; tokens a call and")
    counted = hook.tally.totals(BAND)
    assert counted["emitted_tokens"] == tokens == calls + counted["accepted_tokens"]
    assert counted["undrafted_tokens"] == calls - drafts
    alone = save_trace(  # the same steps, each a cycle
        tmp_path / "own", [[*own, *empty] for own, empty in cycles_of(trace)],
        vocab_size=VOCAB, num_draft_tokens=3,
    )  # fmt: skip
    for one, other in zip(tuned(trace).choices, tuned(alone).choices, strict=True):
        assert one.speed.value == pytest.approx(other.speed.value, rel=1e-3)
        spent = [own.replay.divergence_per_token().value for own in (one, other)]
        assert spent[0] == pytest.approx(spent[1], rel=0.01, abs=1e-6)
    fastest = tuned(trace).choices[0]
    assert fastest.speed.value < seen.tokens_per_call.value * 1.2  # not that of rounds with a draft
    assert f"{seen.undrafted}." in notes(tuned(trace))


def cycles_of(trace):
    """Return for each text its cycles, and one without a draft for each of the other steps."""
    q = torch.full((1, VOCAB), 1 / VOCAB, dtype=torch.float64)
    for text, undrafted in enumerate(trace.undrafted):
        empty = Cycle(text, 0, torch.zeros(0, dtype=torch.int64), q, None)
        yield [own for own in trace if own.text == text], [empty] * undrafted


def tuned(trace):
    return tune(trace, Costs.ratios(0.1), 0.02, policies=["mixture:alpha"], widths=[3])


def test_nothing_is_written_unless_it_is_asked_for(started, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kind, hook, _ = started(None)
    runner = kind(**requests(None))
    step(runner, random_batch(0, [3]))
    end(runner, "r0")
    assert hook.recorder is None and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("most", "vocab"), [(0, 150), (9_000, 150), (300_000, 150), (2_750_000, 40_000)]
)
def test_all_that_is_written_stays_within_the_bytes(started, tmp_path, monkeypatch, most, vocab):
    """Through restarts, too; of one text only so much is kept that there is room for others."""
    for start in range(3):
        monkeypatch.setattr("os.getpid", lambda: start)  # noqa: B023
        kind, hook, logged = started(tmp_path / "t", CACTUS_TRACE_BYTES=str(most))
        texts, full = 0, []
        while not full and texts < 100:
            runner, texts = kind(**requests("speculative", "speculative")), texts + 2
            for seed in range(8):
                step(runner, random_batch(seed, [3, 2], vocab=vocab))
                held = sum(own.rounds.bytes for own in hook.requests.values() if own.rounds)
                assert size_of(tmp_path / "t") + held <= most
            end(runner, "r0", "r1")
            full = [line for line in logged if "CACTUS_TRACE_BYTES would be exceeded" in line]
        assert len(full) == 1
    if most == 300_000:
        assert size_of(tmp_path / "t") > most / 2
        trace = max(traces_in(tmp_path / "t"), key=len)  # of the first start
        assert trace.texts > recorder.FEWEST_TEXTS and 2 * trace.texts < len(trace)


def test_a_request_has_no_say_in_it(started, tmp_path):
    """It names no folder, passes no limit, and no odd settings fill the disk with folders."""
    kind, hook, logged = started(tmp_path / "t")
    for key in ("cactus_trace", "cactus_trace_bytes", "CACTUS_TRACE"):
        with pytest.raises(ValueError, match="must be one of cactus, cactus_cap; got"):
            hook.settings.grant(fake.SamplingParams({key: str(tmp_path / "other")}))
    runner = kind(**requests(*ASKED))
    step(runner, random_batch(0, [2] * len(ASKED)))
    end(runner, *list(runner.requests))
    traces = traces_in(tmp_path / "t")
    assert len(traces) == recorder.MOST_SETTINGS
    named = ", ".join(trace.folder.name for trace in traces)
    with pytest.raises(ValueError, match=f"it has no manifest.json; name one of .* it: {named}$"):
        Trace.open(tmp_path / "t")
    assert {path.name for path in tmp_path.iterdir()} == {"t"}
    assert (tmp_path / "t").stat().st_mode & 0o077 == 0
    assert any("some requests are not traced" in line for line in logged)


def test_rounds_that_no_policy_decides_are_left_out(started, tmp_path):
    """Greedy requests, drafts whose rows were lost, and those that a placeholder ends."""
    kind, hook, _ = started(tmp_path / "t")
    runner = kind(**requests(None, None, None))
    runner.requests["r0"].sampling_params.temperature = 0.0
    heat = fake.Metadata(torch.tensor([0.0, 1.0, 1.0]), all_random=False)
    batch = random_batch(0, [2, 2, 2])
    batch.ids[3] = -1
    step(runner, batch, metadata=heat)
    end(runner, "r0", "r1", "r2")
    (trace,) = traces_in(tmp_path / "t")
    (cycle,) = trace
    assert cycle.draft_token_ids.tolist() == batch.ids[4:].tolist()


def test_a_full_disk_does_not_end_the_engine(started, tmp_path, monkeypatch):
    kind, hook, logged = started(tmp_path / "t")

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(Folder, "add_shard", full)
    runner = kind(**requests(None, None))
    step(runner, random_batch(0, [2, 2]))
    end(runner, "r0")
    assert any("no more is traced: no space left" in line for line in logged)
    assert not any("CACTUS_TRACE_BYTES" in line for line in logged)
    assert step(runner, random_batch(0, [2]), ["r1"]).shape == (1, 3)
    end(runner, "r1")
    step(kind(**requests(None)), random_batch(1, [2]))
    assert not any("CACTUS_TRACE_BYTES" in line for line in logged)  # it is not exceeded
    monkeypatch.setattr(recorder, "Folder", full)  # before there is a folder, too
    kind, hook, logged = started(tmp_path / "other")
    step(kind(**requests(None)), random_batch(0, [2]))
    assert any("no space left" in line for line in logged)


def test_a_manifest_states_the_cuts_of_both_models(started, tmp_path):
    """The engine cuts the target's rows as a request asks; its drafts come from whole rows."""
    kind, *_ = started(tmp_path / "t")
    runner = kind(**requests(None))
    for name, value in {"top_k": 3, "top_p": 0.9, "min_p": 0.01}.items():
        setattr(runner.requests["r0"].sampling_params, name, value)
    runner._sample(None, None)
    step(runner, random_batch(0, [3]))
    end(runner, "r0")
    (trace,) = traces_in(tmp_path / "t")
    assert Cuts.of(trace.header.details) == Cuts(3, 0.9, 0, 1.0)
    assert trace.header.details["min_p"] == 0.01
