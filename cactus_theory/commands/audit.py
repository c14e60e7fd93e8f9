"""``cactus-theory audit``: what a policy emits, costs and declares; a table of several policies."""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cactus_theory as ct
from cactus_theory.base.significance import FEWEST_TEXTS
from cactus_theory.base.tables import (
    print_json,
    print_rows,
    print_table,
    save_csv,
    with_error,
    write_csv,
)
from cactus_theory.base.terminal import Progress
from cactus_theory.commands.flags import (
    add_policy,
    add_rows,
    rows,
    shown_frontier,
    source,
)
from cactus_theory.commands.plot import save_plot
from cactus_theory.optimum.bands import HEAD
from cactus_theory.policies import Policy
from cactus_theory.traces import SavedRows, Trace
from cactus_theory.traces.ends import end_ratio, foretold, tells
from cactus_theory.traces.estimate import Estimate, valued
from cactus_theory.traces.rows import pooled_audit, row_pairs
from cactus_theory.tuning.compare import SIGNED

# columns of the table of policies that hold words
WORDS = (0, 6)
LEGEND = f"""\
means over rows ± one standard error over texts
off head: in 1,000 emitted rows, mass above q on tokens with q below {HEAD:g} of the largest q
of row optimum: of the best acceptance for what the policy spends, row by row
of pooled: of the best mean acceptance for the same mean divergence, at one price on all rows"""
Line = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_rows(parser)
    add_policy(parser, "for one table of several policies", required=True)
    parser.add_argument(
        "--plot", metavar="FILE", help="draw policies and the frontier of the rows; .png .pdf .svg"
    )


def run(args: argparse.Namespace) -> int:
    """Print what one policy does on the rows, or a table of several."""
    kind = ct.divergence(args.divergence)
    spec = kind.spec
    if args.plot and not (kind.additive and kind.priced):
        raise ValueError(f"--plot: must be of a divergence that can be pooled; got {spec}")
    several = len(args.policy) > 1
    logged = source(args) if several or Path(args.target).is_dir() else None
    ends = logged.ends if isinstance(logged, Trace) else ()
    policies = [ct.policy(spec).at_ends(ends) for spec in args.policy]
    if several and logged is not None:
        lines, q, p = _lines(logged, policies, spec)
        notes = {"divergence": spec, "rows": lines[0]["rows"], "texts": logged.texts}
        if args.csv:
            write_csv(args.csv, lines, notes)
        if args.plot:
            points = [(line["policy"], line[spec], line["acceptance"]) for line in lines]
            save_plot(args.plot, shown_frontier(q, p, spec), spec, points)
        if args.json:
            return print_json(notes | {"policies": lines})
        print("{rows} rows of {texts} texts".format(**notes))
        print_table(_heads(spec), [_cells(line, spec) for line in lines], WORDS)
        print(LEGEND)
        for line in lines if logged.texts >= FEWEST_TEXTS else ():
            if words := foretold(line["end_ratio"], line["end_ratio_se"]):
                print(f"{line['policy']}: {words}")
        return 0
    (policy,), (q, p) = policies, rows(args)
    report = ct.audit(policy, q, p, divergence=args.divergence)
    spent, budget = report.divergences[report.reference], report.declares.budget
    columns = {
        "acceptance": report.acceptance,
        report.reference: spent,
        "best acceptance at that cost": report.optimum_acceptance,
        "least cost at that acceptance": report.optimum_divergence,
        "raised off the head": report.raised_off_head,
        **{name: getattr(report, name) for name in SIGNED},
    }
    if report.spent is not None:
        columns |= {"spent": report.spent, "within": report.within}
    if report.over_share is not None:
        columns["share over budget"] = report.over_share
    if args.csv:
        save_csv(args.csv, columns, {"policy": report.policy})
    if args.plot:
        point = report.policy, float(np.mean(spent)), float(np.mean(report.acceptance))
        save_plot(args.plot, shown_frontier(q, p, spec), spec, [point])
    if args.json:
        columns |= {} if report.bounds is None else {"bounds": report.bounds}
        declared = vars(report.declares) | {"budget": None if budget is None else vars(budget)}
        header = {"policy": report.policy, "declares": declared}
        return print_json(header | {"divergences": report.divergences} | columns)
    worst = f"no budget; the most it spends on a row here: {report.reference} {spent.max():.6g}"
    print(f"{report.policy} declares: {worst if budget is None else budget}")
    print_rows(columns)
    if report.bounds is not None:
        print(f"spent: {report.bounds}")
    print("mean divergences of the emitted law from the target:")
    for name, value in report.divergences.items():
        print(f"  {name:<20} {np.mean(value):.6g}")
    return 0


def _lines(
    source: Trace | SavedRows, policies: list[Policy], spec: str
) -> tuple[list[Line], torch.Tensor, torch.Tensor]:
    """Return a line for each policy, and all rows."""
    audits = []
    count = source.manifest.total("draft_rows") if isinstance(source, Trace) else len(source)
    for policy in policies:
        progress = Progress(f"auditing rows, {policy.spec}", count)
        audits.append(pooled_audit(policy, source, divergence=spec, on_rows=progress.update))
    q, p = (torch.cat(part) for part in zip(*[pair[1:] for pair in row_pairs(source)], strict=True))
    trace = source if isinstance(source, Trace) and tells(source) else None
    ends = [None if trace is None else end_ratio(trace, policy) for policy in policies]
    lines = [
        _line(one, spec, _pooled_share(one, spec, q, p), end)
        for one, end in zip(audits, ends, strict=True)
    ]
    return lines, q, p


def _line(one: Line, spec: str, pooled_share: float | None, ends: Estimate | None) -> Line:
    budget, raised = one["declares"].budget, one["raised_off_head"]
    return {
        "policy": one["policy"],
        **valued("acceptance", one["acceptance"]),
        **valued(spec, one["divergence"]),
        "raised_off_head_per_1000": 1000 * raised.value,
        "raised_off_head_per_1000_se": 1000 * raised.standard_error,
        **valued("share_of_row_optimum", one["share"]),
        "share_of_pooled_optimum": pooled_share,
        **valued("end_ratio", ends),
        "declares": "no budget" if budget is None else str(budget),
        "held": one["held"],
        "rows": one["rows"],
    }


def _pooled_share(one: Line, spec: str, q: torch.Tensor, p: torch.Tensor) -> float | None:
    """Return acceptance over the best of all rows together for the same mean divergence.

    None for divergences that cannot be pooled.
    """
    kind = ct.divergence(spec)
    if not (kind.additive and kind.priced):
        return None
    spent = max(one["divergence"].value, 0.0)
    best = ct.pooled_acceptance(q, p, divergence=spec, delta=spent)
    return one["acceptance"].value / best.mean_acceptance


def _heads(spec: str) -> list[str]:
    emitted = f"emitted {'KL' if spec == 'kl' else spec}"
    heads = ["policy", "acceptance", emitted, "off head", "of row optimum", "of pooled"]
    return [*heads, "declares", "held on"]


def _cells(line: Line, spec: str) -> list[str]:
    pooled, rows_held = line["share_of_pooled_optimum"], line["held"]
    return [
        line["policy"],
        with_error(line["acceptance"], line["acceptance_se"]),
        with_error(line[spec], line[f"{spec}_se"]),
        f"{line['raised_off_head_per_1000']:.1f}",
        f"{line['share_of_row_optimum']:.4f}",
        "" if pooled is None else f"{pooled:.4f}",
        line["declares"],
        "" if rows_held is None else f"{rows_held} of {line['rows']}",
    ]
