"""A GPU in two panels: one verification against its floor, and speed against fidelity."""

from matplotlib.ticker import FuncFormatter, NullFormatter

from . import _style as style
from ._style import Any, Axes, Figure, Path, Row

# share of the copy bandwidth that is aimed at
BANDWIDTH_GOAL = 0.7
# policy's name in the rows → (look, name in the legend)
POLICIES = {
    "speculative": ("speculative", "lossless"),
    "band": ("band_price", "band"),
    "cactus": ("cactus", "Cactus"),
    "lenience": ("other", "lenience"),
}
# verifier of whole drafted paths
BLOCK = "block"


def draw(data: Path) -> Figure:
    """Return the figure from ``gpu_verify.csv`` and ``gpu_decode.csv``."""
    verify, decode = (style.read(data / f"gpu_{name}.csv") for name in ("verify", "decode"))
    decode = [row for row in decode if str(row["loop"]).startswith("device")]
    figure, panels = style.panels(2, height=3.1)
    place, pair_rows = _most_texts(decode)
    figure.suptitle(place, x=0.99, ha="right", fontsize=8, weight="normal", color=style.MUTED)
    _steps(panels[0], verify)
    _speeds(panels[1], pair_rows)
    return figure


def _most_texts(rows: list[Row]) -> tuple[str, list[Row]]:
    """Return a title and the rows of the largest batch; one text alone shows no order of policies.

    Each row gets ``speed``, the tokens per second of the rounds without prefill.
    """
    batch = max((row["batch"] for row in rows), default=0)
    rows = [row for row in rows if row["batch"] == batch]
    for row in rows:
        row["speed"] = 1000 * batch * row["tokens_per_call"] / row["round_ms"]
    name = "{target} + {draft}, batch {batch:g}".format(**rows[0]) if rows else ""
    return name, rows


def _steps(axes: Axes, rows: list[Row]) -> None:
    """Draw microseconds against the floor's, with filled marks for kernels, open for torch."""
    for policy, (colour, _) in POLICIES.items():
        timed = [row for row in rows if str(row["policy"]).partition(":")[0] == policy]
        for column, fill in (("kernel_us", None), ("torch_us", "white")):
            floor, took = style.columns(timed, "floor_us", column)
            axes.plot(floor, took, "o", ms=4, mew=0.9, color=style.COLOUR[colour], mfc=fill)
    for axis, scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
        scale("log")
        axis.set_minor_formatter(NullFormatter())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    ends = [min(row["floor_us"] for row in rows), max(row["floor_us"] for row in rows)]
    axes.plot(ends, ends, color=style.INK, lw=1)
    axes.plot(ends, [end / BANDWIDTH_GOAL for end in ends], color=style.MUTED, lw=1, ls="--")
    style.label(axes, "floor", (ends[1], ends[1]), style.INK, shift=(3, -6))
    axes.set(xlabel="a copy of the bytes that must be read, µs", ylabel="one verification, µs")
    axes.set_title("Kernels outrun torch at every size")
    note = f"filled: kernel, open: torch\ndashed: {BANDWIDTH_GOAL:.0%} of copy bandwidth"
    corner: Any = {"ha": "right", "fontsize": 7.5, "transform": axes.transAxes}
    axes.text(0.98, 0.03, note, color=style.MUTED, **corner)


def _speeds(axes: Axes, rows: list[Row]) -> None:
    """Draw the speed of rounds against emitted KL, each method at its fastest K."""
    drafted = [row for row in rows if row["num_draft_tokens"]]
    for policy, (colour, name) in POLICIES.items():
        for verifier in ("chain", BLOCK):
            line = [r for r in drafted if (r["policy"], r["verifier"]) == (policy, verifier)]
            best = style.fastest(line, "speed", lambda row: row["knob"]).values()
            line = sorted(best, key=lambda row: row["emitted_kl_per_token"] or 0.0)
            spent, speed = style.columns(line, "emitted_kl_per_token", "speed")
            if spent:
                look: Any = {"ls": "-"} if verifier == BLOCK else {"ls": "--", "mfc": "white"}
                label = name + f", {BLOCK}" * (verifier == BLOCK)
                look |= {"label": label, "color": style.COLOUR[colour], "marker": "o"}
                axes.plot(spent, speed, ms=4, lw=1.2, **look)
    for row in rows:
        if not row["num_draft_tokens"]:
            axes.axhline(row["speed"], color=style.MUTED, lw=1)
            style.label(axes, "target alone", (0, row["speed"]), style.MUTED, shift=(2, 5))
    axes.set(xlabel="emitted KL, nats per token", ylabel="tokens per second of rounds alone")
    axes.set_title("Lossy rounds outrun the target alone")
    axes.legend(frameon=False, fontsize=7)
