"""Policies on whole answers: a killed run goes on, and sums by prompt make the table."""

import json
import os

import numpy as np
import pytest

from simulations.__main__ import main
from simulations.answers import SUMS, by_prompt, table_of
from simulations.common.inputs import DATA
from simulations.common.results import read_csv
from tests.amounts import thorough

SMALL = "--num-prompts 3 --answers 2 --max-new-tokens 4 --batch 4".split()
FACTS = ["--prompts", "simulations/data/facts.jsonl", "--score", "word"]


def asked(tmp_path, *more):
    return main(["answers", *SMALL, "--out", str(tmp_path), *more])


def numbers(row):
    return {name: float(value or "nan") for name, value in row.items()
            if name not in ("policy", "which")}  # fmt: skip


def test_a_killed_run_goes_on_to_the_same_table(tmp_path) -> None:
    assert asked(tmp_path, *FACTS) == 0
    whole = [read_csv(tmp_path / name)[0] for name in ("answers.csv", "by_prompt.csv")]
    journal = tmp_path / "journal.jsonl"
    lines = journal.read_text(encoding="utf-8").splitlines(keepends=True)
    assert len(lines) == 1 + 2 * 2 and len(json.loads(lines[1])["rows"]) == 4
    journal.write_text("".join(lines[:3]) + lines[3][:20], encoding="utf-8")
    assert asked(tmp_path, *FACTS) == 0
    assert [read_csv(tmp_path / name)[0] for name in ("answers.csv", "by_prompt.csv")] == whole
    assert asked(tmp_path / "again", "--sums", str(tmp_path / "by_prompt.csv")) == 0
    again, source = read_csv(tmp_path / "again/answers.csv")
    assert "--sums" in source["command"]
    # sums are written with 12 digits
    assert [numbers(row) for row in again] == [
        pytest.approx(numbers(row), abs=1e-10, nan_ok=True) for row in whole[0]
    ]
    assert asked(tmp_path, "--num-prompts", "2", *FACTS) == 2  # of other prompts
    assert asked(tmp_path / "none", "--score", "word") == 2  # prompts without an answer


def test_a_policy_that_is_lossless_has_the_same_answers(tmp_path) -> None:
    assert asked(tmp_path, "--policy", "band:price=inf") == 0
    rows, _ = read_csv(tmp_path / "by_prompt.csv")
    mine, theirs = ([float(row[name]) for row in own for name in SUMS]
                    for own in (rows[:3], rows[3:]))  # fmt: skip
    assert any(row["surprise"] != "0" for row in rows)
    assert mine == pytest.approx(theirs, abs=1e-12)
    assert asked(tmp_path / "0", "--temperature", "0", "--policy", "regret:price=0.5") == 0
    table, _ = read_csv(tmp_path / "0/answers.csv")
    assert [row["policy"] for row in table] == ["regret:price=inf", "regret:price=0.5"]
    assert {row["surprise"] for row in table} == {""}


def test_scores_of_single_answers_are_tested_by_mcnemar_and_holm() -> None:
    lossless = np.ones((40, len(SUMS)))
    lossless[:, SUMS.index("score")] = [1] * 2 + [0] * 10 + [1] * 28
    better, same = lossless.copy(), lossless.copy()
    better[:12, SUMS.index("score")] = [0] * 2 + [1] * 10
    sums = {"speculative": lossless, "better": better, "same": same}
    _, other, equal = table_of(by_prompt(sums, [""] * 40))
    assert (other["right_alone"], other["lossless_right_alone"]) == (10, 2)
    # by hand: 2 (1 + 12 + 66)/4096, and twice it among two policies
    assert other["p"] == pytest.approx(158 / 4096)
    assert other["p_of_all"] == pytest.approx(316 / 4096) and (equal["p"], equal["p_of_all"]) == (
        1,
        1,
    )
    several = {name: own * 2 for name, own in sums.items()}  # two answers a prompt
    assert {row["p"] for row in table_of(by_prompt(several, [""] * 40))} == {None}


TABLES = "answers", "answers_facts", "answers_ifeval", "greedy_ifeval", "greedy_ifeval_chain"


@pytest.mark.parametrize("name", TABLES)
def test_the_committed_table_is_made_from_the_committed_sums(tmp_path, name) -> None:
    made = DATA / f"{name}_by_prompt.csv"
    assert asked(tmp_path, "--sums", str(made)) == 0 and (tmp_path / "answers.png").is_file()
    again, whole = (read_csv(file)[0] for file in (tmp_path / "answers.csv", DATA / f"{name}.csv"))
    assert [row["which"] for row in again] == [row["which"] for row in whole]
    # sums are written with 12 digits
    assert [numbers(row) for row in again] == [
        pytest.approx(numbers(row), rel=1e-9, abs=1e-10, nan_ok=True) for row in whole
    ]


# the first answer that is scored kills its process
DEADLY = """
import os, pathlib, signal

def score(prompt, completion):
    died = pathlib.Path(__file__).with_name("died")
    if completion and not died.exists():
        died.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    return len(completion)
"""


@thorough
def test_two_workers_one_of_which_is_killed_make_the_same_table(tmp_path) -> None:
    pytest.importorskip("distributed", reason="needs the extra cluster")
    (tmp_path / "deadly.py").write_text(DEADLY)
    scored = ["--trust-code", "--score", f"{tmp_path / 'deadly.py'}:score"]
    assert asked(tmp_path / "two", *scored, "--workers", "2") == 0
    assert int((tmp_path / "died").read_text()) != os.getpid()
    assert asked(tmp_path / "one", *scored) == 0
    two, one = (read_csv(tmp_path / name / "by_prompt.csv") for name in ("two", "one"))
    assert two == one


def test_a_cluster_that_is_not_there_is_named(tmp_path, capsys) -> None:
    pytest.importorskip("distributed", reason="needs the extra cluster")
    assert asked(tmp_path, "--scheduler", "nowhere") == 2
    assert "--scheduler: no scheduler at 'nowhere'" in capsys.readouterr().err
    assert asked(tmp_path, "--workers", "0") == 2
    assert "--workers" in capsys.readouterr().err


def test_ratios_and_differences_are_paired_by_prompt() -> None:
    lossless = np.array([[2, 2, 8, 4, 0, 2, 0, 0], [2, 2, 6, 4, 0, 0, 0, 0],
                         [2, 1, 8, 4, 0, 1, 0, 0], [2, 2, 8, 4, 0, 2, 0, 0.0]])  # fmt: skip
    lossy = lossless.copy()
    lossy[:, 3:] = [[2, 0.8, 2, 1, 2], [2, 0.4, 0, 1, 2], [3, 0.8, 2, 1, 2], [2, 0.9, 0, 0, 0]]
    rows = by_prompt({"speculative": lossless, "x": lossy}, ["sums", "sums", "tales", "tales"])
    first, other, *parts = table_of(rows)
    assert first["score"] == 5 / 8 and first["difference"] == first["difference_se"] == 0
    gap = np.array([0, 0, 0.5, -1])
    assert other["difference"] == gap.mean() and other["nats"] == pytest.approx(2.9 / 30)
    assert other["difference_se"] == pytest.approx(gap.std(ddof=1) / 2)
    assert other["shown_by_80_percent"] == pytest.approx(2.8016 * gap.std(ddof=1) / 2)
    assert other["over_lossless"] == pytest.approx(16 / 9)
    assert other["calls_over_lossless"] == pytest.approx(9 / 16)
    left = np.array([12 / (9 - own) for own in (2, 2, 3, 2)])
    error = np.sqrt(3 / 4 * ((left - left.mean()) ** 2).sum())
    assert other["over_lossless_se"] == pytest.approx(error)
    assert (other["surprise"], other["agreement"]) == (0.1, 0.2)
    assert [row["which"] for row in parts] == [
        name for name in ("complete", "sums", "tales") for _ in range(2)
    ]
    assert parts[1]["prompts"] == 3 and parts[1]["tokens_per_call"] == 22 / 6
    assert parts[3]["tokens_per_call"] == 14 / 4 and parts[5]["nats"] == pytest.approx(1.7 / 16)
