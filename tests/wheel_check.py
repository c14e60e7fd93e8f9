"""What the wheel does where only torch, numpy, jaxtyping and numba are: ``make wheel`` runs it.

``python -I tests/wheel_check.py SDIST`` with the Python of that environment, from any folder. It
solves, audits and verifies; what needs an extra must end in one line that names the extra.
"""

import importlib
import importlib.metadata
import importlib.util
import math
import os
import pkgutil
import re
import subprocess
import sys
import tarfile
import tempfile
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch

import cactus_theory as ct

ROWS = {"target": np.array([0.2, 0.2, 0.6]), "draft": np.array([0.45, 0.45, 0.1])}
PYTHON = (sys.executable, "-I")
COMMAND = (str(Path(sys.executable).with_name("cactus-theory")),)
SOLVERS = (*PYTHON, "-m", "cactus_theory.solvers")
CACTUS = "--policy cactus:delta=0.25"
MODELS = "--target TARGET --draft DRAFT"
KERNEL = """
import torch
import cactus_theory as ct
from cactus_theory.kernels import verify_logits
logits, ids = torch.zeros(1, 2, 3), torch.zeros(1, 1, dtype=torch.int64)
verify_logits(ct.policy("speculative"), logits, None, ids, seeds=ids[0], positions=ids[0])
"""
# every extra, a module that only it installs, and what needs it
NEEDED = [
    ("llm", "transformers", [*COMMAND, *f"generate {MODELS} {CACTUS} --prompt x".split()], {}),
    ("llm", "transformers",
     [*COMMAND, *f"tune {MODELS} --prompts FILE --nats 0.05".split()], {}),
    ("testing", "hypothesis", [*COMMAND, "check", "wrong_rule.py:wrong_rule"], {}),
    ("figures", "matplotlib", [*COMMAND, *f"compare rows.npz {CACTUS} --plot a.png".split()], {}),
    ("solvers", "cvxpy", [*SOLVERS, *"optimal rows.npz --delta 0.1".split()], {}),
    ("solvers", "cvxpy", [*SOLVERS, *"design rows.npz --delta 0.1".split()], {}),
    ("kernels", "triton", [*PYTHON, "-c", KERNEL], {"TRITON_INTERPRET": "1"}),
    ("vllm", "vllm", [*PYTHON, "-c", "from cactus_theory.vllm import register; register()"],
     {"CACTUS_POLICY": "band:price=2"}),
]  # fmt: skip


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=os.environ | environment, text=True, capture_output=True, check=False
    )


def printed(*command: str) -> str:
    """Return what a command prints; it must end well."""
    done = run(list(command))
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout


def check_numbers() -> None:
    """Solve, audit, verify: as the command line and as Python."""
    q, p = (torch.from_numpy(row) for row in ROWS.values())
    best = ct.optimal_acceptance(q, p, delta=0.1)
    assert 0.5 < best.acceptance < 1 and abs(best.gap) < 1e-12
    assert f"{best.acceptance:.6g}" in printed(*COMMAND, "solve", "rows.npz", "--delta", "0.1")
    cactus = ct.policy("cactus", delta=0.25)
    seen = ct.audit(cactus, q, p)
    law = ct.emitted_law(cactus, q, p)
    assert math.isclose((law * (law / q).log()).sum(), seen.divergences["kl"], rel_tol=1e-9)
    assert f"{seen.acceptance:.6g}" in printed(*COMMAND, "audit", "rows.npz", *CACTUS.split())
    drafted, coins = torch.tensor([[2, 0]]), (torch.tensor([[0.3, 0.5]]), torch.tensor([0.7]))
    target, draft = q.repeat(1, 3, 1), p.repeat(1, 2, 1)
    for verify in (ct.verify_chain, ct.verify_block):
        step = verify(ct.policy("speculative"), target, draft, drafted, coins=coins)
        assert step.output_token_ids[0, 0] == 2 and step.num_accepted >= 1, verify
    printed(*COMMAND, "promise", "--cap", "2")
    assert "optimal" in printed(*SOLVERS, "--help")


def check_extras() -> None:
    """What an extra installs is missing: one line, that says how to install the extra."""
    declared = importlib.metadata.metadata("cactus-theory").get_all("Provides-Extra")
    assert {extra for extra, *_ in NEEDED} == set(declared or ())
    for extra, module, command, environment in NEEDED:
        if importlib.util.find_spec(module):
            print(f"{module} is here, so nothing has to name the extra {extra}")
            continue
        done = run(command, **environment)
        last = done.stderr.splitlines()[-1:]
        assert done.returncode, command
        assert last and f"cactus-theory[{extra}]" in last[0], (command, done.stderr)
        assert "-c" in command or len(done.stderr.splitlines()) == 1, (command, done.stderr)


def check_modules() -> None:
    """Every public name is there, and every module imports or names the extra that it needs."""
    for name in ct.__all__:
        getattr(ct, name)
    for module in pkgutil.walk_packages(ct.__path__, "cactus_theory."):
        if module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            # the launches of kernels are imported behind a question for Triton
            behind = module.name.startswith("cactus_theory.kernels._") and error.name == "triton"
            assert behind or "pip install 'cactus-theory[" in str(error), (module.name, error)


def check_files(sdist: str) -> None:
    """Pages, licence and notice are in the wheel; the citation and the changes in the sdist."""
    installed = importlib.metadata.files("cactus-theory") or ()
    assert {"LICENSE", "NOTICE"} <= {path.name for path in installed if "licenses" in path.parts}
    assert "solvers" not in {path.parts[0] for path in installed}
    assert any(page.name == "THEORY.md" for page in files("cactus_theory").iterdir())
    with tarfile.open(sdist) as archive:
        folders = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "NOTICE", "CITATION.cff", "CHANGELOG.md", "README.md"} <= folders
    assert not [name for name in folders if re.match(r"tests|simulations", name)]


def main(sdist: str) -> None:
    assert Path(ct.__file__).is_relative_to(sys.prefix), f"{ct.__file__} is not the wheel's"
    check_files(os.path.abspath(sdist))
    rule = Path(__file__).resolve().parents[1] / "simulations" / "data" / "wrong_rule.py"
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("wrong_rule.py").write_bytes(rule.read_bytes())
        np.savez("rows.npz", **ROWS)
        check_numbers()
        check_extras()
        check_modules()
    version = importlib.metadata.version("cactus-theory")
    print(f"cactus-theory {version}: solves, audits and verifies; every missing extra is named")


if __name__ == "__main__":
    main(sys.argv[1])
