"""Gap of policies to the best verification of a drafted path, on exact random trees."""

from . import _style as style
from ._style import Axes, Figure, Path, Row

CURVES = {
    ("band_block", "block"): "band, block",
    ("band", "block"): "band of each row, block",
    ("cactus", "block"): "Cactus, block (its emitted law)",
    ("band", "chain"): "band, token by token",
    ("cactus", "chain"): "Cactus, token by token",
}
# range of nats per token that is drawn; above it every drafted token is accepted, without a gap
LEAST, MOST = 1e-3, 0.2
TICKS = (0.001, 0.003, 0.01, 0.03, 0.1)


def draw(data: Path) -> Figure:
    """Return the figure from ``block_gap.csv``: the first tree, and the gaps on all."""
    rows = style.read(data / "block_gap.csv")
    figure, (tree, gaps) = style.panels(2, height=3.5)
    first = rows[0]["tree"]
    ours = [row for row in rows if row["tree"] == first and _shown(row)]
    bound = sorted({(r["divergence_per_token"], r["optimal_tokens_per_call"]) for r in ours})
    tree.plot(*zip(*bound, strict=True), color=style.INK, lw=2.2, label="the bound: any verifier")
    for key, name in CURVES.items():
        for number, name_of_tree in enumerate(sorted({row["tree"] for row in rows})):
            own = [r for r in rows if r["tree"] == name_of_tree and _shown(r)]
            points = [r for r in own if (style.band_of(r), r["verifier"]) == key]
            look = style.path_look(key)
            keys = "divergence_per_token", "tokens_per_call", "gap_percent"
            spent, tokens, gap = style.curve(points, *keys)
            if name_of_tree == first:
                tree.plot(spent, tokens, lw=1.1, **look)
            gaps.plot(spent, gap, lw=0.9, label=name if not number else None, **look)
    _frame(tree, "tokens per target call", "One tree, K = 4: near the bound")
    _frame(gaps, "below the bound, %", "Three trees: blocks lose least")
    tree.legend(frameon=False, fontsize=7, loc="upper left")
    style.legend_below(figure, gaps, across=3)
    return figure


def _shown(row: Row) -> bool:
    return LEAST <= row["divergence_per_token"] <= MOST


def _frame(axes: Axes, height: str, title: str) -> None:
    style.log_axis(axes.xaxis, TICKS, "metered KL, nats per token")
    axes.set(ylabel=height, title=title)
