"""How the report calls the kernels and their checks, where they are and where they are not."""

import types

import pytest
import torch

import cactus_theory as ct
from simulations.gpu_check import agreement, fused, sections, verify
from simulations.gpu_check.budget import Budget
from simulations.gpu_check.sections import Bench, Note, Settings

CPU = torch.device("cpu")
NAMES = ("kernel_laws", "kernel_streams", "kernel_agreement", "zero_tokens")


def bench(tiny: bool = True, device: str = "cpu") -> Bench:
    return Bench(Settings(device, tiny=tiny, seed=5), Budget(60))


def test_a_module_that_is_not_there_is_none():
    assert sections.optional("simulations.gpu_check.no_such_file", "x") is None
    assert sections.optional("simulations.gpu_check.device", "rows") is sections.load("device")


def test_checks_that_are_not_there_are_rows_that_say_so(monkeypatch):
    monkeypatch.setattr(agreement, "optional", lambda module, name: None)
    found = [row for _, job in agreement._kernel_jobs(bench()) for row in job()]
    rows = [row for row in found if not isinstance(row, Note)]
    assert len(rows) == 3 and {row["passed"] for row in rows} == {None}
    assert {row["note"] for row in rows} == {agreement.NOT_THERE}


@pytest.mark.parametrize(("device", "tiny"), [("cpu", True), ("cuda", False)])
def test_kernel_checks_get_device_amount_and_seed(device, tiny, monkeypatch):
    asked = []

    def there(module, name):
        assert module == agreement.KERNEL_CHECKS
        one = {"check": name, "passed": True}
        return lambda *given: asked.append((name, *given)) or (one if "zero" in name else [one])

    monkeypatch.setattr(agreement, "optional", there)
    found = [row for _, job in agreement._kernel_jobs(bench(tiny, device)) for row in job()]
    counted = {name for name in NAMES if name != "kernel_laws" or not tiny}
    assert {given[0] for given in asked} == counted
    assert {getattr(row, "what", None) for row in found} == (
        {None, "kernel_laws"} if tiny else {None}
    )
    assert all(given[1] == torch.device(device) and given[-1] == 5 for given in asked)
    if not tiny:
        compared = [given for given in asked if given[0] == "kernel_agreement"]
        assert sum(given[2] for given in compared) >= 10_000
        assert compared[-1][3] == [151_936]


def test_one_call_of_a_kernel(monkeypatch):
    calls = []

    def verify_logits(rule, target, draft, ids, **options):
        calls.append((rule.spec, target.shape, draft.shape, ids.shape, options))

    module = {
        "has_kernel": lambda rule, verifier: verifier == "chain",
        "verify_logits": verify_logits,
        "Workspace": lambda *sizes: sizes,
        "LogitsVerdict": lambda ids, counts: types.SimpleNamespace(ids=ids, counts=counts),
    }
    given = verify.inputs((2, 3, 17), CPU, seed=0)
    rule = ct.policy("speculative")
    monkeypatch.setattr(fused, "optional", lambda place, name: module[name])
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert fused.fused_step(rule, "chain", given) is None
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert fused.fused_step(rule, "block", given) is None
    step = fused.fused_step(rule, "chain", given)
    assert step is not None and not calls
    step()
    [(spec, target, draft, ids, options)] = calls
    assert (spec, target, draft, ids) == ("speculative", (2, 4, 17), (2, 3, 17), (2, 3))
    assert options["workspace"] == (2, 3, 17, CPU) and options["verifier"] == "chain"
    assert options["out"].ids.shape == (2, 4) and options["out"].counts.shape == (2,)
    assert options["seeds"].tolist() == [0, 1] and options["positions"].shape == (2,)


def test_drafts_of_the_timed_step_are_accepted_about_as_often_as_usual():
    given = verify.inputs((4, 4, 1000), CPU, seed=0)
    q, p = (own.float().softmax(-1) for own in (given.target_logits[:, :-1], given.draft_logits))
    assert 0.4 < float(torch.minimum(q, p).sum(-1).mean()) < 0.8
    assert given.bytes == 2 * 4 * (5 + 4) * 1000
