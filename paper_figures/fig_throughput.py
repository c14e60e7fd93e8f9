"""End-to-end speed against what is emitted: a curve a family of policies, a panel a batch size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import _style as style
from paper_figures._labels import Name, place

Row = dict[str, Any]
CURVES = ("band_price", "band_delta", "cactus", "soft_band")
# drawn left of the axis' least value: lossless methods emit no divergence at all
LEAST_KL = 3e-3
# between the names of baselines, of the panel's height
ROOM = 0.055
KL_TICKS = (0.003, 0.01, 0.03, 0.1, 0.3)
BASELINES = {
    "plain": "plain",
    "hf_plain": "HF generate",
    "hf_assisted": "HF assisted",
}


def draw(data: Path) -> Figure:
    """Return the figure from ``throughput.csv``, every method at its fastest K."""
    rows = style.read(data / "throughput.csv")
    batches = sorted({row["batch"] for row in rows})
    figure, panels = style.panels(len(batches), height=3.9)
    named = {}
    for ax, batch in zip(panels, batches, strict=True):
        tuned = _tuned([row for row in rows if row["batch"] == batch])
        _curves(ax, tuned)
        _frame(ax, tuned, batch)
        _baselines(ax, tuned)
        if ax is panels[0]:
            ax.legend(loc="upper left", frameon=False, fontsize=7.5, borderaxespad=0)
        named[ax] = _others(ax, tuned)
    place(named)
    return figure


def _tuned(rows: list[Row]) -> list[Row]:
    """Return each method, knob and verifier at its fastest K."""
    best: dict[tuple[str, str], Row] = {}
    for row in sorted(rows, key=lambda row: row["tokens_per_second"]):
        best[_series(row), str(row["knob"])] = row
    return list(best.values())


def _curves(ax: Axes, rows: list[Row]) -> None:
    for series in sorted({_series(row) for row in rows}, key=_place):
        name, _, verifier = series.partition("@")
        own = [row for row in rows if _series(row) == series and _kl(row) >= LEAST_KL]
        own.sort(key=_kl)
        if not own or name not in CURVES:
            continue
        kl, speed = [_kl(row) for row in own], [row["tokens_per_second"] for row in own]
        low, high = _interval(own)
        look = style.look(name).options()
        if verifier:  # hollow beside those that are verified token by token
            look["mfc"] = "white"
        label = style.NAME[name] + f", {verifier}" * bool(verifier)
        ax.errorbar(kl, speed, [low, high], lw=1.3, elinewidth=0.8, label=label, **look)


def _place(series: str) -> tuple[int, str]:
    """Return where a curve stands in the legend."""
    name = series.partition("@")[0]
    return CURVES.index(name) if name in CURVES else len(CURVES), series


def _others(ax: Axes, rows: list[Row]) -> list[Name]:
    """Draw policies that are no family here as points and return their names."""
    names = []
    for row in rows:
        spent = row["emitted_kl_per_token"]
        if _family(row) in CURVES or row["method"] in BASELINES or spent is None:
            continue
        if spent < LEAST_KL:
            continue
        look = style.look(row["method"])
        at = (spent, row["tokens_per_second"])
        ax.plot(*at, **{**look.options(4.0), "ls": ""})
        names.append(Name(row["method"].replace("_", " "), at, look.colour))
    return names


def _baselines(ax: Axes, rows: list[Row]) -> None:
    """Draw what emits the target's own law as horizontal lines, named to their right."""
    lossless = next((row for row in rows if _series(row) == "speculative"), None)
    named = [(lossless, f"lossless,\nK = {lossless['num_draft_tokens']:g}")] if lossless else []
    for method, name in BASELINES.items():
        named += [(row, name) for row in rows if row["method"] == method][:1]
    named.sort(key=lambda pair: pair[0]["tokens_per_second"])
    least = ROOM * max(row["tokens_per_second"] for row in rows)
    height = -least
    for row, name in named:
        speed = row["tokens_per_second"]
        height = max(speed, height + least)
        ax.axhline(speed, color=style.INK, lw=0.8, ls=":")
        ax.annotate(name, (1, height), (3, 0), xycoords=("axes fraction", "data"),
                    textcoords="offset points", ha="left", va="center", fontsize=7)  # fmt: skip


def _frame(ax: Axes, rows: list[Row], batch: float) -> None:
    ax.set_xscale("log")
    largest = max([_kl(row) for row in rows] + [KL_TICKS[-1]])
    ax.set_xlim(LEAST_KL * 0.85, largest * 1.9)
    ax.set_ylim(0, max(row["tokens_per_second"] for row in rows) * 1.12)
    style.ticks(ax.xaxis, KL_TICKS)
    ax.set_xlabel("emitted KL, nats per token")
    ax.set_ylabel("new tokens per second")
    ax.set_title(f"batch {batch:g}")


def _interval(rows: list[Row]) -> tuple[list[float], list[float]]:
    low = [row["tokens_per_second"] - row["tokens_per_second_low"] for row in rows]
    high = [row["tokens_per_second_high"] - row["tokens_per_second"] for row in rows]
    return [max(0.0, own) for own in low], [max(0.0, own) for own in high]


def _kl(row: Row) -> float:
    return row["emitted_kl_per_token"] or 0.0


def _series(row: Row) -> str:
    """Return the family with ``@verifier``, which tables of the chain alone may leave out."""
    verifier = row.get("verifier") or "chain"
    return _family(row) + f"@{verifier}" * (verifier != "chain")


def _family(row: Row) -> str:
    knob = str(row["knob"] or "").partition("=")[0]
    return f"{row['method']}_{knob}" if row["method"] == "band" else row["method"]
