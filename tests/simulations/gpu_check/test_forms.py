import numpy as np
import pytest
import torch

from simulations.gpu_check import forms


def test_the_stored_programs_agree_on_the_cpu():
    rows = list(forms.against_programs(torch.device("cpu")))
    assert len(rows) == 20 and all(row["passed"] for row in rows)
    assert {row["check"] for row in rows} >= {"optimal acceptance, kl"}


def test_a_wrong_answer_is_seen(monkeypatch, tmp_path):
    with np.load(forms.REFERENCE) as stored:
        arrays = dict(stored)
    arrays["acceptance"] = arrays["acceptance"] + np.where(arrays["divergence"] == "kl", 2e-6, 0)
    np.savez(tmp_path / "wrong.npz", **arrays)
    monkeypatch.setattr(forms, "REFERENCE", tmp_path / "wrong.npz")
    rows = forms.against_programs(torch.device("cpu"))
    failed = [row["check"] for row in rows if not row["passed"]]
    assert failed == ["optimal acceptance, kl"] * 2


def test_every_form_and_family_is_compared(monkeypatch):
    rows = list(forms.against_cpu(7, torch.device("cpu"), seed=0))
    families, forms_there = ({row[key] for row in rows} for key in ("family", "check"))
    assert len(rows) == 5 * 17 == len(families) * len(forms_there)
    assert all(row["passed"] for row in rows)
    assert any(name.startswith("verify_block") for name in forms_there)


def test_a_difference_beyond_rounding_and_nan_fail():
    assert not forms._row("x", 7, 4, "random", 2e-9, forms.AGREEMENT)["passed"]
    assert not forms._row("x", 7, 4, "random", float("nan"), forms.AGREEMENT)["passed"]


@pytest.mark.gpu
def test_the_stored_programs_agree_on_the_device():
    rows = forms.against_programs(torch.device("cuda"))
    assert all(row["passed"] for row in rows)


@pytest.mark.gpu
def test_the_device_agrees_with_the_cpu():
    rows = forms.against_cpu(1000, torch.device("cuda"), seed=0)
    assert all(row["passed"] for row in rows)
