"""What is timed, in which order, what fails or does not fit, and the files."""

import importlib
import json

import pytest
import torch

import cactus_theory as ct
from simulations.__main__ import main
from simulations.common.results import read_csv
from simulations.gpu_check import command, timing, verify
from simulations.gpu_check.timing import Bench

CPU = torch.device("cpu")
REHEARSAL = ["gpu-check", "--device", "cpu"]


def test_without_a_gpu_one_line_says_so(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["gpu-check", "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_unknown_part_is_one_line(capsys, tmp_path):
    assert main([*REHEARSAL, "devise", "--out", str(tmp_path / "out")]) == 2
    assert "PART: must be among forms, verify, decode; got 'devise'" in capsys.readouterr().err


def test_jobs_that_fail_or_have_no_time_are_named(tmp_path, monkeypatch, capsys):
    def too_large():
        raise torch.cuda.OutOfMemoryError("not enough")

    def jobs(bench):
        yield "a", lambda: [{"form": "x", "us": 1.0}]
        yield "b", too_large
        yield "c", lambda: [{"form": str(1 // 0)}]
        yield "d", lambda: [{"form": "y", "us": None}]

    monkeypatch.setattr(command, "PARTS", {"forms": jobs, "verify": lambda bench: iter(())})
    assert main([*REHEARSAL, "--out", str(tmp_path)]) == 1
    whole = json.loads((tmp_path / "gpu_check.json").read_text())
    assert [row["form"] for row in whole["tables"]["forms"]] == ["x", "y"]
    assert whole["problems"][0] == "b: not enough" and len(whole["problems"]) == 2
    assert whole["problems"][1].startswith("c: ZeroDivisionError")
    rows, origin = read_csv(tmp_path / "gpu_forms.csv")
    assert len(rows) == 2 and origin["device"] == "cpu (rehearsal)" and origin["tiny"] == "yes"
    assert not (tmp_path / "gpu_verify.csv").exists()
    assert "failed: c: ZeroDivisionError" in capsys.readouterr().out
    problems = []
    assert not command.fill([], jobs(None), -1.0, problems)
    assert problems == [f"{name}: out of time" for name in "abcd"]


def test_a_rehearsal_of_the_forms(tmp_path):
    assert main([*REHEARSAL, "forms", "--out", str(tmp_path)]) == 0
    rows, _ = read_csv(tmp_path / "gpu_forms.csv")
    assert len(rows) == 7 and all(float(row["us"]) > 0 for row in rows)


def test_a_verification_is_timed_beside_its_floor(monkeypatch, tmp_path):
    def made_up(rule, verifier, given):
        none = verifier == "block" or rule.spec == "typical"
        return None if none else lambda: given.bytes

    monkeypatch.setattr(verify, "TINY_SHAPES", [(2, 3, 64)])
    monkeypatch.setattr(verify, "TINY_SECONDS", 0.0)
    monkeypatch.setattr(verify, "fused_step", made_up)
    bench = Bench(CPU, tiny=True, bandwidth=2.0)
    rows = [row for _, job in verify.jobs(bench) for row in job()]
    assert len(rows) == 7
    for row in rows:
        # bfloat16, four and three rows of 64 for two texts, at 2 GB/s
        assert row["floor_us"] == pytest.approx(2 * (4 + 3) * 64 * 2 / 2e3)
        assert row["torch_us"] > 0 and row["repeats"] == 1
    timed = [row for row in rows if row["kernel_us"] is not None]
    assert [row["policy"] for row in timed] == ["speculative", "cactus:delta=0.1", "band:price=1"]
    for row in timed:
        assert row["share_of_bandwidth"] == pytest.approx(row["floor_us"] / row["kernel_us"])
        assert row["torch_over_kernel"] == pytest.approx(row["torch_us"] / row["kernel_us"])
        assert row["over_lossless"] == pytest.approx(row["kernel_us"] / timed[0]["kernel_us"])
    pytest.importorskip("matplotlib")
    command.write_csv(tmp_path / "gpu_verify.csv", rows, {})
    fig_gpu = importlib.import_module("paper_figures.fig_gpu")
    assert [axes.axison for axes in fig_gpu.draw(tmp_path).axes] == [True, False, False, False]


def test_jobs_are_timed_in_turn_and_what_they_depend_on_goes_on():
    calls = []
    jobs = {name: lambda name=name: calls.append(name) for name in ("a", "b")}
    found = timing.interleaved(jobs, CPU, 60.0, lambda: calls.append("-"))
    assert calls == ["a", "b", *["a", "b", "-"] * timing.MOST]
    for own in found.values():
        assert own.low <= own.microseconds <= own.high and own.repeats == timing.MOST


def test_random_numbers_of_a_timed_step_go_on_in_place():
    given = verify.inputs((2, 3, 17), CPU, seed=0)
    coins, before = given.coins[0], given.coins[0].clone()
    given.advance()
    assert given.positions.tolist() == [verify.POSITION + 4] * 2
    assert given.coins[0].data_ptr() == coins.data_ptr() and not torch.equal(coins, before)


def test_a_job_that_waits_for_the_device_is_not_captured(monkeypatch):
    class NoGraph:
        def __init__(self):
            raise AssertionError("was captured")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", NoGraph)
    monkeypatch.setattr(timing, "never_waits", lambda job, device: False)
    assert timing.captured(lambda: None, CPU) is None


def test_one_call_of_a_kernel_has_memory_of_its_own(monkeypatch):
    monkeypatch.setattr(verify, "has_kernel", lambda rule, verifier: verifier == "chain")
    monkeypatch.setattr(verify, "Workspace", lambda *sizes: sizes)
    calls = []
    monkeypatch.setattr(verify, "verify_logits", lambda *given, **own: calls.append(own))
    given, rule = verify.inputs((2, 3, 17), CPU, seed=0), ct.policy("speculative")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert verify.fused_step(rule, "chain", given) is None
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert verify.fused_step(rule, "block", given) is None
    step = verify.fused_step(rule, "chain", given)
    assert step is not None and not calls
    step()
    assert calls[0]["workspace"] == (2, 3, 17, CPU) and calls[0]["verifier"] == "chain"


@pytest.mark.gpu
def test_a_job_that_reads_on_the_host_is_timed_without_a_graph():
    cuda = torch.device("cuda")
    numbers = torch.arange(1000.0, device=cuda)
    works = {"here": lambda: numbers * 2, "host": lambda: float(numbers.sum())}
    found = timing.interleaved(works, cuda, 0.0)
    assert found["here"].graph and not found["host"].graph and found["host"].microseconds > 0
