"""Sweeps: their tables, what a kill leaves, tasks that fail, and the same bytes on a cluster."""

import sys
from pathlib import Path

import pytest

from simulations import sweep
from simulations.__main__ import main
from simulations.common.results import read_csv
from simulations.markov import Setting, markov_pair, measured
from simulations.sweep import Task, perform, release, task_of
from tests.amounts import thorough

MARKOV = "sweep --policies speculative band:price=0.5 band:price=2".split()
MARKOV += "--length 3 --num-draft-tokens 2 --distance 0.5 --seeds".split()
# a policy that fails or kills its process, once, if the flag is there
BAD = """
import os, signal
from dataclasses import dataclass
from pathlib import Path
import cactus_theory as ct

FLAG = Path({flag!r})

@dataclass(frozen=True)
class Bad(ct.PerProposal):
    delta: float = 0.5

    def raised(self, q_n):
        if FLAG.exists():
            {what}
        return q_n
"""
FAILS = 'raise ArithmeticError("no\\nnumber")'
KILLS = "FLAG.unlink(); os.kill(os.getpid(), signal.SIGKILL)"
ALWAYS_KILLS = "os.kill(os.getpid(), signal.SIGKILL)"


def bad(folder: Path, what: str) -> tuple[list[str], Path]:
    """Return a sweep with a policy of a file in the middle, and the flag that makes it bad."""
    file, flag = folder / "bad.py", folder / "flag"
    file.write_text(BAD.format(flag=str(flag), what=what))
    words = "sweep --length 3 --num-draft-tokens 2 --verifiers chain --policies"
    return [*words.split(), "speculative", f"{file}:Bad", "cactus:delta=0.1"], flag


def table(folder: Path) -> list[str]:
    """Return the lines of a sweep's table, all but the day, on which the clock may strike."""
    text = (folder / "sweep.csv").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if not line.startswith("# date: ")]


def test_enumerated_texts_are_those_of_the_library(tmp_path: Path) -> None:
    assert main([*MARKOV, "0", "1", "--out", str(tmp_path)]) == 0
    rows, _ = read_csv(tmp_path / "sweep.csv")
    assert [row["seed"] for row in rows] == ["0"] * 6 + ["1"] * 6
    assert [row["policy"] for row in rows[::2]] == 2 * [
        "speculative", "band:price=0.5", "band:price=2.0",
    ]  # fmt: skip
    own = measured(markov_pair(3, seed=1, distance=0.5), Setting("band:price=2", 2, 3, "block"))
    assert rows[-1]["kl"] == f"{own['kl']:.12g}" and float(own["kl"]) > 0


def test_a_killed_command_goes_on_and_a_larger_grid_computes_what_is_new(tmp_path, capsys) -> None:
    assert main([*MARKOV, "0", "1", "--out", str(tmp_path / "whole")]) == 0
    assert main([*MARKOV, "0", "--out", str(tmp_path / "part")]) == 0
    journal = tmp_path / "part" / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:4]) + lines[4][:20])  # as a kill leaves it
    capsys.readouterr()
    assert main([*MARKOV, "0", "1", "--out", str(tmp_path / "part")]) == 0
    assert "3 were there already" in capsys.readouterr().out
    assert table(tmp_path / "part") == table(tmp_path / "whole")
    kept = journal.read_bytes()
    assert main([*MARKOV, "0", "1", "--out", str(tmp_path / "part")]) == 0
    assert "12 were there already" in capsys.readouterr().out
    assert table(tmp_path / "part") == table(tmp_path / "whole") and journal.read_bytes() == kept


def test_a_failing_task_is_told_and_tried_again(tmp_path: Path, capsys) -> None:
    words, flag = bad(tmp_path, FAILS)
    words += ["--out", str(tmp_path / "out")]
    flag.touch()
    for _ in range(2):
        assert main(words) == 1
        (said,) = capsys.readouterr().err.splitlines()
        assert said.startswith("failed: policy=bad.py:Bad, verifier=chain, num_draft_tokens=2, ")
        assert said.endswith(": ArithmeticError: no number")
    rows, notes = read_csv(tmp_path / "out" / "sweep.csv")
    assert [row["policy"] for row in rows] == ["speculative", "cactus:delta=0.1"]
    assert notes["failed"] == "1 of 3 tasks, which are left out"
    flag.unlink()
    assert main(words) == 0
    rows, notes = read_csv(tmp_path / "out" / "sweep.csv")
    assert len(rows) == 3 and "failed" not in notes


def test_a_cluster_gives_the_same(tmp_path: Path, capsys) -> None:
    distributed = pytest.importorskip("distributed")
    words, flag = bad(tmp_path, FAILS)
    words += ["--seeds", "0", "1", "--out"]
    flag.touch()
    assert main([*words, str(tmp_path / "serial")]) == 1
    told = capsys.readouterr().err
    local = {"n_workers": 1, "threads_per_worker": 2, "processes": False}
    with distributed.LocalCluster(**local, dashboard_address=None) as own:
        place = ["--scheduler", own.scheduler_address]
        assert main([*words, str(tmp_path / "out"), *place]) == 1
    assert sorted(capsys.readouterr().err.splitlines()) == sorted(told.splitlines())
    assert table(tmp_path / "out") == table(tmp_path / "serial")


def test_a_lost_scheduler_stops_the_command(monkeypatch) -> None:
    distributed = pytest.importorskip("distributed")
    monkeypatch.setattr(sweep, "PATIENCE_S", 1)
    case = {"verifier": "chain", "num_draft_tokens": 1, "vocab": 2, "length": 2, "distance": 1.0}
    tasks = [task_of("speculative", case | {"seed": seed}) for seed in range(40)]
    local = {"n_workers": 1, "threads_per_worker": 1, "processes": False}
    with distributed.LocalCluster(**local, dashboard_address=None) as own:
        with sweep.cluster(None, own.scheduler_address) as client:
            outcomes = sweep.on_cluster(client, tasks, release())
            assert next(outcomes)[1]["row"]
            own.close()
            with pytest.raises(OSError, match="it is lost; the same command goes on"):
                list(outcomes)


@thorough
def test_a_worker_that_dies_is_replaced(tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    words, flag = bad(tmp_path, KILLS)
    assert main([*words, "--out", str(tmp_path / "whole")]) == 0
    flag.touch()
    assert main([*words, "--workers", "2", "--out", str(tmp_path / "out")]) == 0
    assert table(tmp_path / "out") == table(tmp_path / "whole") and not flag.exists()


@thorough
def test_a_task_that_always_kills_its_worker_fails_alone(tmp_path: Path, capsys) -> None:
    pytest.importorskip("distributed")
    words, flag = bad(tmp_path, ALWAYS_KILLS)
    flag.touch()
    assert main([*words, "--workers", "2", "--out", str(tmp_path / "out")]) == 1
    rows, _ = read_csv(tmp_path / "out" / "sweep.csv")
    assert [row["policy"] for row in rows] == ["speculative", "cactus:delta=0.1"]
    said = capsys.readouterr().err
    assert "failed: policy=bad.py:Bad" in said and "all those workers died" in said


def test_no_scheduler_no_worker_and_no_library_are_one_line(tmp_path, capsys, monkeypatch) -> None:
    distributed = pytest.importorskip("distributed")
    monkeypatch.setattr(sweep, "PATIENCE_S", 0.2)
    words = [*MARKOV, "0", "--out", str(tmp_path), "--scheduler"]
    with distributed.LocalCluster(n_workers=0, processes=False, dashboard_address=None) as own:
        cases = {
            "tcp://127.0.0.1:9": "127.0.0.1:9 after 0.2 s",
            "udp://127.0.0.1:9": "unknown address scheme",
            own.scheduler_address: "Only 0/1 workers arrived",
        }
        for address, said in cases.items():
            assert main([*words, address]) == 2
            err = capsys.readouterr().err
            assert said in err and len(err.splitlines()) == 1

    monkeypatch.setitem(sys.modules, "distributed", None)
    assert main([*MARKOV, "0", "--out", str(tmp_path), "--workers", "2"]) == 2
    err = capsys.readouterr().err
    assert "import of distributed halted" in err and len(err.splitlines()) == 1


def test_a_worker_with_other_code_says_so() -> None:
    other = perform(task_of("typical", {}), release() | {"code": "0" * 16})
    assert "every worker must have the same code as the command" in other["error"]


def test_files_of_a_policy_count_by_their_content(tmp_path: Path) -> None:
    code = "import cactus_theory as ct\n"
    found: list[Task] = []
    for folder, text in (("a", code), ("b", code), ("b", code + " ")):
        (tmp_path / folder).mkdir(exist_ok=True)
        file = tmp_path / folder / "mine.py"
        file.write_text(text)
        found.append(task_of(f"band:price=1,divergence={file}:far", {}))
    assert found[0].key == found[1].key != found[2].key
    assert found[0].case["policy"] == "band:price=1,divergence=mine.py:far"
    assert str(tmp_path / "a") in found[0].policy
