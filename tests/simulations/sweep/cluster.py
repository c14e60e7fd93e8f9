"""A Dask cluster of real processes on a free port, and policies that kill who runs them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 300
# a policy whose worker is killed in the middle of a task: once, if the flag is there
DEADLY = """
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import cactus_theory as ct

FLAG = Path({flag!r})


@dataclass(frozen=True)
class Deadly(ct.PerProposal):
    delta: float = 0.5

    def raised(self, q_n):
        if FLAG.exists():
            if not {always}:
                FLAG.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return q_n
"""


def deadly(folder: Path, always: bool = False) -> tuple[str, Path]:
    """Return the spec of a policy that kills its process, and the flag that makes it do so."""
    file, flag = folder / "deadly.py", folder / "flag"
    file.write_text(DEADLY.format(flag=str(flag), always=always))
    return f"{file}:Deadly", flag


def table(folder: Path) -> list[str]:
    """Return the lines of a sweep's table, all but the day, on which the clock may strike."""
    text = (folder / "sweep.csv").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if not line.startswith("# date: ")]


def until(what, process: subprocess.Popen | None = None) -> None:
    """Wait until something holds."""
    patience = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < patience, "waited too long"
        assert process is None or process.poll() is None, "the process ended"
        time.sleep(0.02)


def started(*words: str, checkout: Path = ROOT, **options) -> subprocess.Popen:
    """Return a Python process in a checkout, silent."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL} | options
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *words]
    return subprocess.Popen(command, cwd=checkout, env=environment, **quiet)


class Cluster:
    """A scheduler, which has no checkout, and workers that have one."""

    def __init__(self, folder: Path, checkout: Path = ROOT) -> None:
        self.folder, self.checkout, self.port = folder, checkout, 0
        self.processes: list[subprocess.Popen] = []

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def open(self, workers: int) -> None:
        """Start a scheduler, at the address of the last one if there was one, and workers."""
        self.folder.mkdir(exist_ok=True)
        place = self.folder / f"scheduler-{len(self.processes)}.json"
        words = f"scheduler --host 127.0.0.1 --port {self.port} --no-dashboard".split()
        self._start(self.folder, *words, "--scheduler-file", str(place))
        until(lambda: place.exists() and place.read_text().endswith("}"), self.processes[-1])
        self.port = int(json.loads(place.read_text())["address"].rpartition(":")[2])
        words = f"worker {self.address} --nthreads 1 --no-nanny --no-dashboard".split()
        for _ in range(workers):
            self._start(self.checkout, *words, "--local-directory", str(self.folder))

    def kill(self) -> None:
        """Kill everything that still runs."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()

    def alive(self) -> int:
        """Return how many of its processes run."""
        return sum(process.poll() is None for process in self.processes)

    def _start(self, checkout: Path, *words: str) -> None:
        self.processes.append(started("dask", *words, checkout=checkout))


@contextmanager
def cluster(folder: Path, workers: int, checkout: Path = ROOT) -> Iterator[Cluster]:
    """Open a cluster of so many workers of one thread."""
    own = Cluster(folder, checkout)
    try:
        own.open(workers)
        yield own
    finally:
        own.kill()
