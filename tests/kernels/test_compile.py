"""Every kernel compiles for a Hopper GPU, without spilling registers, by 16-byte loads."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.amounts import THOROUGH

ROOT = Path(__file__).resolve().parent.parent.parent
# those that read whole rows
STREAMING = {"sum_rows", "race", "band_step", "shortfall"}


@pytest.mark.skipif(not THOROUGH, reason="thorough: a minute")
def test_every_kernel_compiles():
    pytest.importorskip("triton")
    # how products are fused; a release of Triton warns where it is not said
    environment = {**os.environ, "TRITON_DEFAULT_FP_FUSION": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.kernels.compile_all"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert STREAMING | {"judge", "finish", "race_alone"} <= {line[0] for line in lines}
    assert all("STACK:0" in line for line in lines), done.stdout
    for name, *facts in lines:
        wide, loads = re.findall(r"wide:(\d+)/(\d+)", " ".join(facts))[0]
        assert name not in STREAMING or int(wide) >= 4, (name, wide, loads)
