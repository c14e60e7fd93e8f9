"""The command line: ``cactus-theory solve | audit | check | generate | tune | expect | promise``.

Exit codes: 0 done; 1 a property is broken (``check``); 2 bad input, in one line on stderr;
3 a property could not be decided in time (``check``); 130 interrupted, in one line on stderr.
"""

import argparse
import os
import sys
from typing import Any

import numpy as np

import cactus_theory as ct
from cactus_theory import _expect as expect_command
from cactus_theory import _generate as generate_command
from cactus_theory import _promise as promise_command
from cactus_theory._flags import add_policy, chosen_policy
from cactus_theory._pooled import POINTS, audit_several, drafts, pair, solve_frontier, solve_pooled
from cactus_theory.base import arguments as check
from cactus_theory.base.rows import save_rows
from cactus_theory.base.tables import print_json, print_rows, save_csv
from cactus_theory.base.terminal import ends_quietly, interrupted, one_line
from cactus_theory.divergences import NAMES as DIVERGENCES
from cactus_theory.policies import Policy
from cactus_theory.testing import _command as testing
from cactus_theory.tuning import command as tune_command

# Raised by bad input, and reported in one line; anything else is a bug and keeps its traceback.
REPORTED = (ValueError, TypeError, OSError, ModuleNotFoundError, RuntimeError)


@ends_quietly
def main(arguments: list[str] | None = None) -> int:
    """Run one command; return its exit code, 2 after one line on stderr for bad input."""
    parser = _parser()
    args = parser.parse_args(arguments)
    try:
        check.refuse_empty(sys.argv[1:] if arguments is None else arguments)
        status = args.run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader of our output has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        kept = tune_command.KEPT if args.command == "tune" else None
        return interrupted(f"cactus-theory {args.command}", kept)
    except REPORTED as error:
        print(f"cactus-theory {args.command}: {one_line(error)}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cactus-theory", description=(ct.__doc__ or "").partition("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    solve = commands.add_parser("solve", help="the best acceptance under a divergence budget")
    _add_rows(solve)
    amount = solve.add_mutually_exclusive_group(required=True)
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
    solve.add_argument(
        "--pooled", action="store_true", help="one budget, its mean over rows, for all rows"
    )
    solve.add_argument("--support", default="target", help="target (default) or free")
    solve.add_argument("--out", metavar="FILE.npy", help="also save the optimal rows")
    solve.set_defaults(run=_solve)
    audit = commands.add_parser("audit", help="what a policy emits, costs and declares")
    _add_rows(audit)
    audit.add_argument(
        "--draft-tokens",
        metavar="IDS",
        help="instead of draft rows, the tokens that a certain draft proposed: 3,1,4 or a file",
    )
    add_policy(audit, several=True)
    audit.add_argument(
        "--latex", metavar="FILE.tex", help="save the table of policies as a LaTeX tabular"
    )
    audit.add_argument("--by", metavar="COLUMN", help="of a trace: a line per value of a column")
    audit.set_defaults(run=_audit)
    for name, command, said in (
        ("check", testing, "look for rows on which a policy is wrong"),
        ("generate", generate_command, "decode a prompt with a draft model"),
        ("expect", expect_command, "what acceptance is healthy, at each position"),
        ("tune", tune_command, "the fastest policy, knob, verifier and K"),
        ("promise", promise_command, "what a cap on KL says about an answer"),
    ):
        own = commands.add_parser(name, help=said)
        command.add_arguments(own)
        own.set_defaults(run=command.run)
    return parser


def _add_rows(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", help="target rows q: .npy .npz .safetensors .csv .json; or the folder of a trace"
    )
    parser.add_argument("draft", nargs="?", help="draft rows p, same shape; a trace has its own")
    parser.add_argument(
        "--divergence", default="kl", help=f"one of {', '.join(DIVERGENCES)} (alpha:a=0.5)"
    )
    parser.add_argument("--logits", action="store_true", help="the files hold logits")
    parser.add_argument(
        "--normalise", action="store_true", help="divide rows by their sums: rounded in a text, say"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    parser.add_argument("--csv", metavar="FILE.csv", help="also save one line per row")
    parser.add_argument(
        "--plot", metavar="FILE", help="draw one row: band, frontier, policies; .png .pdf .svg"
    )
    parser.add_argument("--row", type=int, default=0, help="which row of a batch to draw")


def _solve(args: argparse.Namespace) -> int:
    q, p = pair(args)
    if args.frontier is not None or args.pooled:
        check.one_of("--support", args.support, ("target",))
    if args.frontier is not None:
        return solve_frontier(args, q, p)
    knob = next(k for k in ("delta", "price", "acceptance") if getattr(args, k) is not None)
    if args.pooled:
        return solve_pooled(args, q, p, knob)
    found = ct.optimal_acceptance(
        q, p, divergence=args.divergence, support=args.support, **{knob: getattr(args, knob)}
    )
    speculative = np.minimum(np.asarray(q, np.float64), np.asarray(p, np.float64)).sum(-1)
    columns = {"speculative": speculative} | {
        name: getattr(found, name)
        for name in ("acceptance", "divergence", "lower", "upper", "price", "gap")
    }
    if args.out:
        save_rows(args.out, found.target)
    header = {"divergence": ct.divergence(args.divergence).spec, knob: getattr(args, knob)}
    _save(args, q, p, header, columns, found.divergence)
    if args.json:
        return print_json(header | {"vocabulary": int(q.shape[-1])} | columns)
    amount = f"{knob} = {getattr(args, knob):g}"
    print(f"optimal acceptance, {header['divergence']}, {amount}")
    print_rows(columns)
    return 0


def _save(
    args: argparse.Namespace,
    q: np.ndarray,
    p: np.ndarray,
    header: dict[str, Any],
    columns: dict[str, Any],
    spent: np.ndarray,
    rule: Policy | None = None,
) -> None:
    """Write what ``--csv`` and ``--plot`` ask for."""
    if args.csv:
        save_csv(args.csv, columns, header)
    if args.plot:
        from cactus_theory._plot import save_plot

        rows, drafts = (x.reshape(-1, x.shape[-1]) for x in (q, p))
        if not 0 <= args.row < len(rows):
            raise ValueError(f"--row: must lie in [0, {len(rows) - 1}]; got {args.row}")
        delta = float(np.asarray(spent).reshape(-1)[args.row])
        divergence = ct.divergence(args.divergence).spec
        save_plot(args.plot, rows[args.row], drafts[args.row], divergence, delta, rule)


def _audit(args: argparse.Namespace) -> int:
    if len(args.policy) > 1 or args.latex or args.by:
        return audit_several(args)
    args.policy = args.policy[0]
    rule = chosen_policy(args)
    q, p, ids = drafts(args)
    report = ct.audit(rule, q, p, draft_token_ids=ids, divergence=args.divergence)
    if ids is not None:
        q = np.broadcast_to(q, (*report.acceptance.shape, q.shape[-1]))
        p = np.zeros_like(q)
        np.put_along_axis(p, ids[..., None], 1.0, -1)
    spent = report.divergences[report.reference]
    columns = {"acceptance": report.acceptance, report.reference: spent}
    columns |= {
        "best acceptance at that cost": report.optimum_acceptance,
        "least cost at that acceptance": report.optimum_divergence,
    }
    if report.spent is not None:
        columns |= {"spent": report.spent, "within": report.within}
    if report.over_share is not None:
        columns["share over budget"] = report.over_share
    budget = report.declares.budget
    _save(args, q, p, {"policy": report.policy}, columns, spent, rule)
    if args.json:
        declared = vars(report.declares) | {"budget": None if budget is None else vars(budget)}
        header = {"policy": report.policy, "declares": declared}
        return print_json(header | {"divergences": report.divergences} | columns)
    worst = f"no budget; the most it spends on a row here: {report.reference} {spent.max():.6g}"
    print(f"{report.policy} declares: {worst if budget is None else budget}")
    print_rows(columns)
    print("mean divergences of the emitted law from the target:")
    for spec, value in report.divergences.items():
        print(f"  {spec:<20} {np.mean(value):.6g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
