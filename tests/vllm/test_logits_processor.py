"""The logits processor in the published interface of model runner V2."""

import importlib
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.vllm import model_runner_v2, settings
from cactus_theory.vllm.replace import UnknownVersion
from tests.rows import two_tokens
from tests.vllm import fake, published
from tests.vllm.nothing_read import NothingRead

NAME = "cactus_theory.vllm.logits_processor"
WIDTH, VOCAB, REQUESTS = 3, 6, 8
# logits up to 12 in float32, divided by T ≥ 0.5
SINGLE = 5e-6
WHOLE = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}


ASKED = ["cactus:delta=0.5", "cactus:delta=1", *(f"band:price={own}" for own in (0.5, 0.7, 1, 2))]


@pytest.fixture
def processor_class(monkeypatch):
    """Return the class, imported beside what stands for vLLM."""
    for name in ("POLICY", "VERIFIER", "CAP", "READINGS"):
        monkeypatch.delenv(f"CACTUS_{name}", raising=False)
    monkeypatch.setenv("CACTUS_POLICY", "speculative")
    monkeypatch.setenv("CACTUS_POLICIES", fake.offered(*ASKED))
    published.put(monkeypatch)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield importlib.import_module(NAME).CactusLogitsProcessor
    sys.modules.pop(NAME, None)


def chosen(spec):
    return {"cactus": fake.named(spec)}


def params(temperature=1.0, spec=None, **own):
    extra = None if spec is None else chosen(spec)
    return SimpleNamespace(temperature=temperature, extra_args=extra, **(WHOLE | own))


def made(processor_class, given=None):
    """Return a processor of a server that is started anew."""
    sys.modules[NAME].server_settings.cache_clear()
    state = published.LogitsProcRequestState(torch.device("cpu"), REQUESTS, VOCAB)
    return processor_class(given or fake.config(), state)


class Step:
    """Requests in slots 5, 2, 7 and 0 with 3, 0, 2 and 1 drafted tokens, one a placeholder."""

    slots, lengths = (5, 2, 7, 0), (3, 0, 2, 1)
    drafted = torch.tensor([4, 1, 0, -1, -1, 2, -1, -1, 3, -1])

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.logits = 2 * torch.randn(len(self.drafted), VOCAB, generator=generator)
        self.logits[0, 3] = self.logits[5, 1] = -torch.inf
        rows = [length + 1 for length in self.lengths]
        local = torch.cat([torch.arange(count) for count in rows])
        fed = torch.full((len(local),), 5, dtype=torch.int32)  # the last token of each text
        fed[1:] = torch.where(local[1:] > 0, self.drafted[:-1], 5)
        slots = torch.tensor(self.slots, dtype=torch.int32)
        self.of_row = torch.repeat_interleave(torch.arange(4), torch.tensor(rows))
        self.context = published.LogitsContext(
            expanded_idx_mapping=slots[self.of_row],
            idx_mapping=slots,
            idx_mapping_np=slots.numpy(),
            expanded_local_pos=local.int(),
            input_ids=fed,
            pos=local.long() + 9,
            seq_lens_upper_bound_np=np.full(4, 99),
        )

    def run(self, processor, wishes):
        for slot, own in zip(self.slots, wishes, strict=True):
            processor.add_request(slot, own)
        processor.apply_staged_writes()
        return processor.apply(self.logits.clone(), self.context)


def expected(spec, logits, drafted, heat):
    q = (logits.double() / heat).softmax(-1)
    if drafted < 0 or spec is None:
        return q
    ids = torch.tensor([drafted])
    return ct.emitted_law(ct.policy(spec), q[None], None, draft_token_ids=ids)[0]


def test_each_request_has_its_own_policy_and_temperature(processor_class, monkeypatch):
    monkeypatch.setenv("CACTUS_POLICY", "band:price=2")
    step, heats = Step(), (1.0, 0.7, 0.5, 1.3)
    specs = ("band:price=2", "band:price=2", "cactus:delta=0.5", "band:price=0.5")
    wishes = (None, None, specs[2], specs[3])
    given = [params(heat, wish) for heat, wish in zip(heats, wishes, strict=True)]
    moved = step.run(made(processor_class), given)
    for row, own in enumerate(step.of_row.tolist()):
        law = (moved[row].double() / heats[own]).softmax(-1)
        exact = expected(specs[own], step.logits[row], int(step.drafted[row]), heats[own])
        torch.testing.assert_close(law, exact, rtol=0, atol=SINGLE)


def test_blocks_follow_each_request(processor_class, monkeypatch):
    """In blocks a row looks at later rows of its own request, and at no others."""
    monkeypatch.setenv("CACTUS_POLICY", "band:price=1")
    monkeypatch.setenv("CACTUS_VERIFIER", "block")
    step, rule, heats = Step(), ct.policy("band:price=1"), (1.0, 0.7, 0.5, 1.3)
    step.logits[1, 1] = 12.0  # all but deterministic
    moved = step.run(made(processor_class), [params(heat) for heat in heats])
    for own, (start, heat) in enumerate(zip((0, 4, 5, 8), heats, strict=True)):
        ids = [int(token) for token in step.drafted[start : start + step.lengths[own]]]
        ids = ids[: ids.index(-1)] if -1 in ids else ids
        if not ids:
            continue
        places, at = torch.arange(start, start + len(ids)), torch.tensor(ids)[:, None]
        path = (step.logits[places].double() / heat).softmax(-1).gather(1, at).T
        law = (moved[places].double() / heat).softmax(-1).gather(1, at).T
        exact = rule.look_ahead.path(*two_tokens(path), torch.tensor([len(ids)]))
        torch.testing.assert_close(law, exact, rtol=0, atol=SINGLE)


def kept(row, top_p, top_k, min_p):
    """Return the truncated row by the words of the three rules, token after token."""
    q = row.double().softmax(-1)
    q = torch.where(q >= min_p * q.max(), q, 0.0)
    if top_k > 0:
        q = torch.where(q >= q.sort(descending=True).values[min(top_k, len(q)) - 1], q, 0.0)
    q, order, mass = q / q.sum(), q.argsort(descending=True).tolist(), 0.0
    for token in order:
        if mass >= top_p:
            q[token] = 0.0
        mass += float(q[token])
    return q / q.sum()


CUTS = ({"top_p": 0.7}, {"top_k": 3}, {"top_k": -1, "min_p": 0.3})
EXTREMES = ({"top_p": 1e-17}, {"top_k": 40}, {"min_p": 1.0})


@pytest.mark.parametrize("cuts", [CUTS, EXTREMES], ids=["usual", "extreme"])
@pytest.mark.parametrize("lossy", [False, True])
def test_the_engines_own_cuts_are_made_before_a_policy_acts(processor_class, lossy, cuts):
    """The law is the hook's: q is cut, then the policy acts; vLLM's sampler has nothing to cut.

    On every row, the bonus row too; a drafted token that is cut is not raised, ties are kept.
    """
    step, heats, policy = Step(), (1.0, 0.7, 1.3, 0.8), "band:price=0.7" if lossy else None
    processor, sampler = made(processor_class), sys.modules[published.STATES].SamplingStates()
    every = (*cuts, {name: value for own in cuts for name, value in own.items()})
    step.logits[1, 4] = step.logits[1, 1]
    given = [params(heat, policy, **cut) for heat, cut in zip(heats, every, strict=True)]
    for slot, own in zip(step.slots, given, strict=True):
        processor_class.validate_params(own)
        sampler.add_request(slot, own)
    moved, cut_drafts = step.run(processor, given), 0
    for row, own in enumerate(step.of_row.tolist()):
        asked = WHOLE | every[own]
        seen = {name: getattr(sampler.seen[step.slots[own]], name) for name in WHOLE}
        assert seen == (WHOLE if lossy else asked)
        assert {name: getattr(given[own], name) for name in WHOLE} == asked  # the caller's object
        q = kept(step.logits[row] / heats[own], **(asked if lossy else WHOLE))
        law, drafted = (moved[row].double() / heats[own]).softmax(-1), int(step.drafted[row])
        cut_drafts += drafted >= 0 and float(q[drafted]) == 0
        exact = expected(policy, q.log(), drafted, 1.0)
        torch.testing.assert_close(law, exact, rtol=0, atol=SINGLE)
    assert not lossy or cut_drafts


def test_cuts_leave_greedy_and_other_requests_alone(processor_class):
    step, own = Step(), {"spec": "band:price=0.7", "top_k": 1}
    given = [params(**own), params(0.0, **own), params(top_k=1), params(0.0, top_k=1)]
    sampler = sys.modules[published.STATES].SamplingStates()
    moved = step.run(made(processor_class), given)
    assert torch.equal(moved[4:], step.logits[4:])
    assert (moved[:4] > -torch.inf).sum(-1).tolist() == [1] * 4
    for slot, asked in enumerate(given):
        sampler.add_request(slot, asked)
    assert [seen.top_k for seen in sampler.seen.values()] == [0, 1, 1, 1]


def test_policies_of_requests_that_are_gone_are_not_solved(processor_class, monkeypatch):
    step, processor = Step(), made(processor_class)
    for slot, policy in ((1, "cactus:delta=1"), (3, "band:price=0.5")):
        processor.add_request(slot, params(spec=policy))
    monkeypatch.setattr("cactus_theory.vllm.bias.log_entries", None)
    moved = step.run(processor, [params(spec="band:price=1")] * 4)
    assert float(moved[0, 4] - step.logits[0, 4]) == pytest.approx(1.0)


def test_a_step_reads_nothing_on_the_host(processor_class):
    step, processor = Step(), made(processor_class)
    step.run(processor, [params(spec="band:price=2", top_p=0.8, top_k=3)] * 4)
    with NothingRead():
        processor.apply(step.logits, step.context)
    drafted, logits = step.drafted, step.logits
    for wrong in (lambda: int(drafted[0]), lambda: logits[drafted > 0], lambda: drafted.nonzero()):
        with pytest.raises(AssertionError, match="reads what a tensor holds"), NothingRead():
            wrong()


def test_without_a_setting_logits_are_the_same_object_and_numbers(processor_class):
    step, processor = Step(), made(processor_class)
    assert processor.add_request(0, params()) is False
    logits = step.logits.clone()
    assert processor.apply(logits, step.context) is logits and torch.equal(logits, step.logits)


def test_only_requests_that_ask_are_touched_and_slots_are_taken_over(processor_class):
    step, processor = Step(), made(processor_class)
    asked = params(spec="band:price=1")
    assert processor.add_request(7, params(spec="bad")) is False  # without loss
    assert processor.add_request(7, asked) is True
    moved = step.run(processor, [params(), params(), asked, params()])
    changed = (moved != step.logits).nonzero().tolist()
    assert changed == [[5, 2]]
    again = step.run(processor, [asked, params(), params(), params()])
    assert (again != step.logits).nonzero().tolist() == [[0, 4], [1, 1], [2, 0]]


def test_what_is_refused_at_admission(processor_class):
    for bad in (params(spec="no_such"), params(1e300)):
        with pytest.raises(ValueError, match="must be"):
            processor_class.validate_params(bad)
    for good in (params(top_p=0.9, top_k=3), params(0.0, top_p=0.9), params(spec=ASKED[0])):
        processor_class.validate_params(good)


def test_the_hook_makes_way_for_the_processor(processor_class):
    """Else the policy would act twice."""
    model_runner_v2.install(settings.read({settings.POLICY: "band:price=2"}))
    with pytest.raises(ValueError):
        made(processor_class, fake.config(speculative_config=fake.drafts("probabilistic")))
    assert model_runner_v2.installed() is not None
    made(processor_class)
    assert model_runner_v2.installed() is None


def test_bad_settings_stop_the_start_and_no_speculation_is_no_work(processor_class, monkeypatch):
    monkeypatch.setenv("CACTUS_POLICY", "band:price=2")
    idle = made(processor_class, fake.config(speculative_config=None))
    assert idle.add_request(0, params()) is False
    monkeypatch.setenv("CACTUS_POLICY", "nothing")
    with pytest.raises(ValueError, match="CACTUS_POLICY: policy: must be one of"):
        made(processor_class)


def test_other_versions_are_refused_with_one_line(monkeypatch):
    class Other(published.LogitsProcessor):
        def apply(self, logits, context):
            return logits

    monkeypatch.delitem(sys.modules, NAME, raising=False)
    published.put(monkeypatch, LogitsProcessor=Other)
    with pytest.raises(UnknownVersion, match=r"apply takes \(self, logits, context\), not") as said:
        importlib.import_module(NAME)
    assert "\n" not in str(said.value)
    monkeypatch.delitem(sys.modules, published.INTERFACE)
    with pytest.raises(UnknownVersion, match="cannot be imported"):
        importlib.import_module(NAME)


def test_without_vllm_the_error_says_what_to_do(monkeypatch):
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'cactus-theory\[vllm\]'"):
        importlib.import_module(NAME)
