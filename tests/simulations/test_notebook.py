"""The tutorial prints what is committed; make tutorial runs it in Jupyter and keeps that."""

import base64
import contextlib
import io
import json
import re
from pathlib import Path

import pytest

from tests.amounts import amount

TUTORIAL = Path(__file__).resolve().parents[2] / "simulations" / "tutorial.ipynb"
# the first cells need neither models nor traces, and take a second or two
RUN = amount(6, 99)

NOTEBOOK = json.loads(TUTORIAL.read_text(encoding="utf-8"))
CELLS = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def printed(cell: dict) -> str:
    streams = [out for out in cell["outputs"] if out["output_type"] == "stream"]
    assert all(out["name"] == "stdout" for out in streams)
    return "".join(line for out in streams for line in out["text"])


def pictures(cell: dict) -> list[bytes]:
    drawn = [out["data"] for out in cell["outputs"] if out["output_type"] == "display_data"]
    return [base64.b64decode(data["image/png"]) for data in drawn]


def test_the_tutorial_prints_and_draws_what_is_committed() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.close("all")  # what other tests left open
    names: dict = {"__name__": "__main__"}
    with contextlib.chdir(TUTORIAL.parent), plt.rc_context():
        for cell in CELLS[:RUN]:
            text = io.StringIO()
            with contextlib.redirect_stdout(text):
                exec("".join(cell["source"]), names)
            assert text.getvalue() == printed(cell)
            assert len(plt.get_fignums()) == len(pictures(cell))
            plt.close("all")


def test_every_cell_was_run_in_order() -> None:
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, len(CELLS) + 1))


def test_nothing_of_a_machine_or_a_day_is_in_it() -> None:
    assert NOTEBOOK["metadata"] == {"language_info": {"name": "python"}}
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
