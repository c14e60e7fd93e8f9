"""Tokens a target call over lossless decoding, and surprise, on whole answers; 90 % intervals."""

from . import _style as style
from ._style import Any, Figure, Path, Row

# normal quantile of 90 % in the middle
SIDE = 1.645
PANELS = {
    "over_lossless": ("Cactus gains the fewest tokens", "tokens a target call,\n× lossless"),
    "surprise": ("Cactus's tokens are least likely",
                 "tokens less likely under the target,\nnats a token"),
}  # fmt: skip


def draw(data: Path) -> Figure:
    """Return the figure from ``answers.csv``: one line per policy, all prompts together."""
    rows = [row for row in style.read(data / "answers.csv") if row["which"] == "all"]
    figure, panels = style.panels(
        len(PANELS), height=1.1 + (0.5 if style.narrow() else 0.32) * len(rows)
    )
    for axes, (column, (title, name)) in zip(panels, PANELS.items(), strict=True):
        neutral = 1.0 if column == "over_lossless" else 0.0
        axes.axvline(neutral, color=style.MUTED, lw=0.8)
        for place, row in enumerate(rows):
            if row[column] is None:
                continue
            error = SIDE * (row[f"{column}_se"] or 0.0)
            axes.errorbar([row[column]], [-place], xerr=[error], elinewidth=1.4, **_look(row))
        axes.set(title=title, xlabel=name, ylim=(0.6 - len(rows), 0.6))
        names = [_name(row).replace(" (", "\n(" if style.narrow() else " (") for row in rows]
        axes.set_yticks([-place for place in range(len(rows))], names)
        axes.margins(x=0.12)
    if not style.narrow():
        panels[1].tick_params(labelleft=False)
    return figure


def _look(row: Row) -> dict[str, Any]:
    look = style.look(style.series(*_parts(row)))
    return look.options(5) | ({"mfc": "white"} if "tilt=" in row["policy"] else {})


def _parts(row: Row) -> tuple[str, str]:
    name, _, knobs = str(row["policy"]).partition(":")
    return name, knobs


def _name(row: Row) -> str:
    """Return the policy, with the nats that its answers spent."""
    name, knobs = _parts(row)
    title = {"speculative": "lossless", "cactus": "Cactus"}.get(name, name)
    tilt = ", tilted" if "tilt=" in knobs else ""
    return f"{title}{tilt} ({row['nats']:.3f} nats a token)"
