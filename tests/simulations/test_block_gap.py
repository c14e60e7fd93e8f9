"""Policies and verifiers on trees: exact values, and none above the block program."""

from pathlib import Path

import pytest

pytest.importorskip("cvxpy")

import cactus_theory as ct  # noqa: E402
from cactus_theory.verify.contract import verifiers  # noqa: E402
from simulations import block_gap  # noqa: E402
from simulations.__main__ import main  # noqa: E402
from simulations.block_gap import row_of, value_of  # noqa: E402
from simulations.common.grid import followers  # noqa: E402
from simulations.common.results import read_csv  # noqa: E402
from solvers import block  # noqa: E402
from solvers.path_tree import PathTree, random_tree  # noqa: E402
from tests.amounts import THOROUGH, amount, some  # noqa: E402
from tests.rules import RULES, of_each  # noqa: E402

# what the program proves of itself, in tokens; gaps are in per cent of them
PROOF = 1e-6
# policies that may emit what the target excludes
LEAKING = ("mixture", "fuzzy")
TREE = random_tree(3, 2, seed=1)
ZEROS = random_tree(3, amount(2, 3), seed=2, zeros=0.3)


def test_the_optimum_is_reached_by_the_block_verifier():
    best = block.solve(TREE, price=1.0)
    as_target = PathTree(best.target, TREE.draft)
    assert value_of("speculative", "block", as_target).tokens == pytest.approx(best.tokens)


@pytest.mark.parametrize("verifier", verifiers(metered=True))
def test_no_policy_beats_the_optimum(verifier):
    for tree in (TREE, ZEROS) if THOROUGH else (TREE,):
        every = verifiers(metered=True)
        policies = [spec for spec in of_each(2) if verifier in followers(spec, every)]
        cases = [(verifier, RULES[spec]) for spec in some(policies, 9)]
        rows = [row_of(tree, *case, "kl") for case in cases]
        for row in rows:
            if row["gap_percent"] is None:
                assert tree is ZEROS and row["policy"].startswith(LEAKING), row
                continue
            assert row["gap_percent"] >= -100 * PROOF, row
            assert abs(row["proof_gap"]) <= PROOF
            assert row["optimal_tokens_per_call"] <= tree.depth + 1 + PROOF


def test_the_optimum_is_not_shown_beside_a_policy_that_emits_excluded_tokens(
    capsys, monkeypatch, tmp_path
):
    leaking, kept = ct.policy("mixture:alpha=0.3,support=free"), ct.policy("band:price=1")
    first, second = (row_of(ZEROS, "chain", rule, "reverse_kl") for rule in (leaking, kept))
    assert first["gap_percent"] is None and second["gap_percent"] > 0
    assert value_of(leaking, "chain", ZEROS).excluded > 0.01
    assert value_of(kept, "chain", ZEROS).excluded == 0
    monkeypatch.setattr(block_gap, "random_tree", lambda *_, **__: ZEROS)
    flags = ["--out", str(tmp_path / "x.csv"), "--seed", "1"]
    assert (
        main(["table", "block-gap", *flags, "--policy", leaking.spec, "--verifier", "chain"]) == 0
    )
    assert "–" in capsys.readouterr().out.splitlines()[-1]


def test_the_command_writes_a_table(tmp_path: Path, capsys) -> None:
    flags = ["--vocab", "2", "--num-draft-tokens", "2", "--seed", "3"]
    flags += ["--out", str(tmp_path / "x.csv")]
    assert (
        main(["table", "block-gap", *flags, "--policy", "speculative", "--verifier", "block"]) == 0
    )
    (row,), _ = read_csv(tmp_path / "x.csv")
    assert row["tree"] == "seed 3" and float(row["gap_percent"]) == pytest.approx(0, abs=1e-9)
    assert main(["table", "block-gap", *flags, "--policy", "typical", "--verifier", "block"]) == 2
    assert "--verifier: one must be able to follow typical" in capsys.readouterr().err
