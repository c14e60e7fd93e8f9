"""Notebooks run without Jupyter; the tutorial prints what is committed."""

import base64
import json
import re
from pathlib import Path

import pytest

from simulations.__main__ import main
from simulations.notebook import TUTORIAL, code_cells, load_notebook, run_cells
from tests.amounts import amount

# the first cells need neither models nor traces, and take a second or two
RUN = amount(6, 99)
LONGEST_CELL = 18  # lines, blank ones and a rule's definition included
LARGEST_PICTURE = 60_000  # bytes
PICTURES = range(4, 7)

NOTEBOOK = load_notebook(TUTORIAL)
CELLS = code_cells(NOTEBOOK)


def printed(cell: dict) -> str:
    return "".join(
        line for out in cell["outputs"] if out["output_type"] == "stream" for line in out["text"]
    )


def pictures(cell: dict) -> list[bytes]:
    drawn = [out["data"] for out in cell["outputs"] if out["output_type"] == "display_data"]
    return [base64.b64decode(data["image/png"]) for data in drawn]


def test_the_tutorial_prints_and_draws_what_is_committed() -> None:
    ran = run_cells(["".join(cell["source"]) for cell in CELLS[:RUN]], TUTORIAL.parent)
    assert [own.text for own in ran] == [printed(cell) for cell in CELLS[:RUN]]
    assert [len(own.pictures) for own in ran] == [len(pictures(cell)) for cell in CELLS[:RUN]]


def test_every_cell_was_run_in_order() -> None:
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, len(CELLS) + 1))


def test_cells_are_short_and_pictures_small() -> None:
    assert max(len(cell["source"]) for cell in CELLS) <= LONGEST_CELL
    drawn = [picture for cell in CELLS for picture in pictures(cell)]
    assert len(drawn) in PICTURES
    assert max(map(len, drawn)) < LARGEST_PICTURE


def test_nothing_of_a_machine_or_a_day_is_in_it() -> None:
    assert set(NOTEBOOK["metadata"]) == {"kernelspec", "language_info"}
    assert not any(cell["metadata"] for cell in NOTEBOOK["cells"])
    text = "".join(line for cell in NOTEBOOK["cells"] for line in cell["source"])
    text += "".join(printed(cell) for cell in CELLS)
    assert not re.search(r"(?<!\w)/(work|home|root|tmp|usr)/|https?://|seconds", text)


def test_its_links_lead_to_files() -> None:
    words = "".join("".join(c["source"]) for c in NOTEBOOK["cells"] if c["cell_type"] != "code")
    links = re.findall(r"\]\(([^)#]+)", words)
    assert links
    for link in links:
        assert (TUTORIAL.parent / link).exists(), link


def small(tmp_path: Path, *sources: str) -> Path:
    cells = [
        {"cell_type": "code", "id": f"c{i}", "metadata": {}, "execution_count": None,
         "outputs": [], "source": source.splitlines(keepends=True)}
        for i, source in enumerate(sources)
    ]  # fmt: skip
    path = tmp_path / "small.ipynb"
    path.write_text(
        json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})
    )
    return path


def test_names_texts_and_pictures_are_kept_and_a_second_run_changes_nothing(tmp_path: Path) -> None:
    draw = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nprint(two)"
    path = small(tmp_path, "two = 2", draw, "print(len(plt.get_fignums()))")
    assert main(["tutorial", "--notebook", str(path)]) == 0
    first = path.read_bytes()
    cells = code_cells(load_notebook(path))
    assert [printed(cell) for cell in cells] == ["", "2\n", "0\n"]
    assert [len(pictures(cell)) for cell in cells] == [0, 1, 0]
    assert main(["tutorial", "--notebook", str(path)]) == 0
    assert path.read_bytes() == first


def test_a_cell_that_raises_is_named_and_nothing_is_written(tmp_path: Path, capsys) -> None:
    path = small(tmp_path, "two = 2", "two / 0")
    before = path.read_bytes()
    assert main(["tutorial", "--notebook", str(path)]) == 2
    assert "cell 2: ZeroDivisionError" in capsys.readouterr().err
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", ["{}", "no json", '{"nbformat": 3, "cells": []}'])
def test_what_is_no_notebook_is_refused(tmp_path: Path, content: str, capsys) -> None:
    path = tmp_path / "other.ipynb"
    path.write_text(content)
    assert main(["tutorial", "--notebook", str(path)]) == 2
    assert "must be a Jupyter notebook" in capsys.readouterr().err
