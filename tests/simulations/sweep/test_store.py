"""The folder of a sweep: whose it is, what counts as there, two results of one task."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from simulations.common.inputs import ROOT
from simulations.sweep.tasks import (
    CHECKOUT,
    Store,
    Task,
    failure,
    file_digests,
    local,
    portable,
    record,
    task_of,
)

TASKS = [Task("markov", "typical", {"number": number}) for number in range(3)]
NAN = float("nan")


def store(folder: Path, tasks=TASKS, identity=None) -> Store:
    return Store(folder, tasks, {"kind": "markov"} | (identity or {}), {"command": "c"})


def line(own: Task, **row) -> str:
    return record(own.key, rows=[dict(own.case) | row])


def test_the_table_has_the_order_of_the_grid_and_all_columns(tmp_path: Path) -> None:
    with store(tmp_path) as own:
        own.add([line(TASKS[2], kl=0.1 + 0.2)])
        own.add([line(TASKS[0], kl=NAN, more=None), line(TASKS[1], kl=float("inf"))])
    with store(tmp_path) as again:
        assert again.unfinished == []
        (path,) = again.merge()
        assert again.results[TASKS[2].key][0]["kl"] == 0.1 + 0.2
    assert path.read_text() == "# command: c\nnumber,kl,more\n0,nan,\n1,inf,\n2,0.3,\n"


def test_a_result_outweighs_an_error_whatever_their_order(tmp_path: Path) -> None:
    with store(tmp_path) as own:
        own.add([line(TASKS[0], kl=1.0)])
        own.add([failure(TASKS[0], "E: once"), failure(TASKS[1], "E: \n always")])
        own.add([line(TASKS[2], kl=2.0)])
        assert own.unfinished == [TASKS[1]] and own.errors[TASKS[1].key] == "E: always"
        assert [path.name for path in own.merge()] == ["sweep.csv", "errors.csv"]
    with store(tmp_path) as again:
        again.add([line(TASKS[1], kl=1.5)])
        assert [path.name for path in again.merge()] == ["sweep.csv"]
    assert not (tmp_path / "errors.csv").exists()


def test_another_grid_is_refused_in_words(tmp_path: Path) -> None:
    store(tmp_path, identity={"seeds": [0]}).close()
    with pytest.raises(
        ValueError, match=r"another seeds \(\[0\], now \[1\]\); name another folder"
    ):
        store(tmp_path, identity={"seeds": [1]})
    with pytest.raises(ValueError, match=r"another tasks \(3, now 2\)"):
        store(tmp_path, TASKS[:2], {"seeds": [0]})
    store(tmp_path, identity={"seeds": [0]}).close()  # and a refusal leaves it unlocked
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match="must be the manifest of a sweep"):
        store(tmp_path)


def test_the_day_and_machine_stay_those_of_the_beginning(tmp_path: Path) -> None:
    with store(tmp_path) as own:
        own.add([line(task) for task in TASKS])
    with Store(tmp_path, TASKS, {"kind": "markov"}, {"command": "later"}) as again:
        assert again.provenance == {"command": "c"}


def test_two_results_of_one_task_are_an_error(tmp_path: Path) -> None:
    with store(tmp_path) as own:
        own.add([line(TASKS[0], kl=NAN)])
        own.add([line(TASKS[0], kl=NAN), line(TASKS[1], kl=1.0)])  # the same bits
        with pytest.raises(RuntimeError, match="a task has two results"):
            own.add([line(TASKS[1], kl=1.0 + 1e-15)])


def test_a_changed_shard_is_refused(tmp_path: Path) -> None:
    with store(tmp_path) as own:
        own.add([line(TASKS[0], kl=1.0)])
    (shard,) = (tmp_path / "shards").iterdir()
    shard.write_text(shard.read_text().replace("1.0", "2.0"))
    with pytest.raises(ValueError, match="has changed since it was written; delete it"):
        store(tmp_path)


def test_one_command_writes_at_a_time(tmp_path: Path) -> None:
    code = (
        "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); "
        "print(flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-S", "-c", code, str(tmp_path / "lock")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, **pipes) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(ValueError, match=r"another run is writing to it \(another process\)"):
            store(tmp_path)
        other.kill()
    store(tmp_path).close()


def test_a_task_is_the_same_on_every_machine(tmp_path: Path) -> None:
    own = task_of(
        "replay", "typical", {}, files=file_digests({"trace": ROOT / "simulations/data/trace"})
    )
    path, digest = own.files["trace"]
    assert path == f"{CHECKOUT}/simulations/data/trace"
    there = Task(own.kind, own.policy, own.case, own.settings, {"trace": ("/elsewhere", digest)})
    assert there.key == own.key and local(path) == str(ROOT / "simulations/data/trace")
    with pytest.raises(OSError, match="trace: /elsewhere must be on every machine that works"):
        there.path("trace")
    changed = Task(own.kind, own.policy, own.case, own.settings, {"trace": (path, "0" * 16)})
    assert changed.key != own.key
    with pytest.raises(ValueError, match="trace: .* must be what the sweep was planned with, 0000"):
        changed.path("trace")
    assert portable(tmp_path) == str(tmp_path.resolve())


def test_files_of_a_policy_count_by_their_content(tmp_path: Path) -> None:
    code = "import cactus_theory as ct\n"
    found = []
    for folder, text in (("a", code), ("b", code), ("b", code + " ")):
        (tmp_path / folder).mkdir(exist_ok=True)
        file = tmp_path / folder / "mine.py"
        file.write_text(text)
        found.append(task_of("replay", f"band:price=1,divergence={file}:far", {}))
    assert found[0].key == found[1].key != found[2].key
    assert found[0].case["policy"] == "band:price=1,divergence=mine.py:far"
    assert str(tmp_path / "a") in found[0].policy
    (tmp_path / "a" / "mine.py").write_text("")
    with pytest.raises(ValueError, match="policy_file_0"):
        found[0].path("policy_file_0")


def test_a_shard_holds_whole_lines_of_json(tmp_path: Path) -> None:
    with store(tmp_path) as own:
        own.add([line(TASKS[0], kl=1.0), failure(TASKS[1], "E: a\nb")])
    (shard,) = (tmp_path / "shards").glob("*.jsonl")
    records = [json.loads(text) for text in shard.read_text().splitlines()]
    assert [set(record) for record in records] == [{"task", "rows"}, {"task", "error"}]
