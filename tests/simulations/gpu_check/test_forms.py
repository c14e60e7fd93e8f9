import numpy as np
import pytest
import torch

from simulations.bench import gpu_check


def test_the_stored_programs_agree_on_the_cpu():
    rows = list(gpu_check._reference_checks(torch.device("cpu")))
    assert len(rows) == 20 and all(row["passed"] for row in rows)
    assert {row["quantity"] for row in rows} >= {"optimal acceptance, kl"}


def test_a_wrong_answer_is_seen(monkeypatch, tmp_path):
    with np.load(gpu_check.REFERENCE) as stored:
        arrays = dict(stored)
    arrays["acceptance"] = arrays["acceptance"] + np.where(arrays["divergence"] == "kl", 2e-6, 0)
    np.savez(tmp_path / "wrong.npz", **arrays)
    monkeypatch.setattr(gpu_check, "REFERENCE", tmp_path / "wrong.npz")
    rows = gpu_check._reference_checks(torch.device("cpu"))
    failed = [row["quantity"] for row in rows if not row["passed"]]
    assert failed == ["optimal acceptance, kl"] * 2


@pytest.mark.gpu
def test_the_stored_programs_agree_on_the_device():
    rows = gpu_check._reference_checks(torch.device("cuda"))
    assert all(row["passed"] for row in rows)
