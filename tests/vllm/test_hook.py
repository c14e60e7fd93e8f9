"""The hook in a fake of vLLM: what it replaces, what it passes on, what it refuses."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import cactus_theory as ct
from cactus_theory import vllm as plugin
from cactus_theory.vllm import install, settings
from cactus_theory.vllm.admission import Admission
from cactus_theory.vllm.batch import verify_flat
from cactus_theory.vllm.configuration import check_config
from cactus_theory.vllm.replace import UnknownVersion
from tests.vllm import fake
from tests.vllm.flat import CHAIN, emitted, random_batch

ROOT = Path(__file__).resolve().parents[2]
BAND = "band:price=0.5"
ASKED = "mixture:alpha=1", "band:price=1"
PLAIN = settings.read({"CACTUS_POLICY": BAND})


@pytest.fixture
def logged():
    return []


@pytest.fixture
def served(monkeypatch, logged):
    """A fake vLLM with the hook in place: its module, its runner and the hook."""
    sampler, runner = fake.install(monkeypatch, logged=logged)
    read = settings.read({"CACTUS_POLICY": BAND, "CACTUS_POLICIES": fake.offered(*ASKED)})
    return sampler, runner, install.install(Admission(read))


def call(batch, metadata=None):
    """Return the arguments of one call of the rejection sampler."""
    ends = torch.tensor(batch.counts, dtype=torch.int32).cumsum(0)
    own = metadata or fake.Metadata(torch.ones(len(batch.counts)), generators=batch.generators)
    given = [batch.ids, batch.counts, batch.width, ends, batch.draft_probs, batch.target_logits]
    return *given, batch.bonus[:, None], own


def requests(*policies):
    """Return requests by their names, with what each asks for."""
    every = [None if own is None else {"cactus": fake.named(own)} for own in policies]
    return {
        f"r{n}": fake.CachedRequestState(fake.SamplingParams(extra))
        for n, extra in enumerate(every)
    }


def seeded(seed, rows):
    return {row: torch.Generator().manual_seed(seed + row) for row in range(rows)}


def test_requests_choose_their_policies(served):
    _, runner, hook = served
    batch = random_batch(0, [3, 2, 3], generators=seeded(1, 3))
    asked = requests("mixture:alpha=1", None, "band:price=1")
    found = runner(**asked)._sample(None, call(batch))
    rules = [ct.policy(spec) for spec in ("mixture:alpha=1", BAND, "band:price=1")]
    again = random_batch(0, [3, 2, 3], generators=seeded(1, 3))
    assert torch.equal(found, verify_flat(CHAIN, rules, again)[0])
    assert emitted(found)[0][:3] == batch.ids[:3].tolist()  # alpha = 1 keeps whatever is drafted
    assert hook.tally.totals(BAND)["drafted_tokens"] == 2


def test_a_bad_request_inside_the_engine_is_lossless_with_a_warning(served, logged):
    _, runner, _ = served
    batch = random_batch(0, [3, 2], generators=seeded(1, 2))
    found = runner(**requests("not offered", None))._sample(None, call(batch))
    again = random_batch(0, [3, 2], generators=seeded(1, 2))
    rules = [ct.policy("speculative"), ct.policy(BAND)]
    assert torch.equal(found, verify_flat(CHAIN, rules, again)[0])
    assert any("is served without loss" in line for line in logged)


def test_batches_that_are_all_greedy_go_to_the_original(served):
    _, runner, _ = served
    given = call(random_batch(0, [3]), fake.Metadata(None, all_greedy=True, all_random=False))
    assert runner(**requests(None))._sample(None, given).unique().tolist() == [fake.STOCK]


def test_mixed_batches_know_their_greedy_requests(served):
    _, runner, _ = served
    own = runner(**requests(None, None))
    for seed in range(20):
        heat = fake.Metadata(torch.tensor([0.0, 1.0]), all_random=False)
        batch = random_batch(seed, [3, 3])
        found = emitted(own._sample(None, call(batch, heat)))[0]
        best = batch.target_logits[:3].argmax(-1).tolist()
        assert found[:3] == best[: len(found)]


def test_rows_that_were_lost_set_their_drafts_aside(served, logged):
    """The rows of request r1 are not there: the others keep theirs, its own come from q."""
    _, runner, _ = served
    batch = random_batch(0, [2, 2, 2], generators=seeded(1, 3))
    own = runner(**requests(None, None, None))
    own._draft_probs = batch.draft_probs.view(3, 2, -1)[[0, 2]]
    own._draft_prob_req_ids = ["r0", "r2"]
    given = list(call(batch))
    given[4] = None
    found = own._sample(None, given)
    again = random_batch(0, [2, 2, 2], generators=seeded(1, 3), unknown=frozenset({1}))
    assert torch.equal(found, verify_flat(CHAIN, [ct.policy(BAND)], again)[0])
    assert len(emitted(found)[1]) == 1
    assert any("lost" in line for line in logged)


def test_steps_with_nan_go_to_the_original(served, logged):
    _, runner, _ = served
    batch = random_batch(0, [2])
    batch.target_logits[0, 3] = torch.nan
    assert runner(**requests(None))._sample(None, call(batch)).unique().tolist() == [fake.STOCK]
    assert any("NaN" in line for line in logged)


def test_a_dummy_batch_before_any_request_is_judged_and_not_counted(served):
    sampler, _, hook = served
    sampler.RejectionSampler().forward(*call(random_batch(0, [1, 1])))
    assert hook.calls == 1 and not hook.tally.counts


def test_vllms_own_lossy_rules_are_refused(served):
    sampler, _, _ = served
    for name in ("synthetic_mode", "fly_window_size"):
        with pytest.raises(RuntimeError, match=name):
            sampler.rejection_sample(*call(random_batch(0, [1])), **{name: 3})


def test_a_step_that_passes_by_the_hook_stops(served):
    sampler, runner, hook = served
    sampler.rejection_sample = hook.original
    with pytest.raises(UnknownVersion, match="did not call rejection_sample"):
        runner(**requests(None))._sample(None, call(random_batch(0, [2])))


def test_a_step_without_drafts_is_left_alone(served):
    _, runner, hook = served
    assert runner()._sample(None, None) == "no drafts" and hook.calls == 0


def test_installing_twice_changes_nothing(served):
    sampler, runner, hook = served
    before = sampler.rejection_sample, runner._sample
    assert install.install(Admission(settings.read({"CACTUS_POLICY": "speculative"}))) is hook
    assert (sampler.rejection_sample, runner._sample) == before


def test_requests_are_refused_when_they_are_submitted(served):
    params = sys.modules["vllm.sampling_params"].SamplingParams
    with pytest.raises(sys.modules["vllm.exceptions"].VLLMValidationError, match="must be one of"):
        params({"cactus": "price=1"}).verify(None)
    good = params({"cactus": "speculative"})
    good.verify(None)
    assert good.verified


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("draft_token_ids, num_draft_tokens", "num_draft_tokens, draft_token_ids"),
        ("max_spec_len", "longest"),
        ("return rejection_sample(*given", "return other(*given"),
        ("class RejectionSampler", "class Sampler"),
    ],
)
def test_an_unknown_version_is_refused_and_nothing_is_replaced(monkeypatch, old, new):
    source = fake.REJECTION_SAMPLER.replace(old, new)
    sampler, runner = fake.install(monkeypatch, source)
    before = sampler.rejection_sample, runner._sample
    with pytest.raises(UnknownVersion, match=r"^vllm 9.9.9: .*tested with vllm 0.32.0"):
        install.install(Admission(settings.read({"CACTUS_POLICY": BAND})))
    assert (sampler.rejection_sample, runner._sample) == before


def test_register_does_nothing_without_a_policy(monkeypatch):
    sampler, _ = fake.install(monkeypatch)
    monkeypatch.delenv("CACTUS_POLICY", raising=False)
    before = sampler.rejection_sample
    plugin.register()
    assert sampler.rejection_sample is before


def test_register_stops_with_one_line(monkeypatch):
    fake.install(monkeypatch, fake.REJECTION_SAMPLER.replace("max_spec_len", "longest"))
    for name, value, said in (
        ("CACTUS_POLICY", "bnad", "CACTUS_POLICY"),
        ("CACTUS_POLICY", BAND, "longest"),
        ("CACTUS_POLICIY", "", "CACTUS_POLICIY"),
    ):
        monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as caught:
            plugin.register()
        line = str(caught.value)
        assert line.startswith("cactus-theory: ") and said in line and "\n" not in line


def test_register_stops_where_vllm_lacks_a_part(monkeypatch):
    fake.install(monkeypatch)
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_model_runner", None)
    monkeypatch.delattr(sys.modules["vllm.v1.worker"], "gpu_model_runner")
    monkeypatch.setenv("CACTUS_POLICY", BAND)
    with pytest.raises(SystemExit, match="tested with vllm"):
        plugin.register()


def config(**more):
    own = {"speculative_config": SimpleNamespace(rejection_sample_method="standard")}
    own |= {"use_v2_model_runner": False, "model_config": fake.MODEL}
    return SimpleNamespace(**(own | more))


def test_a_configuration_is_checked_before_processes_start(served, logged):
    arguments = sys.modules["vllm.engine.arg_utils"].EngineArgs()
    arguments.config = config()
    for _ in range(2):
        assert arguments.create_engine_config() is arguments.config
    asked = {"policy": BAND, "verifier": "chain", "cap": "none", "meter": "16"}
    asked |= {"version": version("cactus-theory"), "divergence": "kl", "margin": "0"}
    asked |= {"policies": "mixture.alpha.1, band.price.1"}
    assert fake.shown("cactus:info") == [(asked | {"model_name": "served"}, 1)]
    line, warning = logged  # once
    asked |= {"readings": "off", "trace": "off"}
    assert all(f"{name} {value}" in line for name, value in asked.items())
    assert "/metrics will not show the counters" in warning
    assert warning.endswith("set PROMETHEUS_MULTIPROC_DIR to an empty folder")
    arguments.config = config(speculative_config=None)
    assert arguments.create_engine_config() is arguments.config
    assert any("drafts nothing" in line for line in logged)
    arguments.config = config(use_v2_model_runner=True)
    with pytest.raises(SystemExit, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        arguments.create_engine_config()


def test_the_counters_are_seen_with_a_shared_folder_or_one_process(served, logged, monkeypatch):
    arguments = sys.modules["vllm.engine.arg_utils"].EngineArgs()
    arguments.config = config()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "somewhere")
    arguments.create_engine_config()
    assert len(logged) == 1


@pytest.mark.parametrize("drafts", [{}, {"speculative_config": None}])
def test_a_processor_on_runner_v1_and_a_margin_without_one_stop_the_start(served, drafts):
    named = "cactus_theory.vllm.logits_processor:CactusLogitsProcessor"
    loaded = SimpleNamespace(logits_processors=[named], served_model_name="served")
    with pytest.raises(SystemExit, match="CACTUS_POLICY alone decides drafts: leave --logits-proc"):
        check_config(config(model_config=loaded, **drafts), print, PLAIN)
    asked = settings.read({"CACTUS_POLICY": BAND, "CACTUS_MARGIN": "1"})
    for on_v2 in (False, True):
        with pytest.raises(SystemExit, match="CACTUS_MARGIN: does nothing without --logits-proc"):
            check_config(config(use_v2_model_runner=on_v2, **drafts), print, asked)


@pytest.mark.parametrize("method", ["block", "synthetic", "fly"])
def test_other_methods_are_refused(served, method):
    speculative = SimpleNamespace(rejection_sample_method=method)
    with pytest.raises(SystemExit, match=method):
        check_config(config(speculative_config=speculative), print, PLAIN)


def test_runner_v2_is_let_through_with_its_logits_processor(served):
    processor = "cactus_theory.vllm.logits_processor:CactusLogitsProcessor"
    loaded = SimpleNamespace(logits_processors=[processor], served_model_name="served")
    own = {"rejection_sample_method": "block", "num_speculative_tokens": 2}
    arguments = sys.modules["vllm.engine.arg_utils"].EngineArgs()
    margin = sys.modules["vllm.sampling_params"].SamplingParams({"cactus_margin": 0})
    with pytest.raises(ValueError, match="logits processor"):
        margin.verify(None)  # no server with it has been made yet
    for sampled in ("greedy", "probabilistic"):
        drafts = SimpleNamespace(draft_sample_method=sampled, **own)
        given = config(
            use_v2_model_runner=True, model_config=loaded, speculative_config=drafts
        )  # fmt: skip
        if sampled == "greedy":
            arguments.config = given
            arguments.create_engine_config()
            margin.verify(None)
        else:
            with pytest.raises(SystemExit, match="draft_sample_method: must be greedy"):
                check_config(given, print, PLAIN)


def test_runner_v2_is_let_through_with_its_hook(served, monkeypatch, logged):
    """In every process of the server, as the plugin runs before the configuration is known."""
    from cactus_theory.vllm import model_runner_v2
    from tests.vllm import published

    monkeypatch.setenv("CACTUS_POLICY", BAND)
    published.put(monkeypatch, around=False)
    assert model_runner_v2.installed() is None
    plugin.register()
    assert model_runner_v2.installed() is not None
    check_config(config(use_v2_model_runner=True), logged.append, PLAIN)
    assert any("nothing is counted" in line for line in logged)
    published.put(monkeypatch, around=False, rejection_sample=lambda logits: None)
    plugin.register()
    with pytest.raises(SystemExit, match=r"no hook for model runner V2 .* takes \(logits\)"):
        check_config(config(use_v2_model_runner=True), print, PLAIN)


def test_a_build_that_loses_the_temperature_is_refused(served):
    sampler, _, _ = served
    sampler.expand_batch_to_tokens = lambda x, ends, count: torch.zeros(count)
    with pytest.raises(SystemExit, match="55005"):
        check_config(config(), print, PLAIN)


def test_the_entry_point_loads_neither_torch_nor_vllm_without_a_policy():
    code = (
        "import sys; from cactus_theory.vllm import register; register(); "
        "print([name for name in ('torch', 'numpy', 'vllm') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_entry_point_is_declared():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (place,) = project["entry-points"]["vllm.general_plugins"].values()
    assert place == f"{plugin.__name__}:{plugin.register.__name__}"
