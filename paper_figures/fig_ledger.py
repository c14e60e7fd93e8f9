"""A hard cap on every answer beside a constant price that spends as much on average."""

from . import _style as style
from ._style import Any, Axes, Figure, Path, Row

CAP, VERIFIER = 0.05, "chain"
LOOK = {
    "band": ("band_price", "o", "band, constant price"),
    "ledger": ("band_block", "D", "ledger"),
}
LINES = {"chain": "-", "block": "--"}


def draw(data: Path) -> Figure:
    """Return the figure from ``ledger.csv`` and ``ledger_answers.csv``."""
    rows, books = (style.read(data / f"{name}.csv") for name in ("ledger", "ledger_answers"))
    figure, (left, right) = style.panels(2, height=3.3)
    _answers(left, rows, books)
    _tokens(right, rows)
    return figure


def _answers(axes: Axes, rows: list[Row], books: list[Row]) -> None:
    """Draw the nats spent after t tokens: the median answer, the largest, and the cap."""
    bands = [row for row in rows if row["kind"] == "band" and row["verifier"] == VERIFIER]
    nearest = min(bands, key=lambda row: abs(row["kl_per_token"] - CAP))["setting"]
    for kind, setting in (("band", nearest), ("ledger", CAP)):
        key = (VERIFIER, kind, setting)
        book = [row for row in books if (row["verifier"], row["kind"], row["setting"]) == key]
        tokens, median, largest = style.columns(book, "tokens", "median", "largest")
        colour, _, name = LOOK[kind]
        label = f"{name} {setting:g}" if kind == "band" else name
        axes.plot(tokens, largest, color=style.COLOUR[colour], label=f"{label}: most of any answer")
        axes.plot(tokens, median, color=style.COLOUR[colour], ls=":", label="its median")
    last = max(row["tokens"] for row in books)
    axes.plot([0, last], [0, CAP * last], color=style.INK, lw=1, ls="--", label=f"cap, {CAP:g} · t")
    axes.set(
        xlabel="tokens t of an answer",
        ylabel="emitted KL so far, nats",
        title="A ledger keeps every answer below the cap",
    )
    axes.legend(frameon=False, fontsize=7)


def _tokens(axes: Axes, rows: list[Row]) -> None:
    """Draw tokens per target call against the mean KL."""
    for verifier, line in LINES.items():
        for kind, (colour, marker, name) in LOOK.items():
            points = [row for row in rows if (row["verifier"], row["kind"]) == (verifier, kind)]
            spent, tokens = style.curve(points, "kl_per_token", "tokens_per_call")
            look: Any = {"color": style.COLOUR[colour], "marker": marker, "ms": 4}
            look["ls"] = line if kind == "band" else "none"
            look["mfc"] = style.COLOUR[colour] if verifier == "chain" else "white"
            axes.plot(spent, tokens, label=f"{name}, {verifier}", **look)
    style.log_axis(axes.xaxis, (0.01, 0.03, 0.1), "emitted KL, nats per token")
    axes.set(ylabel="tokens per target call", title="The cap costs few tokens per call")
    axes.legend(frameon=False, fontsize=7)
