"""Plot the result of ``compare``, in the colours of the project's figures."""

import csv
import io
import math
import re
from pathlib import Path
from typing import Any

from cactus_theory.base.files import write_whole

# folder of the plot style and the policies' colours, which paper_figures reads, too
BASE = Path(__file__).resolve().parent.parent / "base"
POLICIES, SETTINGS = BASE / "looks.csv", BASE / "look.mplstyle"


def _looks() -> dict[str, dict[str, Any]]:
    lines = POLICIES.read_text(encoding="utf-8").splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    columns = {"color": "colour", "ls": "line", "marker": "marker"}
    return {row["policy"]: {key: row[column] for key, column in columns.items()} for row in rows}


LOOKS = _looks()
COLOUR = {name: look["color"] for name, look in LOOKS.items()}
INK = COLOUR["speculative"]


def settings() -> Any:
    """Return the matplotlib settings of a plot, which do not depend on the user's settings."""
    import matplotlib

    look = matplotlib.rc_params_from_file(SETTINGS, use_default_template=False)
    return {**matplotlib.rcParamsDefault, **look, "backend": "Agg"}


# metadata that is left out of each kind of file, so that equal plots give equal bytes
METADATA = {
    ".png": {"Software": None},
    ".pdf": {"Creator": None, "Producer": None, "CreationDate": None},
    ".svg": {"Creator": None, "Date": None},
}
# the frontier is drawn up to this factor times the largest nats of a policy
BEYOND = 1.5
# lines take the colours of these names in turn
SHOWN = ("cactus", "typical", "band_block", "cactus_exact", "band_delta", "speculative")
COLOURS = [COLOUR[name] for name in SHOWN]
MARKERS = "osD^vP*X"


# widths of plots in inches: of a page, and of one of two columns
WIDTHS = {"page": 7.2, "column": 3.4}
# a point: nats, speed over that of lossless sampling, and its standard error
Point = tuple[float, float, float]
LOSSLESS: Point = 0.0, 1.0, 0.0


def save_comparison(path: str, found: Any, frontier: Any, width: str) -> None:
    """Plot speed against nats for each policy of a comparison, with the optimum over all rows.

    Parameters
    ----------
    path : file to write; the suffix gives the format.
    found : a :class:`cactus_theory.tuning.compare.Comparison`.
    frontier : the result of :func:`cactus_theory.pooled_frontier` on the rows; None for a trace, as
        there is no frontier of tokens per target call.
    width : ``page`` or ``column``.
    """
    import matplotlib
    import numpy as np
    from matplotlib.figure import Figure

    lossless, curves = found.lines[0], _curves(found.lines)
    traced = "tokens_per_call" in lossless
    with matplotlib.rc_context(settings()):
        figure = Figure(figsize=(WIDTHS[width], 3.2), layout="constrained")
        axes = figure.subplots()
        if frontier is not None:
            most = max((spent for points in curves.values() for spent, _, _ in points), default=0.0)
            shown = np.asarray(frontier.delta) <= BEYOND * most
            optimum = np.asarray(frontier.acceptance)[shown] / lossless["acceptance"]
            options: Any = {"color": COLOUR["draft"], "lw": 3, "label": "optimum over all rows"}
            axes.plot(np.asarray(frontier.delta)[shown], optimum, **options)
        for number, (name, points) in enumerate(curves.items()):
            spent, ratio, error = zip(*sorted(points), strict=True)
            # the band has its blue; the last colour is left to the point of lossless sampling
            in_turn = COLOURS[number % (len(COLOURS) - 1)]
            colour = COLOUR["band_price"] if name == "band" else in_turn
            options = {"marker": MARKERS[number % len(MARKERS)], "color": colour, "label": name}
            bars = None if np.isnan(error).any() else error
            axes.errorbar(spent, ratio, bars, ms=4, lw=1.2, elinewidth=0.7, **options)
        axes.plot(*LOSSLESS[:2], "s", color=INK, label="lossless", zorder=5)
        kind = {"kl": "KL"}.get(found.notes["divergence"], found.notes["divergence"])
        axes.set_xlabel(f"{kind}, nats a {'token' if traced else 'row'}")
        axes.set_ylabel(f"{'tokens a call' if traced else 'acceptance'}, × lossless")
        across: Any = {"ncols": 2 if width == "column" else 4, "frameon": False, "fontsize": 7.5}
        figure.legend(loc="outside lower center", **across)
        write_picture(path, figure)


def _curves(lines: list[dict[str, Any]]) -> dict[str, list[Point]]:
    """Return the points of each lossy policy by its name in the legend.

    The name has verifier and K if the lines differ in them; lines without finite nats are left out.
    """
    curves, lossless = dict[str, list[Point]](), lines[0]["policy"]
    ways = {(line.get("verifier"), line.get("num_draft_tokens")) for line in lines}
    for line in lines:
        nats, policy = line["nats"], line["policy"]
        if nats is not None and nats < math.inf and policy != lossless:
            name = short(policy, line["knob"])
            if len(ways) > 1:
                name += f", {line['verifier']}, K = {line['num_draft_tokens']}"
            # a curve of solved knobs begins at lossless sampling; a fixed policy is one point
            points = curves.setdefault(name, [LOSSLESS] if line["held"] else [])
            points.append((nats, line["over_lossless"], line["over_lossless_se"]))
    return curves


def short(policy: str, knob: float | None) -> str:
    """Return a policy's name for a legend, without its folder and the knob that was solved."""
    name = re.sub(r"^.*?([^/]*)\.py:", "", policy)
    head, _, knobs = name.partition(":")
    others = [each for each in knobs.split(",") if each and each.partition("=")[2] != str(knob)]
    return " ".join([head, *others])


def write_picture(path: str, figure: Any) -> None:
    """Write a figure to a file, atomically; equal figures give equal bytes."""
    suffix, content = Path(path).suffix, io.BytesIO()
    figure.savefig(content, format=suffix[1:], dpi=200, metadata=METADATA[suffix])
    write_whole(path, content.getvalue())
