"""Many rows on the command line: one budget over all of them, and every budget."""

import csv
from pathlib import Path

import numpy as np
import pytest

import cactus_theory as ct
from cactus_theory.cli import main
from tests.commands.test_cli import run_json
from tests.rows import pair

PRINTED = 1e-12


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    for name, rows in zip("qp", pair(12, 6, seed=8), strict=True):
        np.save(tmp_path / f"{name}.npy", rows.numpy())
    return str(tmp_path / "q.npy"), str(tmp_path / "p.npy")


def test_one_budget_over_all_rows(files, tmp_path, capsys) -> None:
    q, p = (np.load(path) for path in files)
    best = ct.pooled_acceptance(q, p, delta=0.05)
    rows = str(tmp_path / "h.npy")
    saved = ("--out", rows, "--csv", str(tmp_path / "x.csv"))
    found = run_json(capsys, "solve", *files, "--pooled", "--delta", "0.05", *saved)
    for name in ("mean_acceptance", "mean_divergence", "price", "bound", "gap"):
        assert found[name] == pytest.approx(getattr(best, name), abs=PRINTED)
    np.testing.assert_allclose(found["divergence"], best.divergence, atol=PRINTED)
    np.testing.assert_allclose(np.load(rows), best.target, atol=PRINTED)
    assert f"# price: {best.price}" in (tmp_path / "x.csv").read_text()
    assert main(["solve", *files, "--pooled", "--acceptance", "0.9"]) == 0
    assert "best mean acceptance, kl, acceptance = 0.9" in capsys.readouterr().out


def test_the_frontier_of_all_rows(files, tmp_path, capsys) -> None:
    out = str(tmp_path / "x.csv")
    found = run_json(capsys, "solve", *files, "--frontier", "9", "--csv", out)
    line = ct.pooled_frontier(*(np.load(path) for path in files), points=9)
    np.testing.assert_allclose(found["acceptance"], line.acceptance, atol=PRINTED)
    assert max(map(abs, found["gap"])) < 1e-11 and found["price"][0] == "inf"
    table = list(csv.DictReader(Path(out).read_text().splitlines()[2:]))
    assert [*table[0]] == ["delta", "acceptance", "price", "bound", "gap"]  # points, not rows
    assert [float(row["delta"]) for row in table] == found["delta"]
    assert main(["solve", *files, "--frontier", "5"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 5
