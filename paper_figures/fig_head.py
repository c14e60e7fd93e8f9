"""Overlap of SmolLM2's EAGLE-3 head against the tokens that it was trained on; one run."""

from . import _style as style
from ._style import Any, Figure, Path

# places that are drawn, and the look of each
PLACES = {1: "-", 2: "--", 3: "-.", 4: ":"}
PROMPTS = {"mt_bench": "MT-bench", "gsm8k": "GSM8K"}


def draw(data: Path) -> Figure:
    """Return the figure from ``head.csv``."""
    rows = style.read(data / "head.csv")
    figure, panels = style.panels(2, height=2.9)
    for axes, (name, title) in zip(panels, PROMPTS.items(), strict=True):
        for place, line in PLACES.items():
            own = [row for row in rows if (row["prompts"], row["place"]) == (name, place)]
            seen, overlap = style.columns(own, "tokens", "overlap")
            millions, colour = [at / 1e6 for at in seen], style.COLOUR["band_price"]
            look: Any = {"ls": line, "color": colour, "label": f"position {place}"}
            axes.plot(millions, overlap, marker="o", ms=2.5, **look)
        axes.set(xlabel="tokens trained on, millions", ylabel="overlap Σ min(p, q)", title=title)
        axes.set(ylim=(0, None))
        axes.legend(frameon=False, fontsize=7)
    style.headline(figure, "The head's overlap with the target still grows after 3 million tokens")
    return figure
