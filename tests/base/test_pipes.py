"""Every command ends without a word once whoever reads its output has gone, as `| head` does."""

import importlib
import os
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from cactus_theory.base.terminal import BROKEN_PIPE, ends_quietly
from cactus_theory.cli import main

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def nobody_reads():
    """Replace stdout by a pipe whose other end is closed."""
    read, write = os.pipe()
    os.close(read)
    real, sys.stdout = sys.stdout, os.fdopen(write, "w", buffering=1)
    try:
        yield
    finally:
        broken, sys.stdout = sys.stdout, real
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), broken.fileno())
        broken.close()


def status(main, arguments: list[str]) -> int:
    try:
        return main(arguments)
    except SystemExit as left:
        return left.code


@pytest.mark.parametrize(
    "command", ["cactus_theory.cli", "simulations", "solvers", "paper_figures"]
)
def test_every_command_ends_quietly(command: str, capsys) -> None:
    name = command if "." in command else f"{command}.__main__"
    main = importlib.import_module(name).main
    with nobody_reads():
        assert status(main, ["--help"]) == BROKEN_PIPE
    assert capsys.readouterr().err == ""


def test_a_broken_pipe_is_not_reported_as_bad_input(capsys) -> None:
    @ends_quietly
    def main(arguments: list[str]) -> int:
        try:
            print("a line")
        except OSError:  # as the commands report files that cannot be read
            return 2
        return 0

    with nobody_reads():
        assert status(main, []) == BROKEN_PIPE
    assert capsys.readouterr().err == ""


def test_other_errors_and_statuses_pass(capsys) -> None:
    @ends_quietly
    def main(value: int) -> int:
        print(f"got {value}")
        if value < 0:
            raise BrokenPipeError("of a worker")
        return value

    assert main(3) == 3
    with pytest.raises(BrokenPipeError, match="worker"):
        main(-1)
    assert capsys.readouterr().out == "got 3\ngot -1\n"


def test_the_interpreter_says_nothing_at_its_end(tmp_path: Path) -> None:
    call = [sys.executable, "-m", "simulations", "table", "overspend", "--points", "3"]
    process = subprocess.Popen(
        [*call, "--out", str(tmp_path / "x.csv")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), said) == (BROKEN_PIPE, b"")


@pytest.mark.parametrize(
    ("call", "code", "said"),
    [
        ("cactus_theory.cli solve --help >&-", BROKEN_PIPE, b""),
        ("cactus_theory.cli solve --help > /dev/full", 2, b"No space left on device\n"),
    ],
)  # fmt: skip
def test_output_that_cannot_be_written_is_no_traceback(call, code, said) -> None:
    call = f"{sys.executable} -m {call}"
    done = subprocess.run(call, shell=True, cwd=ROOT, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr[-len(said) :]) == (code, said)
    assert done.stderr.count(b"\n") == said.count(b"\n")


@pytest.mark.parametrize("errors", [None, "/dev/full"])
def test_errors_that_cannot_be_written_keep_the_status_and_stdout(errors, capsys, monkeypatch):
    with nullcontext() if errors is None else open(errors, "w", buffering=1) as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        assert main(["solve", "no.npy", "--delta", "1"]) == 2
        monkeypatch.undo()
    assert capsys.readouterr().out == ""
