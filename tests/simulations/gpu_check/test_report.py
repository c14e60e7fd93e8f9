"""The files of a report, its picture and its page."""

import importlib
import json
import math
import re

import pytest
import torch

import cactus_theory as ct
from simulations.common.results import read_csv
from simulations.gpu_check import device, page, verify
from simulations.gpu_check.command import FILES, PAGE, Report, clear
from simulations.gpu_check.decode import SETUPS, finisher, policies
from simulations.gpu_check.sections import Bench, Budget, Note, Settings
from tests.amounts import thorough
from tests.simulations.gpu_check.fakes import CHECK, STEP

MADE = {"command": "python -m simulations gpu-check", "device": "A <GPU>"}
CPU = torch.device("cpu")


def whole(folder) -> dict:
    return json.loads((folder / "gpu_check.json").read_text())


def filled() -> Report:
    """Return a report with every table, made up but consistent."""
    report = Report(dict(MADE))
    report.add("device", {"quantity": "copy bandwidth", "value": 3000.0, "unit": "GB/s"})
    report.add("agreement", CHECK)
    report.add("agreement", {"check": "laws", "p_value": torch.tensor(0.25), "passed": None})
    for policy in ("speculative", "band:price=1"):
        share = {"share_of_bandwidth": 0.75, "torch_over_kernel": 8.0, "over_lossless": 1.0}
        report.add("verify", STEP | {"policy": policy, "kernel_us": 20.0} | share)
    finish = finisher(SETUPS[0])
    plain = {"policy": "plain", "verifier": "chain", "num_draft_tokens": 0, "tokens_per_call": 1.0}
    report.add("decode", finish(plain | {"tokens_per_second": 100.0, "roofline_ms": 8.0}))
    for number, spec in enumerate(policies(tiny=False)):
        policy, _, verifier = spec.partition("@")
        row = {"policy": policy, "verifier": verifier or "chain", "num_draft_tokens": 4}
        row |= {"tokens_per_call": 3.0, "tokens_per_second": 180.0 + number, "c": 0.1, "v": 1.1}
        row |= {"step_ms": 10.0, "emitted_kl_per_token": 0.01 * number, "verify_ms": 0.1}
        report.add("decode", finish(row))
    report.notes.append(Note("skipped", "one thing", "out of time"))
    return report


def test_the_files_are_few_and_agree(tmp_path):
    report = filled()
    report.write(tmp_path, picture=False)
    assert {path.name for path in tmp_path.iterdir()} == set(FILES) - {"gpu.png"}
    assert len(FILES) == 6
    rows, made = read_csv(tmp_path / "gpu_checks.csv")
    assert made == MADE
    assert rows[0] == {"check": "made up", "passed": "True", "p_value": ""}
    assert rows[1]["p_value"] == "0.25" and rows[1]["passed"] == ""
    stored = whole(tmp_path)
    assert stored["tables"] == report.tables and stored["notes"][0]["what"] == "one thing"
    clear(tmp_path)
    assert not list(tmp_path.iterdir())


def written(report, folder) -> str:
    report.write(folder, picture=False)
    return (folder / PAGE).read_text()


def test_the_page_says_the_verdict_first(tmp_path):
    report = filled()
    report.picture = b"png"
    text = written(report, tmp_path)
    assert re.findall(r"<li>(.*?)</li>", text) == whole(tmp_path)["verdict"]
    items = re.findall(r"<li>(.*?)</li>", text)
    assert items[0] == "Right: all 1 checks pass; laws: not there."
    assert items[1] == (
        "Verification by speculative at B = 1, K = 4, V = 9: 20 µs, 75% of copy bandwidth, "
        "8.0 times as fast as torch."
    )
    assert items[3].startswith("8b + 0.6b, batch 1, lossless: speculative@block at K = 4 makes")
    assert items[4].startswith("8b + 0.6b, batch 1, at most 0.1 nats a token: band:price=0.5@block")
    assert "A &lt;GPU&gt;" in text and page.PUBLISHED in text and "one thing" in text
    assert "data:image/png;base64,cG5n" in text and "rehearsal" not in text


def test_lossless_needs_no_meter_and_what_is_unknown_does_not_win(tmp_path):
    report = filled()
    for row in report.tables["decode"]:
        row["emitted_kl_per_token"] = None
    items = re.findall(r"<li>(.*?)</li>", written(report, tmp_path))
    assert "speculative@block" in items[3] and "speculative@block" in items[4]


def test_nan_and_infinity_stay_readable(tmp_path):
    report = Report(dict(MADE))
    report.add("agreement", CHECK | {"largest_difference": math.nan, "passed": False})
    report.write(tmp_path, picture=False)
    assert '"largest_difference": "nan"' in (tmp_path / "gpu_check.json").read_text()
    assert report.failed and "WRONG" in (tmp_path / "gpu_check.html").read_text()


def test_without_matplotlib_the_page_has_no_picture(tmp_path, monkeypatch):
    def draw(*_):
        raise ValueError("matplotlib is needed")

    monkeypatch.setattr("paper_figures.__main__.draw", draw)
    report = filled()
    report.write(tmp_path, picture=True)
    text = (tmp_path / "gpu_check.html").read_text()
    assert "<img" not in text and "matplotlib is needed" in text
    assert not report.failed


@thorough
def test_the_picture_is_drawn_from_the_tables(tmp_path):
    pytest.importorskip("matplotlib")
    report = filled()
    report.write(tmp_path, picture=True)
    report.write(tmp_path, picture=False)  # as after the goals
    assert "data:image/png;base64," in (tmp_path / "gpu_check.html").read_text()
    assert {path.name for path in tmp_path.iterdir()} == set(FILES)
    assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")
    fig_gpu = importlib.import_module("paper_figures.fig_gpu")
    assert all(ax.axison for ax in fig_gpu.draw(tmp_path).axes)
    (tmp_path / "gpu_verify.csv").unlink()
    drawn = [ax.axison for ax in fig_gpu.draw(tmp_path).axes]
    assert drawn == [False, True, True, True]
    assert not any(ax.axison for ax in fig_gpu.draw(tmp_path / "nowhere").axes)


def test_a_verification_is_timed_beside_its_floor(monkeypatch):
    monkeypatch.setattr(verify, "TINY_SHAPES", [(2, 3, 64)])
    monkeypatch.setattr(verify, "TINY_SECONDS", 0.0)
    monkeypatch.setattr(verify, "fused_step", _made_up_kernel)
    facts = [{"quantity": "copy bandwidth", "value": 2.0, "unit": "GB/s"}]
    bench = Bench(Settings("cpu", tiny=True), Budget(60), {"device": facts})
    rows = list(verify.rows(bench))
    assert not [row for row in rows if isinstance(row, Note)]
    kinds = [(row["policy"].partition(":")[0], row["verifier"]) for row in rows]
    usual = [
        (name, kind) for name in ("speculative", "cactus", "band") for kind in verify.VERIFIERS
    ]
    assert kinds == [*usual, ("typical", "chain")]
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


def _made_up_kernel(rule, verifier, given):
    return None if verifier == "block" or rule.spec == "typical" else lambda: given.bytes


def test_repeats_shrink_with_the_time():
    calls = []
    few = device.timed(lambda: calls.append(1), CPU, 0.0)
    assert (few.repeats, few.graph, len(calls)) == (1, False, 2)
    assert device.timed(lambda: None, CPU, 60.0).repeats == device.MOST


def test_jobs_are_timed_in_turn_and_what_they_depend_on_goes_on():
    calls = []
    jobs = {name: lambda name=name: calls.append(name) for name in ("a", "b")}
    found = device.interleaved(jobs, CPU, 60.0, lambda: calls.append("-"))
    assert calls == ["a", "b", *["a", "b", "-"] * device.MOST]
    for own in found.values():
        assert own.low <= own.microseconds <= own.high and own.repeats == device.MOST


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
    asked = []
    monkeypatch.setattr(device, "never_waits", lambda job, device: asked.append(device))
    assert device.captured(lambda: None, CPU) is None and asked == [CPU]


def test_a_job_is_captured_as_the_rounds_of_a_decode_are(monkeypatch):
    class Graph:
        def __init__(self, compute, on):
            self.compute, self.ends = compute, []
            assert on == CPU

        def prepare(self, end):
            self.ends.append(end)
            self.compute(end)

        def __call__(self, end):
            assert self.ends == [end]  # captured before it is timed

    calls = []
    monkeypatch.setattr(device, "Repeated", Graph)
    replay = device.captured(lambda: calls.append(1), CPU)
    assert len(calls) == 1 and replay is not None
    replay()
    assert len(calls) == 1


def test_rivals_of_a_step_copy_as_many_bytes_and_may_be_compiled(monkeypatch):
    given = verify.inputs((2, 3, 17), CPU, seed=0)
    monkeypatch.setattr(torch, "compile", lambda job, dynamic: (job, dynamic))
    works = verify.rivals(ct.policy("speculative"), "chain", given, compiles=True)
    assert list(works) == ["torch", "copy", "compiled"]
    assert works["compiled"] == (works["torch"], False)
    assert 2 * works["copy"]().numel() == given.bytes


@pytest.mark.gpu
def test_a_job_that_reads_on_the_host_is_timed_without_a_graph():
    cuda = torch.device("cuda")
    numbers = torch.arange(1000.0, device=cuda)
    assert device.timed(lambda: numbers * 2, cuda, 0.0).graph
    before = torch.cuda.current_stream()
    host = device.timed(lambda: float(numbers.sum()), cuda, 0.0)
    assert not host.graph and host.microseconds > 0
    assert torch.cuda.current_stream() == before
    assert device.timed(lambda: numbers * 2, cuda, 0.0).graph
