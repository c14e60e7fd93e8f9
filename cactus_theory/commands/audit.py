"""``cactus-theory audit``: what a policy emits, costs and declares on rows."""

import argparse
from pathlib import Path

import cactus_theory as ct
from cactus_theory.base.significance import FEWEST_TEXTS
from cactus_theory.commands.flags import add_policy, add_rows, one_policy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_rows(parser)
    add_policy(parser, required=True)


def run(args: argparse.Namespace) -> int:
    """Print the policy's acceptance and divergence on every row, beside the optimum."""
    import numpy as np

    from cactus_theory.base.tables import print_json, print_rows, save_csv
    from cactus_theory.commands.inputs import rows
    from cactus_theory.traces import Trace
    from cactus_theory.traces.ends import end_ratio, has_end_ratio, warning_of_longer_answers
    from cactus_theory.tuning.compare import SIGNED

    policy = ct.policy(one_policy(args) or "")
    q, p = rows(args)
    trace = Trace.open(args.target) if Path(args.target).is_dir() else None
    policy = policy.at_ends(trace.ends if trace else ())
    report = ct.audit(policy, q, p, divergence=args.divergence)
    cost, budget = report.divergences[report.reference], report.declares.budget
    columns = {
        "acceptance": report.acceptance,
        report.reference: cost,
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
    if args.json:
        columns |= {} if report.bounds is None else {"bounds": report.bounds}
        declared = vars(report.declares) | {"budget": None if budget is None else vars(budget)}
        header = {"policy": report.policy, "declares": declared}
        return print_json(header | {"divergences": report.divergences} | columns)
    worst = f"no budget; the most it spends on a row here: {report.reference} {cost.max():.6g}"
    print(f"{report.policy} declares: {worst if budget is None else budget}")
    print_rows(columns)
    if report.bounds is not None:
        print(f"spent: {report.bounds}")
    print("mean divergences of the emitted law from the target:")
    for name, value in report.divergences.items():
        print(f"  {name:<20} {np.mean(value):.6g}")
    if trace and has_end_ratio(trace) and trace.texts >= FEWEST_TEXTS:
        ratio = end_ratio(trace, policy)
        if warning := warning_of_longer_answers(ratio.value, ratio.standard_error):
            print(warning)
    return 0
