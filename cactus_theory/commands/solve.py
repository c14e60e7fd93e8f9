"""``cactus-theory solve``: the best acceptance of each row, or of all rows within a mean budget."""

import argparse
from typing import Any

import cactus_theory as ct
from cactus_theory.base import arguments as check
from cactus_theory.commands.flags import add_rows

GOALS = ("delta", "price", "acceptance")
OF_ALL = ("mean_acceptance", "mean_divergence", "price", "bound", "gap")
OF_A_ROW = ("acceptance", "divergence", "lower", "upper", "price", "gap")
# default number of points of --frontier
POINTS = 33


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_rows(parser)
    amount = parser.add_mutually_exclusive_group(required=True)
    amount.add_argument("--delta", type=float, help="budget, in the divergence's unit (nats)")
    amount.add_argument("--price", type=float, help="acceptance per unit of divergence to stop at")
    amount.add_argument("--acceptance", type=float, help="acceptance to reach at least cost")
    amount.add_argument(
        "--frontier",
        type=int,
        nargs="?",
        const=POINTS,
        metavar="POINTS",
        help="the best mean acceptance of all rows at every mean divergence",
    )
    parser.add_argument(
        "--pooled", action="store_true", help="let all rows share the budget, on average"
    )
    text = "tokens that may be emitted: those with q > 0 (target, default), or all (free)"
    parser.add_argument("--support", default="target", help=text)
    parser.add_argument("--out", metavar="FILE.npy", help="also save the optimal rows")


def run(args: argparse.Namespace) -> int:
    """Print the best acceptance of the rows; write the files of ``--out`` and ``--csv``."""
    import numpy as np

    from cactus_theory.base.rows import save_rows
    from cactus_theory.base.tables import print_json, print_rows, print_table, save_csv, write_csv
    from cactus_theory.commands.inputs import rows, shown_frontier

    q, p = rows(args)
    spec = ct.divergence(args.divergence).spec
    asked: dict[str, Any] = {"divergence": spec}
    goal = {name: getattr(args, name) for name in GOALS if getattr(args, name) is not None}
    numbers: dict[str, Any] = {}
    if args.frontier is not None or args.pooled:
        check.one_of("--support", args.support, ("target",))
    if args.frontier is not None:
        if args.out:
            raise ValueError(f"--out: must not be given with --frontier; got {args.out!r}")
        best = shown_frontier(q, p, spec, args.frontier)
        columns = {name: getattr(best, name) for name in ("delta", "acceptance", "price", "bound")}
        columns["gap"] = best.bound - best.acceptance
        asked["rows"] = int(np.prod(q.shape[:-1]))
        title = f"best mean acceptance, {asked['rows']} rows by mean {spec}; bound and gap prove it"
    elif args.pooled:
        ((knob, amount),) = goal.items()
        best = ct.pooled_acceptance(q, p, divergence=spec, **goal)
        asked[f"pooled_{knob}"] = amount
        numbers = {name: getattr(best, name) for name in OF_ALL}
        columns = {"acceptance": best.acceptance, "divergence": best.divergence}
        title = f"best mean acceptance, {spec}, {knob} = {amount:g} over all rows"
    else:
        ((knob, amount),) = goal.items()
        best = ct.optimal_acceptance(q, p, divergence=spec, support=args.support, **goal)
        asked[knob] = amount
        overlap = np.minimum(np.asarray(q, np.float64), np.asarray(p, np.float64)).sum(-1)
        columns = {"speculative": overlap} | {name: getattr(best, name) for name in OF_A_ROW}
        title = f"optimal acceptance, {spec}, {knob} = {amount:g}"
    if args.out:
        save_rows(args.out, best.target)
    lines = [] if args.frontier is None else [*zip(*columns.values(), strict=True)]
    if args.csv and lines:
        write_csv(args.csv, [dict(zip(columns, line, strict=True)) for line in lines], asked)
    elif args.csv:
        save_csv(args.csv, columns, asked | numbers)
    if args.json:
        # apart, as ``divergence`` is also a column
        return print_json({"asked": asked, "vocabulary": int(q.shape[-1])} | numbers | columns)
    print(title)
    if lines:
        print_table(list(columns), [[f"{x:.6g}" for x in line] for line in lines])
        return 0
    if numbers:
        print_rows(numbers)
    print_rows(columns)
    return 0
