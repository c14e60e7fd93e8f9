"""Kernels compile for a Hopper GPU, which need not be here: no spills, loads of 16 bytes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from simulations.common.inputs import DATA
from simulations.common.results import read_csv
from tests.amounts import thorough
from tests.kernels import hopper
from tests.kernels.hopper import FEW, STREAMING

ROOT = Path(__file__).resolve().parents[2]
TABLE = "gpu_kernels.csv"
DECIDING = {"judge", "finish", "band_judge", "block_entries", "block_walk", "block_judge"}
# the release that a machine with torch 2.11 has; an environment of its own
OLDER = "3.6.0"


def compile_to(out, *flags, path=None):
    """Run the command, with the Triton of a folder if one is given; return its rows."""
    environment = {**os.environ, "PYTHONPATH": str(path or "")}
    environment.pop("TRITON_INTERPRET", None)
    # Triton 3.7 builds a syntax tree as Python 3.13 says it should not
    ignored = ("error", "ignore:AnnAssign:DeprecationWarning", "ignore:numba:RuntimeWarning")
    warnings = [word for one in ignored for word in ("-W", one)]
    command = [sys.executable, *warnings, "-m", "tests.kernels.hopper"]
    done = subprocess.run(
        [*command, "--out", str(out / TABLE), *flags],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return read_csv(out / TABLE)


def assert_sound(rows):
    assert all(row["stack_bytes"] == row["spills"] == "0" for row in rows)


def test_the_committed_table_has_every_kernel_and_no_spill():
    rows, provenance = read_csv(DATA / TABLE)
    assert {row["kernel"] for row in rows} == {*STREAMING} | DECIDING
    assert provenance["triton"] == OLDER and provenance["target"] == "sm_90"
    assert_sound(rows)
    for row in rows:
        aligned = not {"16∤requests.vocab", "16∤target.row_step"} & set(row["variant"].split())
        if row["kernel"] in STREAMING and aligned:
            assert int(row["wide_loads"]) > 0, row


def test_a_kernel_compiles_without_a_gpu(tmp_path):
    jit = pytest.importorskip("triton.runtime.jit")
    if not hasattr(jit.JITFunction, "_pack_args"):
        pytest.skip(f"{hopper.__name__} compiles with Triton 3.6 or later")
    rows, _ = compile_to(tmp_path, "--steps", "engines", "--few", "--jobs", "1")
    assert [row["kernel"] for row in rows] == [FEW]
    assert_sound(rows)


def test_a_spill_fails_the_command(tmp_path, monkeypatch):
    triton = pytest.importorskip("triton")
    row = {"kernel": "a", "variant": "x", "registers": 9, "stack_bytes": 8, "spills": 2}
    monkeypatch.setattr(hopper, "variants", lambda steps: [])
    monkeypatch.setattr(hopper, "compile_all", lambda variants, jobs: [row])
    assert triton and hopper.main(["--out", str(tmp_path / TABLE)]) == 1


@pytest.fixture(scope="module")
def older(tmp_path_factory):
    """Return a folder with the older Triton, made once."""
    folder = ROOT / "build" / f"triton-{OLDER}"
    if not folder.is_dir():
        download = tmp_path_factory.mktemp("older") / folder.name
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
        done = subprocess.run([*command, "--target", str(download), f"triton=={OLDER}"])
        if done.returncode:
            pytest.skip(f"Triton {OLDER} cannot be had here; put it into {folder}")
        folder.parent.mkdir(exist_ok=True)
        shutil.move(download, folder)
    return folder


@thorough
def test_every_kernel_compiles_under_the_older_triton(older, tmp_path):
    committed, _ = read_csv(DATA / TABLE)
    rows, provenance = compile_to(tmp_path, path=older)
    assert provenance["triton"] == OLDER and rows == committed
