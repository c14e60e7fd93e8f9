import json
import os
import subprocess
import sys

import numpy as np
import pytest

from solvers import __main__ as command_line
from solvers import _attempts, block, design, optimal, sequence
from tests.solvers.cases import random_tree

Q, P = np.array([0.30, 0.35, 0.35]), np.array([0.05, 0.80, 0.15])
GAVE_UP = _attempts.SolverGaveUp("solver: made to fail")


@pytest.fixture
def files(tmp_path):
    np.save(tmp_path / "target.npy", Q)
    np.save(tmp_path / "draft.npy", P)
    np.save(tmp_path / "batch.npy", np.stack([P, Q]))
    return {path.stem: str(path) for path in tmp_path.glob("*.npy")}


def run(capsys, *arguments):
    code = command_line.main([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def test_the_optimal_program_as_json(files, capsys):
    code, out, error = run(
        capsys, "optimal", files["target"], files["draft"], "--delta", 0.1, "--json"
    )
    assert (code, error) == (0, "")
    printed = json.loads(out)
    assert printed["program"] == "optimal"
    (row,) = printed["rows"]
    expected = optimal.solve(Q, P, delta=0.1)
    assert row["acceptance"] == pytest.approx(expected.acceptance, abs=1e-12)
    assert row["target"] == pytest.approx(expected.target.tolist())
    assert set(row) == set(vars(expected))


def test_a_design_as_json(files, capsys):
    arguments = "--delta .2 --protect 0 --cap 2 --cap 2=1.1 --json"
    code, out, error = run(capsys, "design", files["target"], files["draft"], *arguments.split())
    assert (code, error) == (0, "")
    (row,) = json.loads(out)["rows"]
    expected = design.Design(Q, P).budget("kl", 0.2).protect(0).cap(2).cap(1.1, 2).solve()
    assert row["target"] == pytest.approx(expected.target.tolist(), abs=1e-9)
    assert row["duals"]["cap"].keys() == {"0", "1", "2"}
    assert set(row) == set(vars(expected))
    assert list(row["slacks"]) == ["budget kl", "protect", "cap", "cap 2"]


def test_one_budget_over_a_batch(files, capsys):
    arguments = (files["target"], files["batch"], "--delta", 0.1, "--sequence", "--json")
    _, out, _ = run(capsys, "optimal", *arguments)
    (row,) = json.loads(out)["rows"]
    expected = sequence.solve(np.stack([Q, Q]), np.stack([P, Q]), delta=0.1)
    assert row["total_acceptance"] == pytest.approx(expected.total_acceptance)
    assert len(row["acceptance"]) == 2
    _, out, _ = run(capsys, "optimal", *arguments[:-1])
    assert "total_acceptance" in out and "row 0" not in out


def test_a_block_from_a_file_of_prefixes(tmp_path, capsys):
    tree, path = random_tree(2, 2, seed=1), tmp_path / "rows.npz"
    np.savez(path, target=tree.target, draft=tree.draft)
    code, out, error = run(capsys, "block", path, "--nats", 0.03, "--json")
    assert (code, error) == (0, "")
    (row,) = json.loads(out)["rows"]
    expected = block.solve(tree, per_token=0.03)
    assert row["tokens"] == pytest.approx(expected.tokens, abs=1e-9)
    assert set(row) == set(vars(expected))
    _, out, _ = run(capsys, "block", path, "--price", "inf", "--divergence", "reverse_kl", "--json")
    assert json.loads(out)["rows"][0]["price"] == "inf"
    _, out, _ = run(capsys, "block", path, "--nats", 0.05)
    assert "lossless    " in out and "gap" in out


def test_a_batch_gives_one_result_a_row(files, capsys):
    arguments = (files["target"], files["batch"], "--delta", 0.1)
    _, out, _ = run(capsys, "optimal", *arguments, "--support", "free", "--json")
    first, second = json.loads(out)["rows"]
    assert first["acceptance"] < second["acceptance"] == pytest.approx(1, abs=1e-6)
    _, out, _ = run(capsys, "design", *arguments, "--cap", 1.5)
    assert "row 0" in out and "row 1" in out and "slacks" in out


def test_logits_and_infinite_prices(tmp_path, capsys):
    path = tmp_path / "logits.json"
    path.write_text(json.dumps(np.log(Q).tolist()))
    arguments = ("--token", 1, "--delta", 0, "--logits", "--json")
    _, out, _ = run(capsys, "optimal", path, *arguments)
    (row,) = json.loads(out)["rows"]
    assert row["raised"] == pytest.approx(0.35)
    assert row["price"] == "inf"


def failing_second(monkeypatch, error):
    """Make the optimal program fail on the reversed row only."""
    right = optimal.solve

    def solve(q, *args, **knobs):
        if q[0] > 0.32:
            raise error
        return right(q, *args, **knobs)

    monkeypatch.setattr(optimal, "solve", solve)


@pytest.fixture
def three(tmp_path):
    np.save(tmp_path / "q.npy", np.stack([Q, Q[::-1], Q]))
    np.save(tmp_path / "p.npy", np.stack([P, P, P]))
    return [str(tmp_path / "q.npy"), str(tmp_path / "p.npy"), "--delta", "0.1"]


def test_a_row_without_an_answer_loses_no_other(three, capsys, monkeypatch):
    whole = json.loads(run(capsys, "optimal", *three, "--json")[1])["rows"]
    failing_second(monkeypatch, GAVE_UP)
    code, printed, error = run(capsys, "optimal", *three, "--json")
    assert (code, error) == (1, "python -m solvers optimal: row 1: solver: made to fail\n")
    answer = json.loads(printed)
    assert answer["failed"] == [1]
    assert answer["rows"][1] == {"error": "solver: made to fail"}
    for row in (0, 2):
        assert answer["rows"][row]["target"] == whole[row]["target"]
    _, shown, _ = run(capsys, "optimal", *three)
    assert "row 1\nerror       solver: made to fail" in shown and "row 2" in shown


def test_no_answer_on_any_row_is_one_line(three, capsys):
    code, out, error = run(capsys, "optimal", *three[:-1], -1)
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert "delta: must lie in" in error and "no answer on any of 3 rows" in error


def test_what_is_done_is_kept_when_interrupted(three, capsys, monkeypatch):
    failing_second(monkeypatch, KeyboardInterrupt)
    code, out, _ = run(capsys, "optimal", *three, "--json")
    assert code == 130 and len(json.loads(out)["rows"]) == 1


def test_the_module_runs_and_leaves_cvxpy_alone_until_it_is_needed(files, tmp_path):
    (tmp_path / "cvxpy.py").write_text("raise RuntimeError('imported too early')")
    command = [sys.executable, "-m", "solvers", "optimal", files["target"], files["draft"]]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [*command, "--delta", "0"], capture_output=True, text=True, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "identity" in done.stdout
