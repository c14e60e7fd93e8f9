"""``cactus-theory solve``: the best acceptance of rows, one by one or under one budget over all."""

import argparse
from typing import Any

import numpy as np

import cactus_theory as ct
from cactus_theory.base import arguments as check
from cactus_theory.base.rows import save_rows
from cactus_theory.base.tables import print_json, print_rows, print_table, save_csv, save_table
from cactus_theory.commands.flags import (
    Output,
    add_rows,
    output_of,
    rows,
    save_outputs,
    shown_frontier,
)

# points of a frontier, by default
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
        "--pooled", action="store_true", help="one budget, its mean over rows, for all rows"
    )
    parser.add_argument("--support", default="target", help="target (default) or free")
    parser.add_argument("--out", metavar="FILE.npy", help="also save the optimal rows")


def run(args: argparse.Namespace) -> int:
    """Print the optimum of the rows; write what ``--out``, ``--csv`` and ``--plot`` name."""
    q, p = rows(args)
    if args.frontier is not None or args.pooled:
        check.one_of("--support", args.support, ("target",))
    spec, output = ct.divergence(args.divergence).spec, output_of(args)
    if args.frontier is not None:
        return _solve_frontier(q, p, spec, args.frontier, output)
    knob = next(k for k in ("delta", "price", "acceptance") if getattr(args, k) is not None)
    if args.pooled:
        return _solve_pooled(q, p, spec, {knob: getattr(args, knob)}, output)
    optimum = ct.optimal_acceptance(
        q, p, divergence=args.divergence, support=args.support, **{knob: getattr(args, knob)}
    )
    speculative = np.minimum(np.asarray(q, np.float64), np.asarray(p, np.float64)).sum(-1)
    columns = {"speculative": speculative} | {
        name: getattr(optimum, name)
        for name in ("acceptance", "divergence", "lower", "upper", "price", "gap")
    }
    if args.out:
        save_rows(args.out, optimum.target)
    header = {"divergence": spec, knob: getattr(args, knob)}
    save_outputs(args, q, p, header, columns, optimum.divergence)
    if args.json:
        return print_json(header | {"vocabulary": int(q.shape[-1])} | columns)
    amount = f"{knob} = {getattr(args, knob):g}"
    print(f"optimal acceptance, {spec}, {amount}")
    print_rows(columns)
    return 0


def _solve_pooled(
    q: np.ndarray, p: np.ndarray, spec: str, goal: dict[str, Any], output: Output
) -> int:
    """Print the best mean acceptance of all rows for one mean divergence."""
    ((knob, amount),) = goal.items()
    optimum = ct.pooled_acceptance(q, p, divergence=spec, **goal)
    names = ("mean_acceptance", "mean_divergence", "price", "bound", "gap")
    header = {"divergence": spec, f"pooled_{knob}": amount}
    numbers = {name: getattr(optimum, name) for name in names}
    columns = {"acceptance": optimum.acceptance, "divergence": optimum.divergence}
    if output.out:
        save_rows(output.out, optimum.target)
    if output.csv:
        save_csv(output.csv, columns, header | numbers)
    if output.plot:
        from cactus_theory.commands.plot import save_pooled_plot

        point = (f"{knob} = {amount:g}", optimum.mean_divergence, optimum.mean_acceptance)
        save_pooled_plot(output.plot, shown_frontier(q, p, spec), spec, [point])
    if output.json:
        return print_json(header | {"vocabulary": int(q.shape[-1])} | numbers | columns)
    print(f"best mean acceptance, {spec}, {knob} = {amount:g} over all rows")
    print_rows(numbers)
    print_rows(columns)
    return 0


def _solve_frontier(q: np.ndarray, p: np.ndarray, spec: str, points: int, output: Output) -> int:
    """Print the best mean acceptance of all rows at every mean divergence, a point a line."""
    if output.out:
        raise ValueError(f"--out: must not be given with --frontier; got {output.out!r}")
    frontier = shown_frontier(q, p, spec, points)
    columns = {name: getattr(frontier, name) for name in ("delta", "acceptance", "price", "bound")}
    columns["gap"] = frontier.bound - frontier.acceptance
    lines = [dict(zip(columns, line, strict=True)) for line in zip(*columns.values(), strict=True)]
    header = {"divergence": spec, "rows": int(np.prod(q.shape[:-1]))}
    if output.csv:
        save_table(output.csv, lines, header)
    if output.plot:
        from cactus_theory.commands.plot import save_pooled_plot

        save_pooled_plot(output.plot, frontier, spec, [])
    if output.json:
        return print_json(header | columns)
    print(f"best mean acceptance of {header['rows']} rows by mean {spec}; bound and gap prove it")
    print_table(list(columns), [[f"{x:.6g}" for x in line.values()] for line in lines], ())
    return 0
