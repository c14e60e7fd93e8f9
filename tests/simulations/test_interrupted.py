"""Runs that are stopped: Ctrl-C is one line, and no signal loses or changes a result."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cactus_theory.cli
from cactus_theory.base.terminal import NOTHING_KEPT
from simulations import __main__ as commands
from simulations.common.inputs import PAIR, PROMPTS, ROOT
from tests.amounts import some, thorough

# what holds a time, or is made from one
TIMES = ("second", "speed", "parts", "tuned", "costs", "lines", "plain", "chosen")
# of the shortest start-up of a command to its end, in which it is stopped
EARLIEST = 0.3
STOPS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_ctrl_c_is_one_line_that_says_what_is_kept(name: str, capsys, monkeypatch) -> None:
    def stopped(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands.importlib, "import_module", stopped)
    assert commands.main([name]) == 130
    said = capsys.readouterr().err
    assert said.startswith(f"python -m simulations {name}: interrupted; ")
    assert said.count("\n") == 1 and said.isascii()
    summary = commands.COMMANDS[name][0]
    if "resumes" in summary:
        assert "the same command goes on from there" in said
    elif name not in commands.MADE_AGAIN:
        assert NOTHING_KEPT in said


# Ctrl-C while a command imports torch, which takes a second
PRESSED = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(9)"


@pytest.mark.parametrize(
    ("words", "command"),
    some([
        ("-m simulations demo", "python -m simulations demo"),
        ("-m solvers selection", "python -m solvers"),
        ("-m cactus_theory tune", "cactus-theory"),
    ], 2),
)  # fmt: skip
def test_ctrl_c_while_torch_loads_is_one_line(words: str, command: str, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(PRESSED)
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, *words.split()], capture_output=True, text=True, env=env, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (130, f"{command}: interrupted; {NOTHING_KEPT}\n")


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ("check x.py:f", NOTHING_KEPT),
        ("generate --target a --draft b --prompt x", NOTHING_KEPT),
        ("solve a.npy b.npy --delta 1", NOTHING_KEPT),
        ("compare a.npz", "lines made so far are in --csv"),
        ("trace --target a --draft b --prompts c", "are kept in --out: the same command"),
        ("tune --nats 1", "are kept in --work: the same command"),
    ],
)
def test_ctrl_c_in_the_library_s_commands(words: str, kept: str, capsys, monkeypatch) -> None:
    def stopped(_: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"cactus_theory.commands.{words.split()[0]}.run", stopped)
    assert cactus_theory.cli.main(words.split()) == 130
    said = capsys.readouterr().err
    assert said.startswith(f"cactus-theory {words.split()[0]}: interrupted; ") and kept in said
    assert said.count("\n") == 1


def journal(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what a journal holds of each decode but times."""
    lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    return {
        line.pop("job", "settings"): {
            name: value for name, value in line.items() if not any(own in name for own in TIMES)
        }
        for line in lines
    }


def files(folder: Path) -> dict[str, bytes]:
    """Return every file of a folder, byte by byte."""
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# a command of each way to keep what is finished: its flags, with OUT for its folder, and what must
# not differ where it is stopped
RUNS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "throughput": (
        "--policy speculative --policy band:price=1 --policy cactus:delta=1 --baselines plain "
        "--num-draft-tokens 2 "
        "--batch 1 --num-prompts 2 --max-new-tokens 6 --repeats 2 --metered 1 --out OUT",
        journal,
    ),
    "trace": (
        f"--target {PAIR}/target --draft {PAIR}/draft --prompts {PROMPTS} --cycles 40 "
        "--max-new-tokens 6 --num-draft-tokens 2 --out OUT",
        files,
    ),
}


def started(name: str, out: Path) -> subprocess.Popen[str]:
    flags = RUNS[name][0].replace("OUT", str(out))
    program = "cactus_theory" if name == "trace" else "simulations"
    return subprocess.Popen(
        [sys.executable, "-m", program, *name.split(), *flags.split()],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


@thorough
@pytest.mark.parametrize("name", RUNS)
def test_a_stopped_run_ends_as_one_that_was_not(name: str, tmp_path: Path) -> None:
    """By -9, TERM and INT, each at some moment of one run that is taken up again and again."""
    begun = time.monotonic()
    whole = started(name, tmp_path / "whole")
    said = whole.communicate()[1]
    took = time.monotonic() - begun
    assert whole.returncode == 0, said
    moments, out = random.Random(name), tmp_path / "stopped"
    for stop in STOPS:
        process = started(name, out)
        time.sleep(took * moments.uniform(EARLIEST, 1.0))
        process.send_signal(stop)
        said = process.communicate()[1]
        assert process.returncode in (0, -stop, 130), said
        if process.returncode == 130:
            assert said.count("interrupted; ") == 1 and "Traceback" not in said
    process = started(name, out)
    said = process.communicate()[1]
    assert process.returncode == 0, said
    assert RUNS[name][1](out) == RUNS[name][1](tmp_path / "whole")
