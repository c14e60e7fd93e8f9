"""How policies are drawn, from the two files that the project's figures read, too."""

import csv
from pathlib import Path
from typing import Any

POLICIES, SETTINGS = (Path(__file__).with_name(name) for name in ("looks.csv", "look.mplstyle"))


def _looks() -> dict[str, dict[str, Any]]:
    lines = POLICIES.read_text(encoding="utf-8").splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    return {own["policy"]: {"color": own["colour"], "ls": own["line"], "marker": own["marker"]}
            for own in rows}  # fmt: skip


LOOKS = _looks()
COLOUR = {name: look["color"] for name, look in LOOKS.items()}
INK, MUTED, OPTIMUM = COLOUR["speculative"], COLOUR["other"], COLOUR["band_price"]
OWN, DRAFT = COLOUR["own"], COLOUR["draft"]


def settings() -> Any:
    """Return matplotlib's settings for a picture, whatever the user's are."""
    import matplotlib

    own = matplotlib.rc_params_from_file(SETTINGS, use_default_template=False)
    return {**matplotlib.rcParamsDefault, **own, "backend": "Agg"}
