"""Run every cell of the tutorial and write its outputs back into the notebook.

Text and pictures are replaced, the cells stay as they are. If a cell raises, nothing is written.
"""

import argparse
import base64
import contextlib
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cactus_theory.base.terminal import Progress

from .common.inputs import ROOT
from .common.results import write_text

# of pictures: sharp on a page, small in a repository
DPI = 100
# nothing of the machine, the day or the kernel goes into the file
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
Notebook = dict[str, Any]
OnCell = Callable[[int], None]


@dataclass(frozen=True)
class CellOutput:
    """What a code cell did: the text that it printed, and its pictures (PNG)."""

    text: str
    pictures: tuple[bytes, ...]


def load_notebook(path: str | Path) -> Notebook:
    """Return the notebook in a file; ValueError for what is none of format 4."""
    try:
        notebook = json.loads(Path(path).read_text(encoding="utf-8"))
        if notebook["nbformat"] == 4 and isinstance(notebook["cells"], list):
            return notebook
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(f"notebook: must be a Jupyter notebook of format 4; got {Path(path).name}")


def code_cells(notebook: Notebook) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run_cells(
    sources: Sequence[str], folder: Path, on_cell: OnCell = lambda _: None
) -> list[CellOutput]:
    """Run ``sources`` in turn in one namespace, with ``folder`` as the working directory.

    ``on_cell`` is called with the number of each cell before it runs, from 1 on. Figures that are
    open are closed. If a cell raises, a RuntimeError says its number, and what.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names: dict[str, Any] = {"__name__": "__main__"}
    defaults: Any = {**matplotlib.rcParamsDefault, "backend": "Agg"}
    outputs = []
    plt.close("all")  # else the first cell's would not be its own
    with contextlib.chdir(folder), plt.rc_context(defaults):
        for number, source in enumerate(sources, 1):
            on_cell(number)
            outputs.append(_run(number, source, names))
    return outputs


def _run(number: int, source: str, names: dict[str, Any]) -> CellOutput:
    import matplotlib.pyplot as plt

    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(source, f"cell {number}", "exec"), names)
        return CellOutput(printed.getvalue(), tuple(_png(plt.figure(n)) for n in plt.get_fignums()))
    except Exception as error:
        raise RuntimeError(f"cell {number}: {type(error).__name__}: {error}") from error
    finally:
        plt.close("all")


def _png(figure: Any) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=DPI, metadata={"Software": None})
    return content.getvalue()


def with_outputs(notebook: Notebook, outputs: Sequence[CellOutput]) -> Notebook:
    """Return the notebook with what its code cells did as their outputs."""
    numbered = iter(enumerate(outputs, 1))
    cells = [
        _with_output(cell, *next(numbered)) if cell["cell_type"] == "code" else cell
        for cell in notebook["cells"]
    ]
    return notebook | {"cells": cells, "metadata": METADATA}


def _with_output(cell: dict[str, Any], number: int, output: CellOutput) -> dict[str, Any]:
    lines = output.text.splitlines(keepends=True)
    outputs: list[dict[str, Any]] = [
        {
            "data": {"image/png": base64.b64encode(picture).decode(), "text/plain": ["<Figure>"]},
            "metadata": {},
            "output_type": "display_data",
        }
        for picture in output.pictures
    ]
    if lines:
        outputs.insert(0, {"name": "stdout", "output_type": "stream", "text": lines})
    return cell | {"execution_count": number, "metadata": {}, "outputs": outputs}


def as_text(notebook: Notebook) -> str:
    """Return the notebook as its file holds it: equal content gives equal bytes."""
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


TUTORIAL = ROOT / "simulations" / "tutorial.ipynb"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--notebook", type=Path, default=TUTORIAL, help="to run, in its folder")
    parser.add_argument("--out", type=Path, help="write here instead")


def run(args: argparse.Namespace) -> int:
    """Run the notebook, write it, and say which outputs are new; return 0."""
    notebook = load_notebook(args.notebook)
    sources = ["".join(output["source"]) for output in code_cells(notebook)]
    with Progress("running", len(sources)) as progress:
        outputs = run_cells(sources, args.notebook.parent, lambda _: progress.advance())
    out = args.out or args.notebook
    write_text(out, as_text(with_outputs(notebook, outputs)))
    pictures = sum(len(output.pictures) for output in outputs)
    print(f"{len(outputs)} cells, {pictures} pictures; wrote {out.name}")
    return 0
