"""The same bytes in this process, in a pool and on a Dask cluster, whoever is killed meanwhile.

Workers and clients are killed by a policy, with SIGKILL in the middle of a task, so that no test
waits for the right moment; the scheduler is killed from outside.
"""

import json
import signal
import subprocess
from pathlib import Path

import pytest

from simulations.__main__ import main
from simulations.common.results import read_csv
from simulations.sweep.drive import cluster as opened
from tests.amounts import THOROUGH, amount, thorough
from tests.simulations.sweep.cluster import PATIENCE_S, cluster, deadly, started, table, until

pytest.importorskip("safetensors")
slow = pytest.mark.skipif(not THOROUGH, reason="starts processes; run by make test-thorough")
GRID = "--kind markov --length 4 --num-draft-tokens 1 2 --verifiers chain --seeds".split()
SEEDS = [str(seed) for seed in range(amount(3, 30))]


def sweep(out: Path, spec: str, *place: str, seeds=SEEDS) -> list[str]:
    """Return the command; the deadly policy comes in the middle of the grid of each seed."""
    policies = ["--policies", "typical", spec, "cactus:delta=0.1"]
    return ["sweep", *GRID, *seeds, *policies, "--out", str(out), *place]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[str, Path, list[str]]:
    """Return a policy that is deadly while there is a flag, the flag, and the undisturbed table."""
    folder = tmp_path_factory.mktemp("whole")
    spec, flag = deadly(folder)
    assert main(sweep(folder / "out", spec, "--in-process")) == 0
    return spec, flag, table(folder / "out")


@thorough
def test_a_killed_command_goes_on(tmp_path: Path, whole) -> None:
    spec, flag, expected = whole
    flag.touch()
    words = sweep(tmp_path / "out", spec, "--in-process")
    assert started("simulations", *words).wait() == -signal.SIGKILL and not flag.exists()
    assert not (tmp_path / "out" / "sweep.csv").exists()
    kept = {path: path.read_bytes() for path in (tmp_path / "out" / "shards").iterdir()}
    assert kept  # what was finished before
    assert main(words) == 0
    assert table(tmp_path / "out") == expected
    assert all(path.read_bytes() == content for path, content in kept.items())


@thorough
def test_a_cluster_in_this_process_gives_the_same(tmp_path: Path, whole) -> None:
    distributed = pytest.importorskip("distributed")
    spec, _, expected = whole
    local = {"n_workers": 1, "threads_per_worker": 2, "processes": False}
    with distributed.LocalCluster(**local, dashboard_address=None) as own:
        place = ["--scheduler", own.scheduler_address]
        assert main(sweep(tmp_path / "out", spec, *place)) == 0
    assert table(tmp_path / "out") == expected


def test_no_scheduler_is_one_line(tmp_path: Path, capsys) -> None:
    pytest.importorskip("distributed")
    place = ["--scheduler", "tcp://127.0.0.1:9", "--patience", "0.2"]
    assert main(sweep(tmp_path / "out", "typical", *place)) == 2
    err = capsys.readouterr().err.splitlines()
    assert "must answer within 0.2 s; it does not; 0 of" in err[-1]
    assert len(err) == 1


def test_an_address_of_nothing_is_refused() -> None:
    pytest.importorskip("distributed")
    with pytest.raises(ValueError, match="--scheduler"), opened("udp://127.0.0.1:9", 0.1):
        pass


@slow
def test_a_killed_process_of_a_pool_is_replaced(tmp_path: Path, whole) -> None:
    spec, flag, expected = whole
    flag.touch()
    assert main(sweep(tmp_path / "out", spec, "--workers", "2")) == 0
    assert table(tmp_path / "out") == expected and not flag.exists()


@slow
def test_a_policy_that_always_kills_fails_alone(tmp_path: Path, capsys) -> None:
    spec, flag = deadly(tmp_path, always=True)
    flag.touch()
    seeds = SEEDS[:1]
    assert main(sweep(tmp_path / "out", spec, "--workers", "2", seeds=seeds)) == 1
    rows, notes = read_csv(tmp_path / "out" / "sweep.csv")
    assert [row["policy"] for row in rows] == ["typical"] * 2 + ["cactus:delta=0.1"] * 2
    assert notes["failed"].startswith("2 of 6") and "its worker died" in capsys.readouterr().err


@slow
def test_processes_do_not_outlive_a_killed_command(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    file = tmp_path / "tells.py"
    file.write_text(
        "import os\nfrom dataclasses import dataclass\nimport cactus_theory as ct\n\n\n"
        "@dataclass(frozen=True)\nclass Tells(ct.PerProposal):\n    delta: float = 0.5\n\n"
        "    def raised(self, q_n):\n"
        f"        open({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n')\n        return q_n\n"
    )
    words = sweep(tmp_path / "out", f"{file}:Tells", "--workers", "2")
    command = started("simulations", *words)
    until(lambda: pids.exists() and len(set(pids.read_text().split())) == 2, command)
    command.send_signal(signal.SIGKILL)
    command.wait()
    for pid in set(pids.read_text().split()):
        until(lambda pid=pid: not Path(f"/proc/{pid}").exists())


@slow
def test_a_cluster_of_two_loses_a_worker(tmp_path: Path, whole) -> None:
    pytest.importorskip("distributed")
    spec, flag, expected = whole
    flag.touch()
    with cluster(tmp_path, 2) as own:
        assert main(sweep(tmp_path / "out", spec, "--scheduler", own.address)) == 0
        assert own.alive() == 2 and not flag.exists()
    assert table(tmp_path / "out") == expected


@slow
def test_a_killed_command_leaves_the_cluster_to_the_next(tmp_path: Path, whole) -> None:
    pytest.importorskip("distributed")
    spec, _, expected = whole
    with cluster(tmp_path, 2) as own:
        words = sweep(tmp_path / "out", spec, "--scheduler", own.address)
        command = started("simulations", *words)
        until(lambda: some_shards(tmp_path / "out"), command)
        command.send_signal(signal.SIGKILL)
        command.wait()
        assert not (tmp_path / "out" / "sweep.csv").exists()
        assert main(words) == 0
    assert table(tmp_path / "out") == expected


@slow
def test_a_new_scheduler_takes_over_while_the_command_waits(tmp_path: Path, whole) -> None:
    pytest.importorskip("distributed")
    spec, _, expected = whole
    with cluster(tmp_path, 2) as own:
        place = ["--scheduler", own.address, "--patience", str(PATIENCE_S)]
        command = started("simulations", *sweep(tmp_path / "out", spec, *place))
        until(lambda: some_shards(tmp_path / "out"), command)
        own.kill()
        own.open(1)
        assert command.wait(PATIENCE_S) == 0
    assert table(tmp_path / "out") == expected


@slow
def test_a_scheduler_that_stays_away_stops_the_command(tmp_path: Path, whole) -> None:
    pytest.importorskip("distributed")
    spec, _, expected = whole
    with cluster(tmp_path, 2) as own:
        words = sweep(tmp_path / "out", spec)
        place = ["--scheduler", own.address, "--patience", "1"]
        command = started("simulations", *words, *place, stderr=subprocess.PIPE, text=True)
        until(lambda: some_shards(tmp_path / "out"), command)
        own.kill()
        said = command.communicate(timeout=PATIENCE_S)[1]
        assert command.returncode == 2
    last = said.splitlines()[-1]
    assert "must answer within 1 s" in last and "the same command goes on from there" in last
    assert "Traceback" not in said
    for shard in (tmp_path / "out" / "shards").glob("*.jsonl"):
        assert all(json.loads(line)["rows"] for line in shard.read_text().splitlines())
    with cluster(tmp_path / "new", 1) as other:
        assert main([*words, "--scheduler", other.address]) == 0
    assert table(tmp_path / "out") == expected


@slow
def test_a_worker_without_a_checkout_is_told(tmp_path: Path, capsys) -> None:
    pytest.importorskip("distributed")
    with cluster(tmp_path, 1, checkout=tmp_path) as own:
        assert main(sweep(tmp_path / "out", "typical", "--scheduler", own.address)) == 2
    said = capsys.readouterr().err
    assert "a worker cannot take tasks; ModuleNotFoundError: No module named 'simulations'" in said


def some_shards(out: Path) -> bool:
    return len(list((out / "shards").glob("*.jsonl"))) > 2
