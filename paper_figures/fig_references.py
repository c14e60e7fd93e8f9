"""Gain in acceptance against the changed probability of a person's next token, for each rule."""

import numpy as np

from . import _style as style
from ._style import Any, Axes, Figure, Path, Row

PANELS = {"gsm8k_test.jsonl": "GSM8K solutions", "humaneval.jsonl": "HumanEval solutions"}
# family → (name, colour, marker); bands have colours by their tilt
OTHERS = {
    "lenience": ("lenience", "#009E73", "P"),
    "cactus": ("Cactus", style.COLOUR["cactus"], "^"),
    "mixture": ("mixture", style.COLOUR["own"], "v"),
    "typical recover=target": ("typical", style.MUTED, "x"),
    "rules.py:cascade_token_3": ("cascade", style.COLOUR["cactus_exact"], "s"),
    "speculative": ("colder alone", style.INK, "."),
}
TILTS = {0.0: "#0072B2", 0.03: "#4a5fb0", 0.045: "#7a4aa5", 0.08: "#a8549c", 0.12: "#CC79A7"}
LEVELS = (0.02, 0.05)  # nats per token at which the bands' points are joined by a line


def draw(data: Path) -> Figure:
    """Return the figure from ``references.csv`` and ``facts.csv``: a panel a file."""
    rows = style.read(data / "references.csv")
    figure, (*panels, facts) = style.panels(3, height=3.3)
    for axes, (name, title) in zip(panels, PANELS.items(), strict=True):
        _curves(axes, [row for row in rows if row["file"] == name], "reference_change")
        axes.set(title=title, xlabel="change of the chance\nof the person's token")
    _curves(facts, style.read(data / "facts.csv"), "chance_change")
    facts.set(title="Facts", xlabel="change of the chance\nof the right word")
    panels[0].set_ylabel("acceptance beyond lossless")
    style.headline(figure, "At equal nats a slightly colder band keeps more of the person's token")
    style.legend_below(figure, panels[0], across=3)
    return figure


def _curves(axes: Axes, rows: list[Row], column: str) -> None:
    """Draw each family's curve along its knob, and the bands' points at equal nats."""
    families: dict[str, list[Row]] = {}
    for row in rows:
        families.setdefault(_family(row["policy"]), []).append(row)
    for tilt, colour in TILTS.items():
        own = families[f"band tilt={tilt}" if tilt else "band"]
        name = f"band at temperature {1 / (1 + tilt):.2f}" if tilt else "band"
        axes.plot(*style.curve(own, column, "gain"), color=colour, lw=1.4, label=name, zorder=3)
    for name, (words, colour, marker) in OTHERS.items():
        look: Any = {"ms": 3.5, "lw": 0.8, "ls": "--", "marker": marker, "color": colour}
        nats = [row["nats"] for row in families[name] if row["nats"]]
        words += f", {min(nats):.1g} to {max(nats):.1g} nats"
        axes.plot(*style.curve(families[name], column, "gain"), label=words, **look)
    for level in LEVELS:
        at = []
        for tilt in TILTS:
            own = families[f"band tilt={tilt}" if tilt else "band"]
            nats, *curves = style.curve(own, "nats", column, "gain")
            at.append([np.interp(level, nats, curve) for curve in curves])
        axes.plot(*zip(*at, strict=True), "o", color=style.INK, ms=2.5, lw=0.8, ls="-", zorder=4)
        style.label(axes, f"{level:g} nats", tuple(at[-1]), style.INK, shift=(3, 3), fontsize=6.5)
    axes.axvline(0, color=style.MUTED, lw=0.7, ls=":")
    axes.set(xlim=(-0.055, 0.045), xticks=(-0.04, 0, 0.04), ylim=(-0.02, 0.13))


def _family(spec: str) -> str:
    """Return a policy's spec without the knob that is swept."""
    name, _, knobs = spec.rpartition(":") if ".py:" in spec else spec.partition(":")
    return " ".join([name, *knobs.split(",")[1:]])
