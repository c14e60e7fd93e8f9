"""Overlap of SmolLM2's EAGLE-3 head against the tokens that it was trained on; one run."""

from . import _style as style
from ._style import Figure, Path

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
            label = f"position {place}"
            axes.plot([at / 1e6 for at in seen], overlap, ls=line, marker="o", ms=2.5,
                      color=style.COLOUR["band_price"], label=label)  # fmt: skip
        axes.set(xlabel="tokens trained on, millions", ylabel="overlap Σ min(p, q)", title=title)
        axes.set(ylim=(0, None))
        axes.legend(frameon=False, fontsize=7)
    style.headline(figure, "The head's overlap with the target still grows after 3 million tokens")
    return figure
