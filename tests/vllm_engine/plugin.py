"""A plugin of the tests' own, loaded by vLLM beside the package's.

On a CPU ``expand_batch_to_tokens`` hands back memory that it has not written for temperature,
top-k and top-p of every sampled speculative step (vLLM issue 55005), so that the target law is
not defined. ``repair`` replaces it by what it should compute, here and nowhere in the package,
which refuses to serve on such a build. So on a CPU a server is rehearsed with it::

    CACTUS_POLICY=band:price=2 .venv-vllm/bin/python -m tests.vllm_engine.plugin \\
        python -m vllm.entrypoints.openai.api_server --model …
"""

import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# of the tests' own plugin; the package's is the one that is installed
ENTRY_POINTS = """[vllm.general_plugins]
tests_repair = tests.vllm_engine.plugin:repair
"""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
}


def known_in(folder: Path) -> Path:
    """Make this plugin known to every process that has a folder on its path; return that."""
    info = folder / "tests_of_cactus_theory-0.dist-info"
    info.mkdir()
    name = "Metadata-Version: 2.1\nName: tests-of-cactus-theory\nVersion: 0\n"
    (info / "METADATA").write_text(name)
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


def environment(folder: Path) -> dict[str, str]:
    """Return what processes of an engine with this plugin have in their environment."""
    return ENVIRONMENT | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}


def repaired(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
    values = x.where(x != replace_from, replace_to)
    return values.repeat_interleave(cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1)))


def repair() -> None:
    from vllm.v1.sample import rejection_sampler as module

    if module.expand_batch_to_tokens is not repaired:
        repaired.before = module.expand_batch_to_tokens
        module.expand_batch_to_tokens = repaired


@contextlib.contextmanager
def break_again():
    from vllm.v1.sample import rejection_sampler as module

    module.expand_batch_to_tokens = repaired.before
    try:
        yield
    finally:
        module.expand_batch_to_tokens = repaired


if __name__ == "__main__":
    # a name is one beside this Python, a path (with a slash) itself
    command = shutil.which(sys.argv[1], path=str(Path(sys.executable).parent))
    if command is None:
        sys.exit(f"{sys.argv[1]}: must be a program beside {sys.executable}, or a path to one")
    folder = known_in(Path(tempfile.mkdtemp()))
    os.execve(command, [command, *sys.argv[2:]], os.environ | environment(folder))
