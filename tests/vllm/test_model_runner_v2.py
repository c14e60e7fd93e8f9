"""The hook of model runner V2 in the published layout, against exact laws and the references."""

import inspect
import sys
from types import SimpleNamespace

import pytest
import torch

import cactus_theory as ct
from cactus_theory.kernels import random_numbers
from cactus_theory.vllm import model_runner_v2, settings
from cactus_theory.vllm.replace import UnknownVersion
from tests.amounts import amount
from tests.kernels.conftest import device  # noqa: F401
from tests.vllm import published
from tests.vllm.nothing_read import NothingRead

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
SLOTS, WIDTH, VOCAB = 9, 3, 7
LENGTHS = (3, 0, 2, 1, 3, 3)
OFFERED = "near=cactus:delta=2;far=band:price=0.2"
OF_SLOT = torch.tensor([4, 8, 0, 2, 6, 7], dtype=torch.int32)


def asked(policy="band:price=1", verifier="chain"):
    environ = {settings.POLICY: policy, settings.VERIFIER: verifier, settings.POLICIES: OFFERED}
    return settings.read(environ)


class Batch:
    """Six requests in the published shapes: ragged, a placeholder, two temperatures, greedy."""

    def __init__(self, lengths=LENGTHS, seed=0, narrow=0):
        generator = torch.Generator().manual_seed(seed)
        self.lengths, count = lengths, len(lengths)
        rows = torch.tensor(lengths) + 1
        self.ends = torch.cat([rows.new_zeros(1), rows.cumsum(0)]).int()
        total = int(self.ends[-1])
        self.target = 2 * torch.randn(total, VOCAB, generator=generator)
        self.draft = 2 * torch.randn(SLOTS, WIDTH, VOCAB - narrow, generator=generator)
        self.heat = torch.full((SLOTS,), 0.6)
        self.heat[0], self.heat[2] = 1.0, 0.0
        self.seed = torch.randint(-(2**62), 2**62, (SLOTS,), generator=generator)
        self.slots = OF_SLOT[:count]
        self.of_row = torch.repeat_interleave(torch.arange(count), rows)
        self.local = torch.cat([torch.arange(int(own)) for own in rows]).int()
        alike = self.draft[self.slots[self.of_row].long(), self.local.clamp(max=WIDTH - 1).long()]
        self.target[:, : alike.shape[1]] += alike
        self.target[0, 1] = -torch.inf
        self.pos = torch.randint(5, 2**33, (count,), generator=generator)[self.of_row] + self.local
        likely = self.draft[self.slots[self.of_row].long(), (self.local - 1).clamp(min=0).long()]
        # the first row of a request was fed a token of its text
        self.fed = torch.where(self.local > 0, likely.argmax(-1), 5).int()
        self.fed[self.ends[2] + 2 if count > 2 else -1] = -1

    def arguments(self, deterministic=False):
        return {
            "target_logits": self.target, "draft_logits": None if deterministic else self.draft,
            "draft_sampled": self.fed, "cu_num_logits": self.ends, "pos": self.pos,
            "idx_mapping": self.slots, "expanded_idx_mapping": self.slots[self.of_row],
            "expanded_local_pos": self.local, "temperature": self.heat, "seed": self.seed,
            "num_speculative_steps": WIDTH, "synthetic_conditional_rates": None,
        }  # fmt: skip

    def alone(self, request, rule, verifier, deterministic=False):
        """Return what one request emits, by ct.verify_… on float64 rows and its own coins."""
        slot, start = int(self.slots[request]), int(self.ends[request])
        ids = self.fed[start + 1 : start + 1 + self.lengths[request]].tolist()
        ids = ids[: ids.index(-1)] if -1 in ids else ids
        count, heat = len(ids), float(self.heat[slot])
        vocab = self.draft.shape[-1]
        rows = self.target[start : start + count + 1, :vocab].double()
        p = self.draft[slot, :count].double()
        if heat == 0:
            q = torch.nn.functional.one_hot(rows.argmax(-1), vocab).double()
            p = torch.nn.functional.one_hot(torch.tensor(ids).long(), vocab).double()
        else:
            q, p = rows.softmax(-1), (p / heat).softmax(-1)
        seed = (self.seed[slot] ^ model_runner_v2.SALT)[None]
        at, places = self.pos[start : start + 1] + 1, torch.arange(max(count, 1))[None]
        coins = (
            random_numbers.coins(seed, at, places, random_numbers.ACCEPT)[:, :count],
            random_numbers.coins(seed, at, places[:, :1], random_numbers.DRAW)[:, 0],
        )
        verify = {"chain": ct.verify_chain, "block": ct.verify_block}[verifier]
        ids = torch.tensor(ids, dtype=torch.int64)[None]
        found = verify(rule, q[None], None if deterministic else p[None], ids, coins=coins)
        return [token for token in found.output_token_ids[0].tolist() if token >= 0]


def emitted(found):
    ids, counts = found
    assert ids.dtype == torch.int64 and counts.dtype == torch.int32
    assert (ids >= 0).all()  # what the engine may look up
    return [row[:count] for row, count in zip(ids.tolist(), counts.tolist(), strict=True)]


@pytest.mark.parametrize("verifier", ["chain", "block"])
@pytest.mark.parametrize("spec", ["band:price=1", "cactus:delta=0.5", "speculative"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_each_request_gets_what_it_gets_alone(spec, verifier, deterministic):
    hook, rule, seen = model_runner_v2.Hook(asked(spec, verifier)), ct.policy(spec), set()
    for seed in range(amount(3, 40)):
        for lengths, narrow in ((LENGTHS, 0), ((3, 3, 3), 0), (LENGTHS, 2)):
            batch = Batch(lengths, seed, 0 if deterministic else narrow)
            found = emitted(hook.rejection_sample(**batch.arguments(deterministic)))
            for request in range(len(lengths)):
                assert found[request] == batch.alone(request, rule, verifier, deterministic)
                seen.add((lengths[request], len(found[request])))
    assert {(3, 1), (3, 4), (2, 2), (0, 1), (1, 1), (1, 2)} <= seen
    assert hook.calls == 3 * amount(3, 40)


def test_kernels_get_the_same_requests(device):  # noqa: F811
    lengths, rule = LENGTHS[: amount(3, 6)], ct.policy("band:price=1")
    batch = Batch(lengths, 1, 2)
    found = emitted(model_runner_v2.Hook(asked()).rejection_sample(**batch.arguments()))
    assert found == [batch.alone(own, rule, "chain") for own in range(len(lengths))]


def test_the_coins_of_a_seed_are_none_that_may_have_drafted_with_it():
    seed, at, places = torch.tensor([7]), torch.tensor([41]), torch.arange(50)[None]
    found = [
        random_numbers.coins(own, at, places, stream)
        for own in (seed, seed ^ model_runner_v2.SALT)
        for stream in random_numbers.STREAMS
    ]
    assert len(torch.cat(found, 1).unique()) == 50 * len(found)


def test_rows_without_numbers_give_ids_that_exist():
    batch = Batch((1,), 0)
    batch.target[:] = torch.nan
    ids, counts = model_runner_v2.Hook(asked()).rejection_sample(**batch.arguments())
    assert counts.tolist() == [1] and ((ids >= 0) & (ids < VOCAB)).all()


@pytest.fixture
def vllm(monkeypatch):
    published.put(monkeypatch)
    yield sys.modules[published.REJECTION], sys.modules[published.SAMPLER]


def run(module, batch, deterministic=False, **rules):
    """Call the runner's method, as it is called for one chunk."""
    runner = module.RejectionSampler()
    runner.temperature, runner.seed, runner.steps = batch.heat, batch.seed, WIDTH
    given = batch.arguments(deterministic)
    names = ("draft_logits", "draft_sampled", "pos", "cu_num_logits", "idx_mapping")
    return runner._verify(
        batch.target, *(given[name] for name in names), batch.slots.numpy(),
        given["expanded_idx_mapping"], batch.local, None, batch.fed, **rules,
    )  # fmt: skip


def test_installed_once_and_removed(vllm):
    module, sampler = vllm
    before = (module.rejection_sample, module.RejectionSampler._verify, sampler.Sampler.add_request)
    assert model_runner_v2.installed() is None
    hook = model_runner_v2.install(asked())
    assert model_runner_v2.install(asked("speculative")) is hook is model_runner_v2.installed()
    batch = Batch()
    direct = emitted(model_runner_v2.Hook(asked()).rejection_sample(**batch.arguments()))
    assert emitted(run(module, batch)) == direct and hook.calls == 1
    model_runner_v2.remove()
    model_runner_v2.remove()
    now = (module.rejection_sample, module.RejectionSampler._verify, sampler.Sampler.add_request)
    assert now == before and model_runner_v2.installed() is None


def test_requests_with_policies_of_their_own(vllm, monkeypatch):
    said = []
    monkeypatch.setattr(
        model_runner_v2._log, "warning", lambda text, *words: said.append(text % words)
    )
    module, sampler = vllm
    hook, batch, engine = model_runner_v2.install(asked()), Batch(), sampler.Sampler()
    wishes = {4: {"cactus": "near"}, 6: {"cactus": "far"}, 7: {"cactus": "bad"}}
    for slot in range(SLOTS):
        engine.add_request(slot, SimpleNamespace(extra_args={"cactus": "speculative"}))
        engine.add_request(slot, SimpleNamespace(extra_args=wishes.get(slot)))
    specs = {4: "cactus:delta=2.0", 6: "band:price=0.2", 7: "speculative"}
    assert {slot: rule.spec for slot, rule in hook.policies.items()} == specs
    assert len(said) == 1 and "is served without loss" in said[0]
    found = emitted(run(module, batch))
    for request, slot in enumerate(batch.slots.tolist()):
        rule = ct.policy(specs.get(slot, "band:price=1"))
        assert found[request] == batch.alone(request, rule, "chain")


@pytest.mark.parametrize(
    "rules",
    [
        {"use_block_verification": True},
        {"fly_window_size": 2},
        {"contexts": torch.zeros(1, 1)},
        {"watermark_key": 3},
    ],
)
def test_rules_of_the_engine_beside_ours_are_refused(vllm, rules):
    model_runner_v2.install(asked())
    with pytest.raises(RuntimeError, match=f"{next(iter(rules))}: a rule of vLLM's own"):
        run(vllm[0], Batch(), **rules)
    batch = Batch()
    given = batch.arguments() | {"synthetic_conditional_rates": torch.ones(3)}
    with pytest.raises(RuntimeError, match="synthetic_conditional_rates"):
        model_runner_v2.Hook(asked()).rejection_sample(**given)
    run(vllm[0], batch, fly_window_size=0, fly_entropy_threshold=0.3, fly_entropy_top_k=3)


def test_a_runner_that_does_not_ask_is_stopped(vllm):
    module, _ = vllm
    model_runner_v2.install(asked())
    module.rejection_sample = lambda *args, **kwargs: None
    with pytest.raises(RuntimeError, match="verified drafts without asking"):
        run(module, Batch())


def test_unknown_parameters_are_refused(monkeypatch):
    def newer(*args, **kwargs):
        raise AssertionError

    plain = inspect.signature(published.rejection_sample)
    extra = inspect.Parameter("acceptance_rule", inspect.Parameter.KEYWORD_ONLY, default=None)
    newer.__signature__ = plain.replace(parameters=[*plain.parameters.values(), extra])  # type: ignore[attr-defined]
    published.put(monkeypatch, rejection_sample=newer)
    with pytest.raises(UnknownVersion, match="also takes acceptance_rule") as said:
        model_runner_v2.install(asked())
    assert "\n" not in str(said.value)
    published.put(monkeypatch, rejection_sample=lambda target_logits, seeds: None)
    with pytest.raises(UnknownVersion, match=r"takes \(target_logits, seeds\)"):
        model_runner_v2.install(asked())


def test_the_layout_is_made_without_reading_on_the_host():
    for batch in (Batch(), Batch((3, 3), narrow=2)):
        given = batch.arguments()
        with NothingRead():
            model_runner_v2.requests_of(**{name: given[name] for name in model_runner_v2.READ})
