"""The look of the gallery's pictures, which is that of the project's figures."""

import io
from typing import Any

from cactus_theory.base import arguments as check
from cactus_theory.commands.plot import COLOUR, DRAFT, INK, METADATA, MUTED, OPTIMUM, OWN, settings

CACTUS, SOFT, BUDGETED = (COLOUR[name] for name in ("cactus", "soft_band", "band_delta"))
DPI = 100

__all__ = [
    "BUDGETED",
    "CACTUS",
    "DRAFT",
    "INK",
    "MUTED",
    "OPTIMUM",
    "OWN",
    "SOFT",
    "bars",
    "picture",
]


def picture(draw: Any, found: Any, size: tuple[float, float] = (7.2, 3.2)) -> bytes:
    """Return the PNG of ``draw(figure, found)``: equal numbers give equal bytes.

    Raises
    ------
    ModuleNotFoundError
        Without matplotlib (extra ``figures``).
    """
    check.optional_module("matplotlib", "figures")
    import matplotlib
    from matplotlib.figure import Figure

    content = io.BytesIO()
    with matplotlib.rc_context(settings()):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure, found)
        figure.savefig(content, format="png", dpi=DPI, metadata=METADATA[".png"])
    return content.getvalue()


def bars(ax: Any, rows: dict[str, tuple[Any, str]], names: list[str]) -> None:
    """Draw rows of probabilities, label → (row, colour), as bars side by side."""
    width = 0.8 / len(rows)
    for place, (label, (row, colour)) in enumerate(rows.items()):
        at = [token + (place - (len(rows) - 1) / 2) * width for token in range(len(names))]
        ax.bar(at, row, width * 0.92, color=colour, label=label)
    ax.set_xticks(range(len(names)), names)
    ax.set_ylabel("probability")
    ax.grid(axis="x", visible=False)
