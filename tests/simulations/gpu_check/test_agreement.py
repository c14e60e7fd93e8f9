"""Checks of the torch forms, and how the report calls the kernels and their checks."""

import numpy as np
import pytest
import torch

import cactus_theory as ct
from simulations.gpu_check import agreement, verify
from simulations.gpu_check.sections import Bench, Budget, Settings

CPU = torch.device("cpu")
NAMES = ("kernel_laws", "kernel_streams", "kernel_agreement", "zero_tokens")


def bench(tiny: bool = True, device: str = "cpu") -> Bench:
    return Bench(Settings(device, tiny=tiny, seed=5), Budget(60))


def test_the_stored_programs_agree_on_the_cpu():
    rows = list(agreement.against_programs(torch.device("cpu")))
    assert len(rows) == 20 and all(row["passed"] for row in rows)
    assert {row["check"] for row in rows} >= {"optimal acceptance, kl"}


def test_a_wrong_answer_is_seen(monkeypatch, tmp_path):
    with np.load(agreement.REFERENCE) as stored:
        arrays = dict(stored)
    arrays["acceptance"] = arrays["acceptance"] + np.where(arrays["divergence"] == "kl", 2e-6, 0)
    np.savez(tmp_path / "wrong.npz", **arrays)
    monkeypatch.setattr(agreement, "REFERENCE", tmp_path / "wrong.npz")
    rows = agreement.against_programs(torch.device("cpu"))
    failed = [row["check"] for row in rows if not row["passed"]]
    assert failed == ["optimal acceptance, kl"] * 2


def test_every_form_and_family_is_compared(monkeypatch):
    rows = list(agreement.against_cpu(7, torch.device("cpu"), seed=0))
    families, checks = ({row[key] for row in rows} for key in ("family", "check"))
    assert len(rows) == 5 * 17 == len(families) * len(checks)
    assert all(row["passed"] for row in rows)
    assert any(name.startswith("verify_block") for name in checks)


def test_a_difference_beyond_rounding_and_nan_fail():
    assert not agreement._row("x", 7, 4, "random", 2e-9, agreement.AGREEMENT)["passed"]
    assert not agreement._row("x", 7, 4, "random", float("nan"), agreement.AGREEMENT)["passed"]


@pytest.mark.gpu
def test_the_stored_programs_agree_on_the_device():
    rows = agreement.against_programs(torch.device("cuda"))
    assert all(row["passed"] for row in rows)


@pytest.mark.gpu
def test_the_device_agrees_with_the_cpu():
    rows = agreement.against_cpu(1000, torch.device("cuda"), seed=0)
    assert all(row["passed"] for row in rows)


@pytest.mark.parametrize(("device", "tiny"), [("cpu", True), ("cuda", False)])
def test_kernel_checks_get_device_amount_and_seed(device, tiny, monkeypatch):
    asked = []

    def there(name):
        one = {"check": name, "passed": True}
        return lambda *given: asked.append((name, *given)) or (one if "zero" in name else [one])

    for name in NAMES:
        monkeypatch.setattr(agreement.kernel, name, there(name))
    monkeypatch.setattr(agreement, "has_triton", lambda: False)
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

    given = verify.inputs((2, 3, 17), CPU, seed=0)
    rule = ct.policy("speculative")
    monkeypatch.setattr(verify, "has_kernel", lambda rule, verifier: verifier == "chain")
    monkeypatch.setattr(verify, "verify_logits", verify_logits)
    monkeypatch.setattr(verify, "Workspace", lambda *sizes: sizes)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert verify.fused_step(rule, "chain", given) is None
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert verify.fused_step(rule, "block", given) is None
    step = verify.fused_step(rule, "chain", given)
    assert step is not None and not calls
    step()
    [(spec, target, draft, ids, options)] = calls
    assert (spec, target, draft, ids) == ("speculative", (2, 4, 17), (2, 3, 17), (2, 3))
    assert options["workspace"] == (2, 3, 17, CPU) and options["verifier"] == "chain"
    out = options["out"]
    assert out.output_token_ids.shape == (2, 4) and out.num_accepted.shape == (2,)
    assert options["seeds"].tolist() == [0, 1] and options["positions"].shape == (2,)


def test_drafts_of_the_timed_step_are_accepted_about_as_often_as_usual():
    given = verify.inputs((4, 4, 1000), CPU, seed=0)
    q, p = (own.float().softmax(-1) for own in (given.target_logits[:, :-1], given.draft_logits))
    assert 0.4 < float(torch.minimum(q, p).sum(-1).mean()) < 0.8
    assert given.bytes == 2 * 4 * (5 + 4) * 1000
