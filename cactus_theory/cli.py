"""The command line: ``cactus-theory solve | audit | check | generate | tune``.

Exit codes: 0 done; 1 a property is broken (``check``); 2 bad input, in one line on stderr;
3 a property could not be decided in time (``check``).
"""

import argparse
import os
import sys
from typing import Any

import numpy as np
import torch

import cactus_theory as ct
from cactus_theory import _arguments as check
from cactus_theory._files import save_rows
from cactus_theory._pipes import ends_quietly
from cactus_theory._pooled import POINTS, audit_several, solve_frontier, solve_pooled
from cactus_theory._report import print_json, print_rows, save_csv
from cactus_theory._row_inputs import drafts, pair
from cactus_theory.divergences import NAMES as DIVERGENCES
from cactus_theory.policies import Policy
from cactus_theory.policies._registry import names as policy_names
from cactus_theory.testing import _command as testing
from cactus_theory.tuned import TunedSetting
from cactus_theory.tuning import command as tune_command
from cactus_theory.verify.contract import find_verifier, verifiers

# Raised by bad input, and reported in one line; anything else is a bug and keeps its traceback.
REPORTED = (ValueError, TypeError, OSError, ModuleNotFoundError, RuntimeError)


@ends_quietly
def main(arguments: list[str] | None = None) -> int:
    """Run one command; return its exit code, 2 after one line on stderr for bad input."""
    parser = _parser()
    args = parser.parse_args(arguments)
    try:
        status = args.run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader of our output has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except REPORTED as error:
        print(f"cactus-theory {args.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cactus-theory", description=ct.__doc__)
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
    _add_policy(audit, several=True)
    audit.add_argument(
        "--latex", metavar="FILE.tex", help="save the table of policies as a LaTeX tabular"
    )
    audit.set_defaults(run=_audit)
    checking = commands.add_parser("check", help="look for rows on which a policy is wrong")
    testing.add_arguments(checking)
    checking.set_defaults(run=testing.run)
    generate = commands.add_parser("generate", help="decode a prompt with a draft model")
    _add_generate(generate)
    _add_policy(generate, required=False)
    generate.set_defaults(run=_generate)
    tuning = commands.add_parser("tune", help="the fastest policy, knob, verifier and K")
    tune_command.add_arguments(tuning)
    tuning.set_defaults(run=tune_command.run)
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
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    parser.add_argument("--csv", metavar="FILE.csv", help="also save one line per row")
    parser.add_argument(
        "--plot", metavar="FILE", help="draw one row: band, frontier, policies; .png or .pdf"
    )
    parser.add_argument("--row", type=int, default=0, help="which row of a batch to draw")


def _add_policy(
    parser: argparse.ArgumentParser, several: bool = False, required: bool = True
) -> None:
    more = "; may be repeated, for one table of several policies" if several else ""
    parser.add_argument(
        "--policy",
        required=required,
        action="append" if several else Once,
        help=f"one of {', '.join(policy_names())}, or FILE.py:NAME; with :knob=value,knob=value"
        + more,
    )
    parser.add_argument("--delta", type=float, action=Once, help="the policy's delta")
    parser.add_argument("--price", type=float, action=Once, help="the policy's price")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KNOB=VALUE", help="any other knob"
    )


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", required=True, metavar="DIR", help="target model")
    parser.add_argument("--draft", required=True, metavar="DIR", help="draft model")
    parser.add_argument("--prompt", required=True)
    parser.add_argument(
        "--tuned",
        metavar="FILE.json",
        help="policy, verifier, K and temperature as cactus-theory tune --out found them",
    )
    parser.add_argument(
        "--verifier",
        help=f"one of {', '.join(verifiers())}: token by token (default), or each drafted path "
        "as a whole, which accepts more",
    )
    parser.add_argument(
        "--cap",
        type=float,
        metavar="NATS",
        help="spend at most so many nats a token on any answer, whatever the policy would",
    )
    parser.add_argument(
        "--span",
        nargs=2,
        metavar=("OPEN", "CLOSE"),
        help='follow the policy between these two texts only ("<think>" "</think>"), and be '
        "lossless outside",
    )
    parser.add_argument("--num-draft-tokens", type=int, metavar="K", help="default: 4")
    parser.add_argument(
        "--draft-stop",
        type=float,
        metavar="THRESHOLD",
        help="end a draft where all of it is accepted with less than this probability, as far as "
        "the draft's own confidence tells (0.3, say)",
    )
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--temperature", type=float, help="default: 1; 0 decodes greedily")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="of torch; 1 is best for small models")
    parser.add_argument("--json", action="store_true", help="print one JSON object only")


class Once(argparse.Action):
    """Store a value; refuse a second one instead of forgetting the first."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Enter the value."""
        if getattr(namespace, self.dest) is not None:
            raise argparse.ArgumentError(
                self, f"must be given once; got {getattr(namespace, self.dest)} and {values}"
            )
        setattr(namespace, self.dest, values)


def chosen_policy(args: argparse.Namespace) -> Policy:
    """Return the policy that ``--policy``, ``--delta``, ``--price`` and ``--set`` name."""
    knobs: dict[str, Any] = {
        name: getattr(args, name) for name in ("delta", "price") if getattr(args, name) is not None
    }
    for item in args.set:
        name, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"--set: must read KNOB=VALUE; got {item!r}")
        if name in knobs:
            raise ValueError(f"--set: {name} must be given once; got {item!r} again")
        knobs[name] = value
    return ct.policy(args.policy, **knobs)


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
    if len(args.policy) > 1 or args.latex:
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
    print(f"{report.policy} declares: {'no budget' if budget is None else budget}")
    print_rows(columns)
    print("mean divergences of the emitted law from the target:")
    for spec, value in report.divergences.items():
        print(f"  {spec:<20} {np.mean(value):.6g}")
    return 0


def _told(args: argparse.Namespace) -> TunedSetting:
    """Return how to decode: as the flags say, or a file from ``cactus-theory tune``.

    Raises
    ------
    ValueError
        Neither or both, a policy that the verifier cannot follow.
    """
    if (args.policy is None) == (args.tuned is None):
        got = "neither" if args.tuned is None else "both"
        raise ValueError(f"--policy, --tuned: exactly one must be given; got {got}")
    if args.tuned is None:
        rule, judge = chosen_policy(args), find_verifier(args.verifier or "chain")
        judge.check(rule)
        width = 4 if args.num_draft_tokens is None else args.num_draft_tokens
        temperature = 1.0 if args.temperature is None else args.temperature
        return TunedSetting(rule, args.verifier or "chain", width, temperature)
    for name in ("verifier", "num_draft_tokens", "draft_stop", "delta", "price"):
        if (given := getattr(args, name)) is not None:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag}: must not be given with --tuned; got {given}")
    if args.set:
        raise ValueError(f"--set: must not be given with --tuned; got {args.set[0]}")
    tuned = ct.load_tuned(args.tuned)
    if args.temperature not in (None, tuned.temperature):
        raise ValueError(
            f"--temperature: must be the {tuned.temperature:g} that was tuned at; "
            f"got {args.temperature:g}"
        )
    return tuned


def _generate(args: argparse.Namespace) -> int:
    tuned = _told(args)
    _scheduled(args, tuned, None)  # before models are loaded
    check.optional_module("transformers", "llm")
    from cactus_theory.decoding import ModelDrafter, generate, generate_plain, load_pair

    if args.threads is not None:
        torch.set_num_threads(int(check.number("threads", args.threads, 1)))
    pair = load_pair(args.target, args.draft, device=args.device)
    ids = torch.tensor([pair.tokenizer.encode(args.prompt)], device=args.device)
    if not ids.numel():
        raise ValueError(f"--prompt: must hold at least one token; got {args.prompt!r}")
    tuned.check_pair(pair.target, pair.draft)
    shared = {
        "max_new_tokens": args.max_new_tokens,
        "eos_token_ids": pair.target.generation_config.eos_token_id,
        "seed": args.seed,
    }
    policy = _scheduled(args, tuned, pair.tokenizer)
    if policy is None:
        result = generate_plain(pair.target, ids, temperature=tuned.temperature, **shared)
    else:
        drafter = ModelDrafter(pair.draft, stop=args.draft_stop)
        result = generate(pair.target, drafter, ids, **tuned.options | {"policy": policy}, **shared)
    text = pair.tokenizer.decode(result.output_token_ids[0], skip_special_tokens=True)
    statistics = result.statistics()
    if args.json:
        spec = "plain" if policy is None else policy.spec
        header = {"policy": spec, "verifier": tuned.verifier, "text": text}
        readings = [own.as_dict() for own in result.readings()]
        return print_json(header | statistics | {"readings": readings})
    print(args.prompt + text)
    for name, value in statistics.items():
        shown = f"{value:.4g}" if isinstance(value, float) else value
        print(f"{name.replace('_', ' '):<28} {shown}", file=sys.stderr)
    return 0


def _scheduled(args: argparse.Namespace, tuned: TunedSetting, tokenizer: Any) -> Any:
    """Return the policy under ``--span`` and ``--cap``; without a tokenizer only check them."""
    from cactus_theory.decoding.between import Between, spellings
    from cactus_theory.decoding.ledger import Ledger

    policy: Any = tuned.policy
    if policy is None or tuned.verifier is None:  # plain decoding spends nothing
        return None
    verifier = find_verifier(tuned.verifier)
    if args.span and tokenizer is not None:
        opening, closing = (spellings(tokenizer, text) for text in args.span)
        policy = Between(policy, opening=opening, closing=closing)
    if args.cap is not None:
        policy = Ledger(policy, args.cap)
        policy.check(verifier)
    return policy


if __name__ == "__main__":
    sys.exit(main())
