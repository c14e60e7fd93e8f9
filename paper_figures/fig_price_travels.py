"""Knobs that spend equal nats under several laws, and equal nats spent on other targets."""

import math

from . import _style as style
from ._style import Any, Axes, Figure, Path, Row

# family → (policy whose look the family has, name with the knob)
FAMILIES = {
    "band:price": ("band_price", "band: price"),
    "lenience:lenience": ("other", "lenience: ℓ"),
    "cactus:delta": ("cactus", "Cactus: δ"),
}
ELSEWHERE = {
    "tempered": ("other", "colder target, lossless"),
    "tempered, half by the band": ("band_delta", "colder target, then the band"),
}
LEVELS = (0.02, 0.05, 0.1)


def draw(data: Path) -> Figure:
    """Return the figure from ``price_travels*.csv`` and ``same_nats.csv``."""
    figure, (left, right) = style.panels(2, height=3.3)
    _knobs(
        left, [row for path in sorted(data.glob("price_travels*.csv")) for row in style.read(path)]
    )
    _elsewhere(right, style.read(data / "price_travels.csv"), style.read(data / "same_nats.csv"))
    return figure


def _knobs(axes: Axes, rows: list[Row]) -> None:
    """Draw, at each level, every law's knob over the geometric mean of all laws' knobs."""
    for place, (family, (look, name)) in enumerate(FAMILIES.items()):
        options: Any = style.look(look).options(4.5) | {"ls": "none", "label": name}
        for at, level in enumerate(LEVELS):
            own = [row["knob"] for row in rows if (row["family"], row["level"]) == (family, level)]
            mean = math.exp(sum(map(math.log, own)) / len(own))
            x = at + 0.22 * (place - 1)
            axes.plot([x] * len(own), [knob / mean for knob in own], **options)
            options.pop("label", None)
    axes.axhline(1, color=style.INK, lw=1, ls=":")
    axes.set_xticks(range(len(LEVELS)), [f"{level:g}" for level in LEVELS])
    style.log_axis(axes.yaxis, (0.01, 0.1, 0.5, 1, 2, 10), "knob ÷ mean of all laws")
    low, high = axes.get_ylim()
    axes.set(
        xlabel="nats per token",
        title="Prices vary little, Cactus's δ a lot",
        ylim=(low, 12 * high),
    )
    axes.legend(frameon=False, fontsize=7.5, loc="upper left")


def _elsewhere(axes: Axes, laws: list[Row], rows: list[Row]) -> None:
    """Draw tokens per call against the nats from the target's law at temperature 1."""
    own = [row for row in laws if row["law"] == "speculative"]
    base = next(row["tokens_per_call"] for row in own if row["family"] == "speculative")
    alone = [row for row in own if row["family"] == "band:price"]
    series = {"the band alone": ("band_price", alone)}
    for spent, (look, name) in ELSEWHERE.items():
        series[name] = look, [row for row in rows if row["spent"] == spent]
    for name, (look, points) in series.items():
        nats, tokens, error = style.curve(points, "level", "tokens_per_call", "tokens_per_call_se")
        options: Any = style.look(look).options() | {"capsize": 2, "label": name}
        axes.errorbar(nats, tokens, error, **options)
    axes.axhline(base, color=style.INK, lw=1, ls=":")
    style.log_axis(axes.xaxis, (0.02, 0.05, 0.1, 0.2), "nats per token, from the target's law")
    axes.set(ylabel="tokens per call", title="A colder target buys no tokens")
    axes.legend(frameon=False, fontsize=7.5, loc="upper left")
