"""The benchmarks at their smallest: every job is there, ratios are those of the times."""

from pathlib import Path

import pytest

from simulations.__main__ import main
from simulations.bench import theory, verify
from simulations.common.results import read_csv


def run(what: str, out: Path) -> tuple[list[dict[str, str]], dict[str, str]]:
    assert main(["bench", what, "--repeats", "1", "--out", str(out / "x.csv")]) == 0
    return read_csv(out / "x.csv")


def test_every_rule_in_the_list_is_timed_beside_a_softmax(tmp_path, monkeypatch, capsys) -> None:
    for name, value in {"VOCAB": 300, "BATCH": 2, "WIDTH": 3}.items():
        monkeypatch.setattr(verify, name, value)
    rows, notes = run("verify", tmp_path)
    assert notes["command"] == "python -m simulations bench verify --repeats 1"
    jobs = [verify.SOFTMAX, verify.DENSE, *(f"verify_chain, {s}" for s in verify.POLICIES)]
    jobs += [f"meter of 6 rows, {spec}" for spec in verify.METERED]
    jobs += [f"verify_block, {spec}" for spec in verify.BLOCKS]
    assert [row["job"] for row in rows] == jobs * len(verify.NOISES)
    for row in rows:
        softmax = next(other for other in rows if other["draft"] == row["draft"])
        share = float(row["milliseconds"]) / float(softmax["milliseconds"])
        assert float(row["softmaxes"]) == pytest.approx(share)
        assert (row["accepted"] != "") == row["job"].startswith("verify")
        assert (row["times_chain"] != "") == row["job"].startswith("verify_block")
    assert capsys.readouterr().out.count("verify_chain, ") == len(verify.POLICIES) * 2


def test_the_closed_forms_are_timed(tmp_path, monkeypatch) -> None:
    for name, value in {"LARGE": 200, "MEDIUM": 100, "BATCH": 2, "LARGE_BATCH": 3}.items():
        monkeypatch.setattr(theory, name, value)
    rows, notes = run("theory", tmp_path)
    assert notes["command"].endswith("bench theory --repeats 1")
    assert rows[0]["job"] == "softmax in float64, V = 200"
    assert sum("2 rows" in row["job"] for row in rows) == 1
    batches = [row["job"] for row in rows if row["rows"] == "3"]
    assert [job.replace("of a batch", "one by one") for job in batches[::2]] == batches[1::2]
    assert len(batches) == 2 * (len(theory.LAWS) + 2)
