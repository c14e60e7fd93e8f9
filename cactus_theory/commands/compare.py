"""``cactus-theory compare``: policies at equal nats, or equal acceptance, on rows or on a trace."""

import argparse
from pathlib import Path
from typing import Any

from cactus_theory.base import defaults
from cactus_theory.base.files import write_whole
from cactus_theory.base.names import UNDRAFTED, VERIFIERS
from cactus_theory.base.terminal import Progress
from cactus_theory.commands.flags import (
    add_nats,
    add_policy,
    add_regret,
    add_rows,
    add_undrafted,
    refuse,
    written,
)
from cactus_theory.commands.plot import WIDTHS, save_comparison

# flags that say where results are saved and how they are shown
PLACES = "csv", "json", "latex", "plot", "width"
USUAL = {"verifier": [defaults.VERIFIER], "undrafted": UNDRAFTED[0]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    add_rows(parser)
    text = "the first is what others are compared with (all of these)"
    add_policy(parser, f"{text}; a knob without a value is solved")
    text = "divergence a row, or a token of a trace, that each policy spends (0.05)"
    add_nats(parser, text, nargs="+", default=[])
    add_regret(
        parser, "of a trace of temperature 0: nats of regret a token (0.05)", nargs="+", default=[]
    )
    text = "also, or instead: acceptance that each policy has"
    add("--acceptance", type=float, nargs="+", default=[], metavar="SHARE", help=text)
    add("--surprise", type=float, metavar="NATS",
        help="with nats: most that emitted tokens may be less likely than the target's; policies "
             "with a tilt get the least one that keeps it")  # fmt: skip
    text = f"of a trace: {', '.join(VERIFIERS)} (%(default)s)"
    add("--verifier", nargs="+", default=USUAL["verifier"], metavar="NAME", help=text)
    add("--num-draft-tokens", type=int, nargs="+", metavar="K", help="of a trace: cut drafts to K")
    add_undrafted(parser)
    add("--latex", metavar="FILE.tex", help="also save the table for LaTeX (package booktabs)")
    add("--plot", metavar="FILE", help="draw the policies through their nats; .png .pdf .svg")
    add("--width", choices=tuple(WIDTHS), default="page", help="of the picture (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Print the table; return 0 if a parameter was found for every policy and level, else 1."""
    from cactus_theory.base.provenance import provenance
    from cactus_theory.base.tables import print_json, write_csv
    from cactus_theory.commands.inputs import shown_frontier, source
    from cactus_theory.traces.rows import SavedRows
    from cactus_theory.tuning.compare import compare
    from cactus_theory.tuning.knobs import charged_in

    if not Path(args.target).is_dir():
        of_traces = "verifier", "num_draft_tokens", "undrafted"
        refuse(args, of_traces, "must be given with a trace", **USUAL)
    rows = source(args)
    held: dict[str, Any] = {name: getattr(args, name) for name in ("nats", "acceptance", "regret")}
    kind = charged_in(rows, args.divergence, *(name for name, levels in held.items() if levels))
    progress = Progress("solving knobs, lines", 1)
    made = provenance(written(args.parser.prog, args.parser, args, PLACES))

    def keep(lines: list[dict[str, Any]], total: int) -> None:
        progress.of(len(lines), total)
        if args.csv:  # anew for each line: an interrupted run keeps its lines
            write_csv(args.csv, lines, {"divergence": kind.spec} | made)

    held["surprise"] = args.surprise
    ways: dict[str, Any] = {"verifiers": args.verifier, "widths": args.num_draft_tokens or [None]}
    ways["undrafted"] = args.undrafted
    found = compare(args.policy, rows, divergence=args.divergence, on_line=keep, **held, **ways)
    if args.latex:
        notes = "".join(f"% {name}: {value}\n" for name, value in made.items())
        write_whole(args.latex, f"{notes}{found.latex()}".encode())
    if args.plot:
        frontier = None
        if isinstance(rows, SavedRows) and kind.additive and kind.priced:
            frontier = shown_frontier(rows.target_probs, rows.draft_probs, kind.spec)
        save_comparison(args.plot, found, frontier, args.width)
    if args.json:
        print_json(found.notes | {"provenance": made, "solved": found.solved, "lines": found.lines})
    else:
        print(found)
    return 0 if found.solved else 1
