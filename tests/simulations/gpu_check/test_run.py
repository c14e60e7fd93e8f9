"""What happens around the sections: order, time, failures, and the report after each."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from simulations.__main__ import main
from simulations.gpu_check import sections
from simulations.gpu_check.command import FILES
from simulations.gpu_check.sections import (
    SECTIONS,
    Budget,
    Note,
    Settings,
    in_turn,
    load,
    run_apart,
    section_names,
)
from tests.amounts import THOROUGH
from tests.simulations.gpu_check.fakes import CHECK, STEP, gives, install

HERE = ["gpu-check", "--device", "cpu", "--one-process"]


def whole(out: Path) -> dict:
    return json.loads((out / "gpu_check.json").read_text())


def test_without_a_gpu_one_line_says_so(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["gpu-check", "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_sections_run_in_their_own_order_and_each_has_its_file():
    assert section_names(["goals", "device", "goals"]) == ["device", "goals"]
    assert all(callable(load(name)) and SECTIONS[name].weight > 0 for name in SECTIONS)
    with pytest.raises(ValueError, match="SECTION: must be among device, .*got 'devise'"):
        section_names(["devise"])


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--target", "somewhere"], "--target: must come with --draft"),
        (["--minutes", "0"], "--minutes: must be above 0; got 0"),
        (["--sections", "devise"], "must be among device"),
    ],
)
def test_wrong_flags_are_one_line(flags, says, capsys, tmp_path):
    assert main([*HERE, *flags, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_broken_section_is_named_and_the_others_are_kept(tmp_path, monkeypatch, capsys):
    seen = {}

    def breaks(bench):
        seen.update(whole(tmp_path)["tables"])  # written after the sections before
        yield STEP
        raise RuntimeError("an illegal memory access\nand more")

    def goes_on(bench):
        seen["before"] = sorted(bench.tables)
        yield {"goal": "x", "needed": "", "measured": None, "unit": "", "verdict": "not measured"}

    install(
        monkeypatch,
        device=gives({"quantity": "q", "value": 1.0, "unit": ""}),
        agreement=gives(CHECK),
        verify=breaks,
        goals=goes_on,
    )
    monkeypatch.setattr("simulations.gpu_check.command.DRAWN", ())
    assert main([*HERE, "--out", str(tmp_path)]) == 1
    assert {"device", "agreement"} == set(seen) - {"before"}
    assert seen["before"] == ["agreement", "device", "verify"]
    report = whole(tmp_path)
    assert list(report["tables"]) == ["device", "agreement", "verify", "goals"]
    [note] = report["notes"]
    assert (note["kind"], note["what"]) == ("failed", "verify")
    assert "RuntimeError: an illegal memory access (test_run.py:" in note["why"]
    page = (tmp_path / "gpu_check.html").read_text()
    assert "FAILED to run, 1 in number: verify." in page and "illegal memory" in page
    assert "failed: verify: RuntimeError" in capsys.readouterr().out


def test_a_check_that_fails_makes_the_run_fail(tmp_path, monkeypatch, capsys):
    install(monkeypatch, agreement=gives(CHECK, CHECK | {"passed": False, "vocabulary": 7}))
    assert main([*HERE, "--out", str(tmp_path)]) == 1
    assert "WRONG: 1 of 2 checks fail: made up, vocabulary 7." in capsys.readouterr().out
    install(monkeypatch, agreement=gives(CHECK, {"check": "kernels", "passed": None}))
    assert main([*HERE, "--out", str(tmp_path)]) == 0
    assert "Right: all 1 checks pass; kernels: not there." in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_section_that_kills_its_process_or_hangs_leaves_its_rows(monkeypatch):
    monkeypatch.setattr(sections, "START", "fork")  # so that the process knows these sections

    def dies(bench):
        yield CHECK
        os.kill(os.getpid(), signal.SIGKILL)

    def hangs(bench):
        yield CHECK
        time.sleep(60)

    install(monkeypatch, agreement=dies, verify=hangs, goals=gives(CHECK))
    row, note = run_apart("agreement", Settings("cpu"), {}, 30)
    assert row == CHECK and note.kind == "failed"
    assert note.why == f"its process ended with code {-signal.SIGKILL}"
    started = time.monotonic()
    row, note = run_apart("verify", Settings("cpu"), {}, 0.1, grace=0.2)
    assert row == CHECK and "stopped" in note.why and time.monotonic() - started < 20
    assert list(run_apart("goals", Settings("cpu"), {}, 30)) == [CHECK]


def test_jobs_that_fail_or_have_no_time_are_named():
    def fails():
        yield CHECK
        raise ValueError("broken")

    def too_large():
        raise torch.cuda.OutOfMemoryError("not enough")

    clock = iter([0.0, 0.0, 0.0, 0.0, 2.0])
    jobs = [("a", fails), ("b", too_large), ("c", lambda: [CHECK]), ("d", lambda: [CHECK])]
    found = list(in_turn(jobs, Budget(1.0, lambda: next(clock))))
    assert found == [
        CHECK,
        Note("failed", "a", "ValueError: broken"),
        Note("skipped", "b", "not enough"),
        CHECK,
        Note("skipped", "d", "out of time"),
    ]


def test_time_that_a_section_leaves_is_there_for_the_next():
    now = [0.0]
    budget = Budget(100.0, lambda: now[0])
    assert budget.share("a", {"a": 1, "b": 3}) == 25
    now[0] = 5.0
    assert budget.share("b", {"b": 3}) == 95
    assert budget.share("b", {"b": 3, "c": 2}) == pytest.approx(57)
    now[0] = 200.0
    assert budget.left == 0 == budget.share("c", {"c": 2})


def test_with_no_time_everything_is_skipped_by_name(tmp_path):
    assert main([*HERE, "--minutes", "0.01", "--out", str(tmp_path)]) == 0
    report = whole(tmp_path)
    assert list(report["tables"]) == ["goals"]
    assert {row["verdict"] for row in report["tables"]["goals"]} == {"not measured"}
    skipped = [note["what"] for note in report["notes"]]
    assert {"copy bandwidth", "stored programs", "torch forms at V = 7"} <= set(skipped)
    assert "speculative by chain at B = 1, K = 2, V = 64" in skipped
    assert any("batch 1" in name for name in skipped)


def test_the_smallest_sections_make_a_report(tmp_path, monkeypatch):
    (tmp_path / "gpu_verify.csv").write_text("of an earlier run")
    flags = ["--sections", "device", "goals", "--out", str(tmp_path)]
    monkeypatch.setattr("simulations.gpu_check.device.PACKAGES", ("torch", "no-such-package"))
    assert main([*HERE, *flags]) == 0
    report = whole(tmp_path)
    facts = {row["quantity"]: row["value"] for row in report["tables"]["device"]}
    assert facts["copy bandwidth"] > 0 and facts["matmul, bfloat16"] > 0
    assert facts["no-such-package"] == "not there" and facts["device"] == "cpu (rehearsal)"
    assert report["provenance"]["command"].endswith("--one-process")
    page = (tmp_path / "gpu_check.html").read_text()
    assert "A rehearsal" in page and "copy bandwidth" in page and "http" not in page
    assert not (tmp_path / "gpu_verify.csv").exists()


def test_reports_of_one_section_each_become_one(tmp_path, monkeypatch):
    monkeypatch.setattr("simulations.gpu_check.command.DRAWN", ())
    fact = {"quantity": "q", "value": 1.0, "unit": ""}
    skipped = Note("skipped", "a step", "out of time")
    install(monkeypatch, device=gives(fact), agreement=gives(CHECK), verify=gives(STEP, skipped))
    for name in ("device", "agreement", "verify"):
        assert main([*HERE, name, "--out", str(tmp_path)]) == 0
    report = whole(tmp_path)
    assert set(report["tables"]) == {"device", "agreement", "verify"}
    assert [note["what"] for note in report["notes"]] == ["a step"]
    assert report["provenance"]["command"].count("gpu-check") == 3
    again = [*HERE, "verify", "--out", str(tmp_path)]
    install(monkeypatch, verify=gives(STEP, STEP))
    assert main(again) == 0
    assert len(whole(tmp_path)["tables"]["verify"]) == 2 and not whole(tmp_path)["notes"]
    assert (tmp_path / "gpu_checks.csv").exists()
    monkeypatch.setattr("simulations.gpu_check.command.code_digest", lambda *_: "other code")
    assert main(again) == 0
    assert set(whole(tmp_path)["tables"]) == {"verify"}


@pytest.mark.skipif(
    not THOROUGH, reason="the whole rehearsal takes a minute; run by make test-thorough"
)
def test_the_whole_rehearsal(tmp_path, capfd):
    started = sum(os.times()[:4])
    assert main(["gpu-check", "--device", "cpu", "--tiny", "--out", str(tmp_path)]) == 0
    assert sum(os.times()[:4]) - started < 60  # seconds of one core, of all processes
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FILES)
    report = whole(tmp_path)
    assert list(report["tables"]) == list(SECTIONS) == list(report["seconds"])
    assert all(row["passed"] is not False for row in report["tables"]["agreement"])
    assert "data:image/png;base64," in (tmp_path / "gpu_check.html").read_text()
    assert "Traceback" not in capfd.readouterr().err
