"""End-to-end speed against emitted KL: one curve per family, one panel per batch size."""

from . import _style as style
from ._style import Axes, Figure, Path, Row

CURVES = ("band_price", "band_delta", "cactus")
# least KL on the logarithmic axis; lossless methods have KL 0 and are horizontal lines
LEAST_KL = 3e-3
# least distance between the names of baselines, as a share of the panel's height
ROOM = 0.055
KL_TICKS = (0.003, 0.01, 0.03, 0.1, 0.3)
BASELINES = {"plain": "plain", "hf_plain": "HF generate", "hf_assisted": "HF assisted"}


def draw(data: Path) -> Figure:
    """Return the figure from ``throughput.csv``, every method at its fastest K."""
    rows = style.read(data / "throughput.csv")
    batches = sorted({row["batch"] for row in rows})
    figure, panels = style.panels(len(batches), height=3.9)
    for axes, batch in zip(panels, batches, strict=True):
        own = [row for row in rows if row["batch"] == batch]
        tuned = list(style.fastest(own, "tokens_per_second", _method).values())
        _curves(axes, tuned)
        _frame(axes, tuned, batch)
        _baselines(axes, tuned)
        if axes is panels[0]:
            axes.legend(loc="upper left", frameon=False, fontsize=7.5, borderaxespad=0)
        _others(axes, tuned)
    return figure


def _method(row: Row) -> tuple[str, str]:
    return _series(row), str(row["knob"])


def _curves(axes: Axes, rows: list[Row]) -> None:
    for series in sorted({_series(row) for row in rows}, key=_place):
        name, _, verifier = series.partition("@")
        curve = [row for row in rows if _series(row) == series and _kl(row) >= LEAST_KL]
        curve.sort(key=_kl)
        if not curve or name not in CURVES:
            continue
        kl, speed = [_kl(row) for row in curve], [row["tokens_per_second"] for row in curve]
        look = style.look(name).options()
        if verifier:  # hollow markers, as opposed to curves of the chain
            look["mfc"] = "white"
        label = style.NAME[name] + f", {verifier}" * bool(verifier)
        axes.errorbar(
            kl,
            speed,
            style.sides(curve, "tokens_per_second"),
            lw=1.3,
            elinewidth=0.8,
            label=label,
            **look,
        )


def _place(series: str) -> tuple[int, str]:
    """Return the sort key of a curve in the legend."""
    name = series.partition("@")[0]
    return CURVES.index(name) if name in CURVES else len(CURVES), series


def _others(axes: Axes, rows: list[Row]) -> None:
    """Draw policies without a curve as points, with names that stay inside the panel."""
    for row in rows:
        family, spent = style.series(row["method"], row["knob"]), _kl(row)
        if family in CURVES or row["method"] in BASELINES or spent < LEAST_KL:
            continue
        look = style.look(row["method"])
        at = (spent, row["tokens_per_second"])
        axes.plot(*at, **{**look.options(4.0), "ls": ""})
        name = row["method"].replace("_", " ")
        shift = (6 if 0.03 < spent < 0.3 else -6, 0)
        style.label(axes, name, at, look.colour, shift=shift, fontsize=7)


def _baselines(axes: Axes, rows: list[Row]) -> None:
    """Draw lossless methods as horizontal lines, with their names at the right."""
    lossless = next((row for row in rows if _series(row) == "speculative"), None)
    lines = [(lossless, f"lossless,\nK = {lossless['num_draft_tokens']:g}")] if lossless else []
    for method, name in BASELINES.items():
        lines += [(row, name) for row in rows if row["method"] == method][:1]
    lines.sort(key=lambda line: line[0]["tokens_per_second"])
    least = ROOM * max(row["tokens_per_second"] for row in rows)
    height = -least
    for row, name in lines:
        speed = row["tokens_per_second"]
        height = max(speed, height + least)
        axes.axhline(speed, color=style.INK, lw=0.8, ls=":")
        axes.annotate(name, (1, height), (3, 0), xycoords=("axes fraction", "data"),
                      textcoords="offset points", ha="left", va="center", fontsize=7)  # fmt: skip


def _frame(axes: Axes, rows: list[Row], batch: float) -> None:
    style.log_axis(axes.xaxis, KL_TICKS, "emitted KL, nats per token")
    largest = max([_kl(row) for row in rows] + [KL_TICKS[-1]])
    axes.set_xlim(LEAST_KL * 0.85, largest * 1.9)
    axes.set_ylim(0, max(row["tokens_per_second"] for row in rows) * 1.12)
    axes.set(ylabel="new tokens per second", title=f"batch {batch:g}")


def _kl(row: Row) -> float:
    return row["emitted_kl_per_token"] or 0.0


def _series(row: Row) -> str:
    """Return the family, with ``@verifier`` unless the verifier is the chain or not named."""
    verifier = row.get("verifier") or "chain"
    return style.series(row["method"], row["knob"]) + f"@{verifier}" * (verifier != "chain")
