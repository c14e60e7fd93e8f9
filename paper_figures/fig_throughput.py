"""End-to-end speed of policies and baselines, with what each emits: bars of tokens a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import _style as style

BASELINE = "#b9b9b9"
LIBRARY = {
    "plain": "plain, our loop",
    "hf_plain": "plain, Hugging Face",
    "hf_assisted": "assisted, Hugging Face",
    "hf_mixture": "mixture, Hugging Face",
}


def draw(data: Path) -> Figure:
    """Return the figure from ``throughput.csv``: a panel per batch size, each at its best K."""
    rows = style.read(data / "throughput.csv")
    batches = sorted({row["batch"] for row in rows})
    tallest = max(len(_tuned(rows, batch)) for batch in batches)
    height = 0.9 + 0.24 * tallest
    figure, panels = style.panels(len(batches), width=4.6 * len(batches), height=height)
    for ax, batch in zip(panels, batches, strict=True):
        _bars(ax, _tuned(rows, batch))
        ax.set_title(f"batch {batch:g}")
    return figure


def _tuned(rows: list[dict[str, Any]], batch: float) -> list[dict[str, Any]]:
    """Return each method and knob at its fastest K, slowest first."""
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row["tokens_per_second"]):
        if row["batch"] == batch:
            best[row["method"], str(row["knob"])] = row
    return sorted(best.values(), key=lambda row: row["tokens_per_second"])


def _bars(ax: Axes, rows: list[dict[str, Any]]) -> None:
    plain = next((r["tokens_per_second"] for r in rows if r["method"] == "plain"), None)
    for place, row in enumerate(rows):
        speed = row["tokens_per_second"]
        colour = style.COLOUR.get(_series(row), style.MUTED)
        colour = BASELINE if row["method"] in LIBRARY else colour
        ax.barh(place, speed, height=0.72, color=colour)
        spread = [[speed - row["tokens_per_second_min"]], [row["tokens_per_second_max"] - speed]]
        ax.errorbar(speed, place, xerr=spread, color=style.INK, lw=0.8, capsize=1.6)
        ax.annotate(_cost(row), (row["tokens_per_second_max"], place), (5, 0),
                    textcoords="offset points", va="center", fontsize=7)  # fmt: skip
    if plain is not None:
        ax.axvline(plain, color=style.INK, lw=0.8, ls=":")
    ax.set_yticks(range(len(rows)), [_name(row) for row in rows], fontsize=7.5)
    ax.set_xlim(0, max(row["tokens_per_second_max"] for row in rows) * 1.25)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel("new tokens a second (median, least and most)")


def _name(row: dict[str, Any]) -> str:
    knob = str(row["knob"] or "").replace("delta=", "δ ").replace("price=", "price ")
    name = LIBRARY.get(row["method"], row["method"].replace("_", " "))
    drafted = f", K {row['num_draft_tokens']:g}" if row["num_draft_tokens"] else ""
    return f"{name} {knob}".strip() + drafted


def _cost(row: dict[str, Any]) -> str:
    spent = row["emitted_kl_per_token"]
    if spent is None:
        return "lossless" if row["method"] in ("plain", "hf_plain", "hf_assisted") else ""
    return "lossless" if spent < 1e-9 else f"KL {spent:.3f}"


def _series(row: dict[str, Any]) -> str:
    knob = str(row["knob"] or "").partition("=")[0]
    return f"{row['method']}_{knob}" if row["method"] == "band" else row["method"]
