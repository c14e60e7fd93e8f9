from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from paper_figures.__main__ import HERE, main, names  # noqa: E402
from tests.amounts import THOROUGH  # noqa: E402

NEEDS = {
    "acceptance_kl": ("acceptance_kl",),
    "blocks": ("blocks",),
    "overspend": ("overspend", "acceptance_kl"),
    "throughput": ("throughput",),
    "tune": ("tune",),
}


def missing(name):
    return [n for n in NEEDS.get(name, ()) if not (HERE / "data" / f"{n}.csv").is_file()]


@pytest.mark.parametrize("name", names())
def test_figures_draw_from_the_committed_numbers(name, tmp_path):
    if missing(name):
        pytest.skip(f"{', '.join(missing(name))}.csv is not here yet")
    pictures = []
    # one figure is drawn twice, to see that nothing but the numbers goes in; all when thorough
    twice = THOROUGH or name == names()[0]
    for folder in (tmp_path / "a", tmp_path / "b")[: 1 + twice]:
        assert main([name, "--out", str(folder)]) == 0
        assert sorted(path.name for path in folder.iterdir()) == [f"{name}.pdf", f"{name}.png"]
        pictures.append([path.read_bytes() for path in sorted(folder.iterdir())])
    assert pictures[0] == pictures[-1]
    assert pictures[0][0].startswith(b"%PDF") and b"CreationDate" not in pictures[0][0]


def test_unknown_names_are_one_line(tmp_path, capsys):
    assert main(["acceptence", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "must be one of acceptance_kl" in error
    assert not list(tmp_path.iterdir())


def test_missing_numbers_are_one_line(tmp_path, capsys):
    assert main(["overspend", "--data", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "overspend.csv" in capsys.readouterr().err


def test_figures_import_nothing_that_computes():
    for path in Path(HERE).glob("*.py"):
        text = path.read_text()
        assert not any(name in text for name in ("cactus_theory", "simulations", "import torch"))
