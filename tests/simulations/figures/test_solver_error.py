"""The closed form beside programs: what is compared, and that a refused answer is a row, too."""

import pytest

pytest.importorskip("cvxpy")

import cactus_theory as ct  # noqa: E402
from simulations.__main__ import main  # noqa: E402
from simulations.common.results import read_csv  # noqa: E402
from simulations.figures import solver_error  # noqa: E402

# what both formulations reach on small rows
SMALL_ROWS = 1e-6


def test_both_programs_agree_with_the_closed_form_on_small_rows(tmp_path, capsys) -> None:
    out = tmp_path / "e.csv"
    assert main(["table", "solver-error", "--vocab", "12", "--seeds", "4", "--out", str(out)]) == 0
    rows, notes = read_csv(out)
    assert [(row["rows"], row["program"]) for row in rows] == [
        (kind, program) for kind in solver_error.ROWS for program in ("ratios", "plain")
    ]
    q, p = solver_error.pair(12, solver_error.ROWS["spiky"], 4)
    best = ct.optimal_acceptance(q, p, delta=solver_error.DELTA)
    assert float(rows[-1]["acceptance"]) == pytest.approx(float(best.acceptance), rel=1e-11)
    assert all(float(row["error"]) < SMALL_ROWS for row in rows)
    assert "V =      12" in capsys.readouterr().out and "--seeds 4" in notes["command"]


def test_a_refused_answer_is_a_row_without_an_error(monkeypatch) -> None:
    def refuse(*_, **__):
        raise RuntimeError("solver: gave up")

    monkeypatch.setattr(solver_error.optimal, "solve", refuse)
    ratios, plain = solver_error.compared(5, "ordinary", 0, 0.1)
    assert (ratios["error"], ratios["status"]) == (None, "refused its answer")
    assert plain["error"] is not None
