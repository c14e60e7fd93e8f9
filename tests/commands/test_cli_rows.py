"""Many rows on the command line: a table of policies, and one budget over all rows."""

import csv
import re
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

import cactus_theory as ct
from cactus_theory.cli import main
from cactus_theory.commands import plot
from tests.commands.test_cli import run_json
from tests.rows import pair

PRINTED = 1e-12
SPECS = ("speculative", "cactus:delta=0.1", "band:delta=0.1", "top_k:k=2")
TABLE = tuple(part for spec in SPECS for part in ("--policy", spec))


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    for name, rows in zip("qp", pair(12, 6, seed=8), strict=True):
        np.save(tmp_path / f"{name}.npy", rows.numpy())
    return str(tmp_path / "q.npy"), str(tmp_path / "p.npy")


def test_several_policies_are_one_table(files, capsys) -> None:
    found = run_json(capsys, "audit", *files, *TABLE, "--divergence", "reverse_kl")
    assert (found["rows"], found["texts"], found["divergence"]) == (12, 12, "reverse_kl")
    q, p = (np.load(path) for path in files)
    for line, spec in zip(found["policies"], SPECS, strict=True):
        seen = ct.audit(ct.policy(spec), q, p, divergence="reverse_kl")
        spent = seen.divergences["reverse_kl"].mean()
        assert line["policy"] == spec
        assert line["acceptance"] == pytest.approx(seen.acceptance.mean(), abs=PRINTED)
        if np.isfinite(spent):
            assert line["reverse_kl"] == pytest.approx(spent, abs=PRINTED)
        best = ct.pooled_acceptance(q, p, divergence="reverse_kl", delta=max(spent, 0.0))
        share = seen.acceptance.mean() / best.mean_acceptance
        assert line["share_of_pooled_optimum"] == pytest.approx(share, abs=1e-9)
        assert line["share_of_row_optimum"] <= 1 + PRINTED
        raised = 1000 * seen.raised_off_head.mean()
        assert line["raised_off_head_per_1000"] == pytest.approx(raised, abs=PRINTED)
        assert line["share_of_pooled_optimum"] <= line["share_of_row_optimum"] + 1e-7
    assert found["policies"][2]["held"] == 12 and found["policies"][3]["held"] is None


def test_the_table_is_printed_and_saved(files, tmp_path, capsys) -> None:
    out = {name: str(tmp_path / f"t.{name}") for name in ("csv", "png")}
    assert main(["audit", *files, *TABLE, "--csv", out["csv"], "--plot", out["png"]]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "12 rows of 12 texts" and len(shown) == 2 + len(SPECS) + 4
    assert "kl <= 0.1 per proposal" in shown[3] and re.search(r"\d+ of 12$", shown[3])
    notes, *lines = Path(out["csv"]).read_text().split("policy,", 1)
    assert notes.splitlines() == ["# divergence: kl", "# rows: 12", "# texts: 12"]
    table = list(csv.DictReader(("policy," + lines[0]).splitlines()))
    found = run_json(capsys, "audit", *files, *TABLE)["policies"]
    assert [float(row["acceptance"]) for row in table] == [line["acceptance"] for line in found]
    assert [row["held"] for row in table] == ["12", str(found[1]["held"]), "12", ""]
    image = matplotlib.image.imread(out["png"])
    assert min(image.shape[:2]) > 400 and image.std() > 0.05


@pytest.mark.parametrize("command", [
    ("audit", "--policy", "speculative", "--policy", "cactus:delta=0.0005"),
    ("audit", "--policy", "cactus:delta=0.0005"),
])  # fmt: skip
def test_a_picture_holds_its_marks_and_lists_what_it_draws(
    files, tmp_path, monkeypatch, command
) -> None:
    figures = []
    monkeypatch.setattr(plot, "write_picture", lambda path, figure: figures.append(figure))
    assert main([command[0], *files, *command[1:], "--plot", str(tmp_path / "a.png")]) == 0
    axes = figures[0].axes[-1]
    right, (low, high) = axes.get_xlim()[1], axes.get_ylim()
    lines = {line.get_label(): np.array(line.get_data()) for line in axes.get_lines()}
    marks = {name: xy for name, xy in lines.items() if xy.shape[1] == 1}
    most = max(float(xy[0, 0]) for xy in marks.values())
    assert 0 < most < right < 2 * most  # neither beyond the end nor crowded at 0
    assert all(low < xy[1, 0] < high for xy in marks.values())
    listed = {text.get_text() for text in axes.get_legend().get_texts()}
    inside = {name for name, xy in lines.items() if (xy[0] <= right).any() and name[0] != "_"}
    assert listed == inside


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
