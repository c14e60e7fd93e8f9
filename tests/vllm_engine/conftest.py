"""Engines in processes of their own, with the package's plugin and the tests' own.

``make vllm-test`` runs this folder in an environment with a CPU build of vLLM; without one it is
skipped. The models are the package's own (``simulations/pair``).
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.vllm_engine import plugin

HERE = Path(__file__).resolve().parent
SECONDS = 900  # of one engine, on a machine that others use as well
CLEARED = ("CACTUS_", "VLLM_PLUGINS", "PROMETHEUS_MULTIPROC_DIR")


def pytest_collection_modifyitems(items):
    if importlib.util.find_spec("vllm") is not None:
        return
    skip = pytest.mark.skip(reason="needs vLLM: make vllm-test")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def plugins(tmp_path_factory):
    """Return a folder that makes the tests' plugin known to every process."""
    return plugin.known_in(tmp_path_factory.mktemp("plugins"))


@pytest.fixture(scope="session")
def run(plugins, tmp_path_factory):
    """Return a function that runs a job in a process of its own.

    It returns the answer (None if there is none), the return code and what was written.
    """

    def one(job, processes=1, wanted=True, **environment):
        folder = tmp_path_factory.mktemp("run")
        job_file, answer_file = folder / "job.json", folder / "answer.json"
        job_file.write_text(json.dumps(job))
        command = [sys.executable, str(HERE / "run.py"), str(job_file), str(answer_file)]
        kept = {name: own for name, own in os.environ.items() if not name.startswith(CLEARED)}
        several = {} if processes > 1 else {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        own = kept | plugin.environment(plugins) | several | environment
        done = subprocess.run(
            command, cwd=folder, env=own, capture_output=True, text=True, timeout=SECONDS
        )
        text = done.stdout + done.stderr
        answer = json.loads(answer_file.read_text()) if answer_file.exists() else None
        if wanted and answer is None:
            pytest.fail(f"the engine gave no answer:\n{text[-4000:]}")
        return SimpleNamespace(answer=answer, code=done.returncode, text=text)

    return one
