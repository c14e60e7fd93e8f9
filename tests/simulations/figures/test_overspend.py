import pytest

from simulations.__main__ import main
from simulations.common.results import read_csv
from simulations.figures.overspend import (
    curve,
    maximum,
)

MAXIMA = {0.01: 1.98, 0.1: 1.82, 0.5: 1.39, 1.0: 1.10}


@pytest.mark.parametrize("delta", MAXIMA)
def test_the_maximum_is_the_top_of_the_curve(delta):
    best = maximum(delta)
    assert best["kl_over_delta"] == pytest.approx(MAXIMA[delta], abs=5e-3)
    shares = {row["q_n"]: row["kl_over_delta"] for row in curve("cactus", delta, 60)}
    top = max(shares, key=shares.__getitem__)
    assert top == pytest.approx(best["q_n"])
    assert shares[top] == pytest.approx(best["kl_over_delta"])


def test_command_writes_the_table(tmp_path, capsys):
    path = tmp_path / "overspend.csv"
    arguments = ["table", "overspend", "--points", "5", "--out", str(path)]
    assert main(arguments) == 0
    rows, notes = read_csv(path)
    assert notes["command"] == "python -m simulations table overspend --points 5"
    assert [row["kind"] for row in rows] == ["curve"] * 60 + ["maximum"] * 5 + ["emitted"] * 20
    assert "1.823" in capsys.readouterr().out
