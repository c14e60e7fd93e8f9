"""The tuner's predictions against measured decodes, and lossy policies against a better K."""

from . import _style as style
from ._style import Any, Axes, Figure, Path, Row

# family → colour, marker and name; the chain's markers are full, the block's hollow
FAMILIES = {
    "plain": (style.MUTED, "x", "plain decoding (also dotted)"),
    "speculative": (style.COLOUR["speculative"], "s", "speculative (lossless)"),
    "band:price": (style.COLOUR["band_price"], "o", "band, constant price"),
    "band:price,per_row=True": (style.COLOUR["band_block"], "D", "each row's own band"),
    "cactus:delta": (style.COLOUR["cactus"], "^", "Cactus"),
    "lenience:lenience": (style.COLOUR["cactus_exact"], "v", "lenience"),
    "mixture:alpha": (style.COLOUR["typical"], "P", "mixture"),
}
OTHER = (style.COLOUR["band_delta"], ".", None)


def draw(data: Path) -> Figure:
    """Return the figure from ``tune.csv``: a row for every batch size."""
    rows = style.read(data / "tune.csv")
    batches = sorted({row["batch"] for row in rows})
    count = len(batches)
    figure, panels = style.panels(3 * count, height=2.8, rows=count)
    for number, batch in enumerate(batches):
        batch_rows = [row for row in rows if row["batch"] == batch]
        first, second, third = panels[3 * number : 3 * number + 3]
        _predictions(first, batch_rows, batch)
        levels = sorted({row["level"] for row in batch_rows})
        _by_width(second, batch_rows, levels[len(levels) // 2])
        _relaxing(third, batch_rows)
    style.headline(figure, "The settings predicted to be fastest are nearly the fastest measured")
    handles: dict[str, Any] = {}
    for axes in panels:
        handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True)) | handles
    where: Any = {"loc": "outside lower center", "ncols": 2 if style.narrow() else 4}
    figure.legend(handles.values(), handles.keys(), **where, frameon=False, fontsize=7.5)
    return figure


def _predictions(axes: Axes, rows: list[Row], batch: float) -> None:
    """Draw the measured speed of every setting against the predicted; ring chosen settings."""
    for row in rows:
        colour, marker, name = _look(row)
        hollow = "white" if row["verifier"] == "block" and marker not in "x*" else colour
        at = row["predicted_speed"], row["measured_speed"]
        axes.plot(*at, marker, color=colour, mfc=hollow, ms=3.6, mew=0.9, label=name)
        if row["chosen"]:
            axes.plot(*at, "o", mfc="none", mec=style.INK, ms=9, mew=0.9, label="chosen")
    ends = [row[name] for row in rows for name in ("predicted_speed", "measured_speed")]
    low, high = min(ends) * 0.95, max(ends) * 1.05
    axes.plot([low, high], [low, high], color=style.MUTED, lw=0.8, ls=":")
    axes.set(xlim=(low, high), ylim=(low, high), xlabel="predicted tokens/s")
    axes.set(ylabel="measured tokens/s", title=f"Batch {batch:g}")


def _by_width(axes: Axes, rows: list[Row], level: float) -> None:
    """Draw measured speed against K at one level, with predictions as thin lines."""
    settings = [row for row in rows if row["level"] == level]
    for key in dict.fromkeys((row["family"], row["verifier"]) for row in settings):
        line = [row for row in settings if (row["family"], row["verifier"]) == key]
        colour, marker, _ = _look(line[0])
        if key[0] == "plain":
            axes.axhline(line[0]["measured_speed"], color=colour, lw=0.9, ls=":")
            continue
        names = "num_draft_tokens", "measured_speed", "predicted_speed"
        widths, speeds, predictions = style.curve(line, *names)
        look: Any = {"ls": "--", "mfc": "white"} if key[1] == "block" else {"ls": "-"}
        axes.plot(widths, speeds, marker=marker, color=colour, ms=3.2, lw=1.1, **look)
        axes.plot(widths, predictions, color=colour, lw=0.5, alpha=0.5)
    axes.set_xticks(sorted({row["num_draft_tokens"] for row in settings} - {0}))
    axes.set(xlabel="K (dashed: block, thin: predicted)", ylabel="tokens/s")
    axes.set_title(f"{level:g} nats a token")


def _relaxing(axes: Axes, rows: list[Row]) -> None:
    """Draw, for each level, a lossy family's speed at its best K over the best lossless speed."""
    levels = sorted({row["level"] for row in rows})
    best = {level: _best(rows, level, "speculative", None) for level in levels}
    for key in dict.fromkeys((row["family"], row["verifier"]) for row in rows):
        if key[0] in ("plain", "speculative"):
            continue
        points = [(level, _best(rows, level, *key)) for level in levels]
        speeds = {level: row["measured_speed"] for level, row in points if row is not None}
        known = [(level, own / best[level]["measured_speed"]) for level, own in speeds.items()]
        colour, marker, _ = _look({"family": key[0]})
        look: Any = {"ls": "--", "mfc": "white"} if key[1] == "block" else {"ls": "-"}
        look |= {"marker": marker, "color": colour}
        axes.plot(*zip(*known, strict=True), ms=3.6, lw=1.1, **look)
    plain = _best(rows, levels[0], "plain", None)["measured_speed"]
    lossless = best[levels[0]]["measured_speed"]
    axes.axhline(1, color=style.INK, lw=0.8)
    axes.axhline(plain / lossless, color=style.MUTED, lw=0.9, ls=":")
    style.log_axis(axes.xaxis, levels, "KL, nats per token")
    axes.set(ylabel="over the best lossless K", title="Against lossless")


def _best(rows: list[Row], level: float, family: str, verifier: str | None) -> Any:
    settings = [row for row in rows if row["level"] == level and row["family"] == family]
    settings = [row for row in settings if verifier in (None, row["verifier"])]
    return max(settings, key=lambda row: row["measured_speed"], default=None)


def _look(row: Row) -> tuple[str, str, str | None]:
    return FAMILIES.get(str(row["family"]), OTHER)
