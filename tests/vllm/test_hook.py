"""The hook in a fake of vLLM: what it replaces, what it passes on, what it refuses."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import cactus_theory as ct
from cactus_theory import vllm as plugin
from cactus_theory.vllm import install, settings
from cactus_theory.vllm.batch import verify_flat
from cactus_theory.vllm.compatibility import UnknownVersion
from cactus_theory.vllm.install import check_config
from tests.vllm import fake
from tests.vllm.fake import call, config, drafts, requests, seeded, step
from tests.vllm.flat import CHAIN, emitted, random_batch

ROOT = Path(__file__).resolve().parents[2]
BAND = "band:price=0.5"
ASKED = "mixture:alpha=1", "band:price=1"
PLAIN = settings.read({"CACTUS_POLICY": BAND})


@pytest.fixture
def served(server):
    """A fake vLLM with the hook in place."""
    return server(BAND, CACTUS_POLICIES=fake.offered(*ASKED))


def test_requests_choose_their_policies(served):
    """One that was not refused when it was submitted is lossless."""
    asked = requests(ASKED[0], None, ASKED[1], "not offered")
    counts = [3, 2, 3, 2]
    batch, again = (random_batch(0, counts, holes=0, generators=seeded(1, 4)) for _ in range(2))
    found = step(served.runner(**asked), batch)
    rules = [ct.policy(spec) for spec in (ASKED[0], BAND, ASKED[1], "speculative")]
    assert torch.equal(found, verify_flat(CHAIN, rules, again)[0])
    assert emitted(found)[0][:3] == batch.ids[:3].tolist()  # alpha = 1 keeps whatever is drafted
    assert served.hook.tally.totals(BAND)["drafted_tokens"] == 2
    assert any("is served without loss" in line for line in served.logged)


def test_batches_that_are_greedy_or_not_numbers_go_to_the_original(served):
    greedy = fake.Metadata(None, all_greedy=True, all_random=False)
    batch, runner = random_batch(0, [3]), served.runner(**requests(None))
    assert step(runner, batch, None, greedy).unique().tolist() == [fake.STOCK]
    batch.target_logits[0, 3] = torch.nan
    assert step(runner, batch).unique().tolist() == [fake.STOCK]
    assert any("NaN" in line for line in served.logged)


def test_mixed_batches_know_their_greedy_requests(served):
    own = served.runner(**requests(None, None))
    for seed in range(20):
        heat = fake.Metadata(torch.tensor([0.0, 1.0]), all_random=False)
        batch = random_batch(seed, [3, 3])
        found = emitted(step(own, batch, None, heat))[0]
        best = batch.target_logits[:3].argmax(-1).tolist()
        assert found[:3] == best[: len(found)]


def test_rows_that_were_lost_set_their_drafts_aside(served):
    """The rows of request r1 are not there: the others keep theirs, its own come from q."""
    batch = random_batch(0, [2, 2, 2], generators=seeded(1, 3))
    own = served.runner(**requests(None, None, None))
    own._draft_probs = batch.draft_probs.view(3, 2, -1)[[0, 2]]
    own._draft_prob_req_ids = ["r0", "r2"]
    given = call(batch)
    given[4] = None
    found = own._sample(None, given)
    again = random_batch(0, [2, 2, 2], generators=seeded(1, 3), unknown=frozenset({1}))
    assert torch.equal(found, verify_flat(CHAIN, [ct.policy(BAND)], again)[0])
    assert len(emitted(found)[1]) == 1
    assert any("lost" in line for line in served.logged)


def test_a_dummy_batch_before_any_request_is_judged_and_not_counted(served):
    served.sampler.RejectionSampler().forward(*call(random_batch(0, [1, 1])))
    assert served.hook.calls == 1 and not served.hook.tally.counts
    assert served.runner()._sample(None, None) == "no drafts" and served.hook.calls == 1


def test_vllms_own_lossy_rules_are_refused(served):
    for name in ("synthetic_mode", "fly_window_size"):
        with pytest.raises(RuntimeError, match=name):
            served.sampler.rejection_sample(*call(random_batch(0, [1])), **{name: 3})


def test_a_step_that_passes_by_the_hook_stops(served):
    served.sampler.rejection_sample = served.hook.original
    with pytest.raises(UnknownVersion, match="did not call rejection_sample"):
        step(served.runner(**requests(None)), random_batch(0, [2]))


def test_installing_twice_changes_nothing(served):
    before = served.sampler.rejection_sample, served.runner._sample
    assert install.install(settings.read({"CACTUS_POLICY": "speculative"})) is served.hook
    assert (served.sampler.rejection_sample, served.runner._sample) == before


def test_requests_are_refused_when_they_are_submitted(server):
    server(BAND, CACTUS_CAP="0.05")
    params = sys.modules["vllm.sampling_params"].SamplingParams
    hot = params({})
    hot.temperature = 1e300
    for bad in (params({"cactus": "price=1"}), params({"cactus_cap": 0.1}), hot):
        with pytest.raises(sys.modules["vllm.exceptions"].VLLMValidationError, match="must"):
            bad.verify(None)
    good = params({"cactus": "speculative", "cactus_cap": 0.02})
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
        install.install(PLAIN)
    assert (sampler.rejection_sample, runner._sample) == before


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


def test_a_configuration_is_checked_before_processes_start(served, monkeypatch):
    arguments, logged = sys.modules["vllm.engine.arg_utils"].EngineArgs(), served.logged
    arguments.config = config()
    for _ in range(2):
        assert arguments.create_engine_config() is arguments.config
    asked = {"policy": BAND, "verifier": "chain", "cap": "none", "meter": "16"}
    asked |= {"version": version("cactus-theory")}
    asked |= {"policies": "speculative, mixture.alpha.1, band.price.1"}
    assert fake.shown("cactus:info") == [(asked | {"model_name": "served"}, 1)]
    line, warning = logged  # once
    asked |= {"readings": "off"}
    assert all(f"{name} {value}" in line for name, value in asked.items())
    assert "/metrics will not show the counters" in warning
    assert warning.endswith("set PROMETHEUS_MULTIPROC_DIR to an empty folder")
    arguments.config = config(speculative_config=None)
    assert arguments.create_engine_config() is arguments.config
    assert any("drafts nothing" in line for line in logged)
    logged.clear()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "somewhere")
    install.show_info(PLAIN, config(), logged.append, logged.append)
    assert len(logged) == 1


@pytest.mark.parametrize("method", ["block", "synthetic", "fly"])
def test_a_server_with_a_rule_of_its_own_is_stopped(served, method):
    with pytest.raises(SystemExit, match=f"must be standard .* got {method}"):
        check_config(config(speculative_config=drafts(method)), print)


@pytest.mark.parametrize(("asked", "said"), [("1", "1"), (None, "no value"), ("0", "0")])
@pytest.mark.parametrize("speculative_config", [drafts(), None])
def test_model_runner_v2_stops_the_start(served, monkeypatch, asked, said, speculative_config):
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    if asked is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", asked)
    arguments = sys.modules["vllm.engine.arg_utils"].EngineArgs()
    arguments.config = config(use_v2_model_runner=True, speculative_config=speculative_config)
    with pytest.raises(SystemExit) as caught:
        arguments.create_engine_config()
    line = str(caught.value)
    assert line.startswith("cactus-theory: VLLM_USE_V2_MODEL_RUNNER: must be 0 with CACTUS_POLICY")
    assert (
        line.endswith(f"; got {said}, with which vLLM takes model runner V2")
        and "\n" not in line
        and not served.logged
    )


def test_a_vllm_that_does_not_tell_its_model_runner_is_refused(monkeypatch):
    fake.install(monkeypatch)
    del sys.modules["vllm.config"].VllmConfig.use_v2_model_runner
    with pytest.raises(UnknownVersion, match="VllmConfig has no use_v2_model_runner"):
        install.install(PLAIN)


def test_a_build_that_loses_the_temperature_is_refused(served):
    served.sampler.expand_batch_to_tokens = lambda x, ends, count: torch.zeros(count)
    with pytest.raises(SystemExit, match="55005"):
        check_config(config(), print)


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
