"""A GPU in four panels: verification, speed and fidelity, the parts of a round, the prediction."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from . import _style as style
from ._style import Row

# share of the copy bandwidth, and of the predicted speed-up, that is aimed at
BANDWIDTH_GOAL, PREDICTION_GOAL = 0.7, 0.9
# policy as rows name it: colour, name
POLICIES = {
    "speculative": ("speculative", "lossless"),
    "band": ("band_price", "band"),
    "cactus": ("cactus", "Cactus"),
    "soft_band": ("soft_band", "soft band"),
    "typical": ("typical", "typical"),
}
# rows marked block are judged as whole drafted paths
BLOCK = "block"
PARTS = {
    "draft_ms": (style.COLOUR["band_delta"], "draft"),
    "target_ms": (style.COLOUR["band_price"], "target"),
    "verify_ms": (style.COLOUR["cactus"], "verification"),
    "other_ms": (style.COLOUR["draft"], "the rest"),
}


def draw(data: Path) -> Figure:
    """Return the figure from ``gpu_verify.csv`` and ``gpu_decode.csv``, where they exist."""
    files = (data / f"gpu_{name}.csv" for name in ("verify", "decode"))
    verify, decode = (style.read(file) if file.is_file() else [] for file in files)
    figure, panels = style.panels(4, height=3.1, rows=2)
    place, pair_rows = _first_place(decode)
    figure.suptitle(place, x=0.99, ha="right", fontsize=8, color=style.MUTED)
    _steps(panels[0], verify)
    _speeds(panels[1], pair_rows)
    _rounds(panels[2], pair_rows)
    _predictions(panels[3], decode)
    return figure


def _first_place(rows: list[Row]) -> tuple[str, list[Row]]:
    """Return the pair and batch that come first in the table, and their rows."""
    keys = ("target", "draft", "batch")
    name = "{target} + {draft}, batch {batch:g}".format(**rows[0]) if rows else ""
    return name, [row for row in rows if all(row[key] == rows[0][key] for key in keys)]


def _absent(axes: Axes, title: str) -> None:
    axes.set_title(title)
    axes.set_axis_off()
    axes.text(0.5, 0.5, "not measured", ha="center", color=style.MUTED, transform=axes.transAxes)


def _steps(axes: Axes, rows: list[Row]) -> None:
    """Draw microseconds over the floor's, kernels filled and torch open."""
    title = "one verification against its floor"
    if not rows:
        return _absent(axes, title)
    for policy, (colour, _) in POLICIES.items():
        timed = [row for row in rows if str(row["policy"]).partition(":")[0] == policy]
        for column, fill in (("kernel_us", None), ("torch_us", "white")):
            floor, took = style.columns(timed, "floor_us", column)
            marks: Any = {} if fill is None else {"mfc": fill}
            axes.plot(floor, took, "o", ms=4, mew=0.9, color=style.COLOUR[colour], **marks)
    for axis, scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
        scale("log")
        axis.set_minor_formatter(NullFormatter())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    ends = [min(row["floor_us"] for row in rows), max(row["floor_us"] for row in rows)]
    axes.plot(ends, ends, color=style.INK, lw=1)
    axes.plot(ends, [end / BANDWIDTH_GOAL for end in ends], color=style.MUTED, lw=1, ls="--")
    style.label(axes, "floor", (ends[1], ends[1]), style.INK, shift=(3, -6))
    axes.set(xlabel="bytes that must be read ÷ copy bandwidth, µs", ylabel="one verification, µs")
    axes.set_title(title)
    _note(axes, f"filled: kernel, open: torch\ndashed: {BANDWIDTH_GOAL:.0%} of copy bandwidth")


def _speeds(axes: Axes, rows: list[Row]) -> None:
    """Draw tokens per second over emitted KL, each method at its fastest K."""
    title = "speed against fidelity"
    drafted = [row for row in rows if row["num_draft_tokens"]]
    if not drafted:
        return _absent(axes, title)
    for policy, (colour, name) in POLICIES.items():
        for verifier in ("chain", BLOCK):
            line = [r for r in drafted if (r["policy"], r["verifier"]) == (policy, verifier)]
            line = sorted(
                _fastest(line, "knob"), key=lambda row: row["emitted_kl_per_token"] or 0.0
            )
            spent, speed = style.columns(line, "emitted_kl_per_token", "tokens_per_second")
            if spent:
                look: Any = {"ls": "-"} if verifier == BLOCK else {"ls": "--", "mfc": "white"}
                label = name + f", {BLOCK}" * (verifier == BLOCK)
                axes.plot(spent, speed, marker="o", ms=4, lw=1.2, label=label,
                          color=style.COLOUR[colour], **look)  # fmt: skip
    for row in rows:
        if not row["num_draft_tokens"]:
            axes.axhline(row["tokens_per_second"], color=style.MUTED, lw=1)
            at = (0, row["tokens_per_second"])
            style.label(axes, "target alone", at, style.MUTED, shift=(2, 5))
    axes.set(xlabel="emitted KL, nats per token", ylabel="tokens per second", title=title)
    axes.legend(frameon=False, fontsize=7)


def _fastest(rows: list[Row], *keys: str) -> list[Row]:
    """Return the fastest row for each value of the columns ``keys``."""
    best: dict[Any, Row] = {}
    for row in rows:
        value = tuple(row[key] for key in keys)
        if row["tokens_per_second"] > best.setdefault(value, row)["tokens_per_second"]:
            best[value] = row
    return list(best.values())


def _rounds(axes: Axes, rows: list[Row]) -> None:
    """Draw the parts of a round of each policy at its fastest K, stacked."""
    title = "where a round's time goes"
    timed = [row for row in rows if row["target_ms"] is not None]
    best = _fastest(timed, "policy", "verifier")[::-1]
    if not best:
        return _absent(axes, title)
    names, left = [_bar(row) for row in best], [0.0] * len(best)
    for part, (colour, name) in PARTS.items():
        size = [max(row[part] or 0.0, 0.0) for row in best]
        axes.barh(names, size, left=left, color=colour, height=0.62, label=name)
        left = [start + more for start, more in zip(left, size, strict=True)]
    axes.grid(visible=False, axis="y")
    axes.set(xlabel="milliseconds of a round", title=title)
    axes.legend(frameon=False, fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.4, -0.16))


def _bar(row: Row) -> str:
    _, name = POLICIES.get(row["policy"], ("", row["policy"]))
    where = f", {BLOCK}" * (row["verifier"] == BLOCK)
    return f"{name}{where}, K = {row['num_draft_tokens']:g}"


def _predictions(axes: Axes, rows: list[Row]) -> None:
    """Draw the measured speed-up over what tokens per call and the costs promise."""
    title = "predicted and measured"
    drawn = [row for row in rows if row["predicted_speedup"] is not None]
    if not drawn:
        return _absent(axes, title)
    for policy, (colour, _) in POLICIES.items():
        points = [row for row in drawn if row["policy"] == policy]
        promised, speedup = style.columns(points, "predicted_speedup", "net_speedup")
        axes.plot(promised, speedup, "o", ms=4, color=style.COLOUR[colour])
    most = 1.05 * max(max(row["predicted_speedup"], row["net_speedup"]) for row in drawn)
    axes.plot([0, most], [0, most], color=style.INK, lw=1)
    axes.plot([0, most], [0, PREDICTION_GOAL * most], color=style.MUTED, lw=1, ls="--")
    axes.set_xlim(0, most)
    axes.set_ylim(0, most)
    axes.set(xlabel="tokens per call ÷ (Kc + v)", ylabel="measured × plain decoding, prompts apart")
    axes.set_title(title)
    _note(axes, f"dashed: {PREDICTION_GOAL:g} of the prediction")


def _note(axes: Axes, text: str) -> None:
    corner: Any = {"ha": "right", "fontsize": 7.5, "transform": axes.transAxes}
    axes.text(0.98, 0.03, text, color=style.MUTED, **corner)
