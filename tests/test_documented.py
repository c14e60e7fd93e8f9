"""What the pages of 2026-11-22 (commit 46b2f40) told users to import, type and keep still works.

Other people's scripts have it. Add what later pages promise; take nothing away.
"""

import argparse
import importlib
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import cactus_theory as ct
from cactus_theory import cli
from cactus_theory.base.rows import load_rows
from cactus_theory.traces import Trace
from cactus_theory.tuning import Costs
from cactus_theory.vllm.certain import wish_of
from cactus_theory.vllm.settings import read
from simulations.__main__ import COMMANDS
from simulations.common.results import read_csv
from solvers.__main__ import _parser as solvers_parser

ROOT = Path(__file__).resolve().parents[1]
NAMES = {
    "cactus_theory": "Budget Declaration PerProposal audit emitted_law frontier list_policies "
    "load_tuned optimal_acceptance policy register register_divergence rule "
    "verify_block verify_chain divergence Policy FixedTarget",
    "cactus_theory.decoding": "Between ByPosition Cascade EarlyExit Ledger ModelDrafter NGram "
    "Schedule generate generate_plain speculative_generate speculative_stream",
    "cactus_theory.decoding.drafters": "Drafter",
    "cactus_theory.divergences": "register_divergence",
    "cactus_theory.kernels": "draft_from_logits has_kernel verify_logits",
    "cactus_theory.testing": "Bounds assert_drafter_properties assert_policy_laws "
    "assert_schedule_properties assert_verifier_properties policy_property strategies "
    "verifier_property",
    "cactus_theory.policies.cactus_exact": "CactusExact",
    "cactus_theory.policies.typical_exact": "TypicalExact",
    "cactus_theory.verify": "Verifier register_verifier verify_block verify_chain",
    "cactus_theory.verify.registry": "find_verifier register_verifier verifiers",
    "simulations.inflate": "SHAPES inflate",
}
PAIR = "--target DIR --draft DIR"
LINES = f"""
cactus-theory solve target.npy draft.npy --divergence kl --delta 0.1 --plot row.png
cactus-theory solve target.npy draft.npy --divergence kl --delta 0.1 --logits --json
cactus-theory solve target.npy draft.npy --pooled --delta 0.1
cactus-theory solve target.npy draft.npy --frontier
cactus-theory audit target.npy draft.npy --policy cactus:delta=0.1 --policy band:price=1 --csv t.csv
cactus-theory audit t.npy d.npy --policy x.py:X:d=1 --csv t.csv --latex t.tex --plot t.png
cactus-theory audit target.npy --draft-tokens 3,1,4 --policy cactus:delta=0.1
cactus-theory audit TRACE --policy cactus --delta 0.1 --set k=5 --json
cactus-theory check my_rule.py:my_rule --examples 500 --html page.html --json
cactus-theory check my_rule.py:my_rule --seed 1 --laws answers --timeout 30
cactus-theory generate {PAIR} --policy band:price=2 --prompt "…" --cap 0.05 --draft-stop 0.3
cactus-theory generate {PAIR} --policy cactus --delta 0.1 --prompt "…" --stream --temperature 0.7
cactus-theory generate {PAIR} --prompt "…" --num-draft-tokens 8 --verifier block --policy s:price=1
cactus-theory generate {PAIR} --policy band --price 2 --prompt "…" --span "<think>" "</think>"
cactus-theory generate {PAIR} --policy band:price=1 --prompt "…" --siblings 4 --num-draft-tokens 8
cactus-theory generate {PAIR} --tuned tuned.json --prompt "…" --seed 1 --device cpu --json
cactus-theory tune {PAIR} --prompts FILE --kl-per-token 0.05 --out tuned.json --batch 8
cactus-theory tune --trace TRACE --costs tuned.json --kl-per-token 0.05
cactus-theory tune --trace TRACE --cost-ratio 0.1 --kl-per-token 0.05 --json
python -m solvers optimal target.npy draft.npy --divergence kl --delta 0.1
python -m solvers per-proposal target.npy --token 3 --delta 0.1
python -m solvers design target.npy draft.npy --delta 0.1 --protect 3,5 --cap 2 --out rows.npy
python -m solvers sequence target.npy draft.npy --delta 0.5
python -m solvers block rows.npz --kl-per-token 0.1 --json
python -m solvers reference
python -m simulations trace {PAIR} --prompts FILE --num-draft-tokens 8 --out TRACE
python -m simulations trace --num-draft-tokens 16 --cycles 600 --seed 1000 --out pair16_learn
python -m simulations values TRACE --knots 0.4 1 --out values.json
python -m simulations replay TRACE --policy band:price=1 --verifier chain block
python -m simulations tune-check
python -m simulations block-gap
python -m simulations throughput --policies speculative --repeats 6
python -m simulations bench theory
python -m simulations bench verify
python -m simulations bench decode --target DIR --draft DIR
python -m simulations markov --rates
python -m simulations table ledger
python -m simulations sweep --policies band:price --knobs 0.5 1 2 --workers 8
python -m simulations sweep --scheduler tcp://127.0.0.1:8786 --kind markov
python -m simulations all --list --quick
python -m simulations table measured
python -m simulations table frontier
python -m simulations table overspend
python -m simulations table constant-price
python -m simulations table solver-error
python -m simulations train-pair
python -m simulations tutorial
python -m simulations gallery
python -m simulations demo
python -m simulations gpu-check --device cpu --tiny --minutes 4
""".strip().splitlines()
SERVER = {"CACTUS_VERIFIER": "block", "CACTUS_DIVERGENCE": "renyi:a=2", "CACTUS_METER": "16"}


@pytest.mark.parametrize("module", NAMES)
def test_documented_imports(module: str) -> None:
    found = importlib.import_module(module)
    assert not [name for name in NAMES[module].split() if not hasattr(found, name)]


@pytest.mark.parametrize("line", LINES)
def test_documented_command_lines_are_read(line: str) -> None:
    """What the commands do with their words is tested beside each."""
    words = shlex.split(line)
    if words[0] == "cactus-theory":
        assert callable(cli._parser().parse_args(words[1:]).run)
    elif words[2] == "solvers":
        assert solvers_parser().parse_args(words[3:]).program == words[3]
    else:
        module = f"simulations.{COMMANDS[words[3]][0]}"
        if words[4:]:  # without flags there is nothing to read, and some take long to import
            parser = argparse.ArgumentParser()
            importlib.import_module(module).add_arguments(parser)
            parser.parse_args(words[4:])


def test_the_documented_path_of_the_plugin_is_the_plugin() -> None:
    """Servers name ``cactus_theory.integrations.vllm``: no second copy of its state is made."""
    for name in ("", ".settings", ".certain", ".bias", ".install", ".metrics"):
        older = importlib.import_module(f"cactus_theory.integrations.vllm{name}")
        assert older is importlib.import_module(f"cactus_theory.vllm{name}")
        assert older.__spec__ is not None
        assert older.__spec__.name == older.__name__ == f"cactus_theory.vllm{name}"


def test_policies_are_listed_in_their_order_and_not_by_the_alphabet() -> None:
    """Tables, help texts and stored references follow it."""
    assert list(ct.list_policies())[:4] == [
        "speculative",
        "sample_and_match",
        "cactus",
        "cactus_exact",
    ]


def test_a_policy_may_bound_its_ratios_by_the_older_name() -> None:
    class Bounded(ct.FixedTarget):
        def reach(self, q_n: torch.Tensor, p_n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            least, most = super().reach(q_n, p_n)
            assert float(least) == 0 and float(most) == float("inf")
            return q_n, p_n

        def target(self, q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
            return q

    q_n, p_n = torch.tensor([[0.25]]).double(), torch.tensor([[0.5]]).double()
    assert [float(bound) for bound in Bounded().ratio_bounds(q_n, p_n)] == [0.25, 0.5]
    band = ct.policy("band:price=1")
    assert [*map(float, band.reach(q_n, p_n))] == [*map(float, band.ratio_bounds(q_n, p_n))]


def test_documented_files_are_read(tmp_path: Path) -> None:
    """A tuned file of that day, the shipped trace and values, committed tables, rows of a text."""
    file = ROOT / "tests" / "data" / "documented_tuned.json"
    tuned = ct.load_tuned(file)
    assert (tuned.policy.spec, tuned.verifier) == ("band:price=0.739909", "chain")
    assert Costs.load(file, 1).widths == (1, 2)
    trace = Trace.open(ROOT / "simulations" / "data" / "trace")
    assert trace.texts == 11 and trace.rows()[0].shape == trace.rows()[1].shape
    values = ROOT / "simulations" / "pair" / "values.json"
    assert ct.policy(f"soft_band:price=1.5,values={values}").price == 1.5
    rows, notes = read_csv(ROOT / "paper_figures" / "data" / "tune.csv")
    assert rows and "command" in notes
    (tmp_path / "q.csv").write_text("0.25,0.75\n0.5,0.5\n")
    (tmp_path / "q.json").write_text("[[0.25, 0.75], [0.5, 0.5]]")
    assert [load_rows(str(tmp_path / name)).shape for name in ("q.csv", "q.json")] == [(2, 2)] * 2


def test_documented_settings_of_a_server_are_read() -> None:
    settings = read({"CACTUS_POLICY": "soft_band:price=2", **SERVER})
    assert settings is not None and settings.policy.spec == "soft_band:price=2.0"
    assert (settings.verifier.spec, settings.meter) == ("block", 16)
    request = SimpleNamespace(extra_args=None, temperature=0.0)
    assert wish_of(request, {"CACTUS_POLICY": "band:price=2", "CACTUS_MARGIN": "0.5"}).margin == 0.5
