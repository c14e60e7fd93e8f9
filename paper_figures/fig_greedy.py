"""Tokens a call at temperature 0 against regret a token: the optimum, and rules of the field."""

from . import _style as style
from ._style import Any, Figure, Path, Row

WIDTH = 5
PANELS = {"greedy.csv": "SmolLM2's head drafts, K = 5", "greedy_ngram.csv": "n-grams draft, K = 5"}
# rule → (name, colour, line, marker of the default knob)
RULES: dict[str, tuple[str, str, Any, str]] = {
    "regret, block": ("regret in a block (optimum)", style.COLOUR["band_price"], "-", ""),
    "regret, chain; margin; cascade": ("regret in a chain, margin", "#56B4E9", "-", "o"),
    "ASD, B = 8, m = 2": ("ASD", "#CC79A7", "--", "s"),
    "relaxed, k = 10": ("relaxed top-k, δ", style.COLOUR["own"], "-.", ""),
    "MARS": ("MARS", style.COLOUR["cactus"], ":", "^"),
    "FLy, W = 2": ("FLy, W = 2", style.MUTED, "--", "v"),
}


def draw(data: Path) -> Figure:
    """Return the figure from ``greedy.csv`` and ``greedy_ngram.csv``: a panel a drafter."""
    figure, panels = style.panels(2, height=3.2)
    for axes, (file, title) in zip(panels, PANELS.items(), strict=True):
        rows = [row for row in style.read(data / file) if row["num_draft_tokens"] == WIDTH]
        (strict,) = (row["tokens_per_call"] for row in rows if row["rule"] == "strict")
        for rule, (name, colour, line, marker) in RULES.items():
            own = [row for row in rows if row["rule"] == rule]
            curve: list[Row] = [row for row in own if row["asked"] is not None]
            regrets, tokens = style.columns(curve, "regret", "tokens_per_call")
            axes.plot([0, *regrets], [strict, *tokens], color=colour, ls=line, lw=1.4, label=name)
            usual = [row for row in own if row["asked"] is None]
            if usual and marker and usual[0]["regret"] <= axes.get_xlim()[1]:
                at = usual[0]["regret"], usual[0]["tokens_per_call"]
                axes.plot(*at, marker=marker, color=colour, ms=4.5, ls="")
        axes.set(title=title, xlabel="regret, nats a token", xlim=(0, 0.152))
    panels[0].set_ylabel("tokens a call")
    style.headline(
        figure, "Temperature 0: at equal regret the optimum in blocks makes most tokens a call"
    )
    style.legend_below(figure, panels[0], across=3)
    return figure
