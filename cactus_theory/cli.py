"""The command line: ``cactus-theory solve | audit | generate``."""

import argparse
import json
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import cactus_theory as ct
from cactus_theory import _arguments as check
from cactus_theory.divergences import NAMES as DIVERGENCES
from cactus_theory.policies import Policy
from cactus_theory.policies._registry import names as policy_names

# What bad input raises; anything else is our mistake and keeps its traceback.
REPORTED = (ValueError, TypeError, OSError, ModuleNotFoundError, RuntimeError)
ROWS_SHOWN = 20


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return 0, or 2 after one line on stderr for bad input."""
    parser = _parser()
    args = parser.parse_args(arguments)
    try:
        return args.run(args)
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
    solve.add_argument("--support", default="target", help="target (default) or free")
    solve.add_argument("--out", metavar="FILE.npy", help="also save the optimal rows")
    solve.set_defaults(run=_solve)
    audit = commands.add_parser("audit", help="what a policy emits, costs and declares")
    _add_rows(audit)
    _add_policy(audit)
    audit.set_defaults(run=_audit)
    generate = commands.add_parser("generate", help="decode a prompt with a draft model")
    _add_generate(generate)
    _add_policy(generate)
    generate.set_defaults(run=_generate)
    return parser


def _add_rows(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", help="target rows q: .npy .npz .safetensors .csv .json")
    parser.add_argument("draft", help="draft rows p, same shape")
    parser.add_argument(
        "--divergence", default="kl", help=f"one of {', '.join(DIVERGENCES)} (alpha:a=0.5)"
    )
    parser.add_argument("--logits", action="store_true", help="the files hold logits")
    parser.add_argument("--json", action="store_true", help="print one JSON object only")


def _add_policy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy", required=True, help=f"one of {', '.join(policy_names())}; name:knob=value"
    )
    parser.add_argument("--delta", type=float, help="the policy's delta")
    parser.add_argument("--price", type=float, help="the policy's price")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KNOB=VALUE", help="any other knob"
    )


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", required=True, metavar="DIR", help="target model")
    parser.add_argument("--draft", required=True, metavar="DIR", help="draft model")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--num-draft-tokens", type=int, default=4, metavar="K")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 decodes greedily")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="of torch; 1 is best for small models")
    parser.add_argument("--json", action="store_true", help="print one JSON object only")


def chosen_policy(args: argparse.Namespace) -> Policy:
    """Return the policy that ``--policy``, ``--delta``, ``--price`` and ``--set`` name."""
    knobs: dict[str, Any] = {
        name: getattr(args, name) for name in ("delta", "price") if getattr(args, name) is not None
    }
    for item in args.set:
        name, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"--set: must read KNOB=VALUE; got {item!r}")
        knobs[name] = value
    return ct.policy(args.policy, **knobs)


def _pair(args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    from cactus_theory._files import load_rows

    return tuple(  # type: ignore[return-value]
        load_rows(path, logits=args.logits) for path in (args.target, args.draft)
    )


def _solve(args: argparse.Namespace) -> int:
    q, p = _pair(args)
    knob = next(k for k in ("delta", "price", "acceptance") if getattr(args, k) is not None)
    found = ct.optimal_acceptance(
        q, p, divergence=args.divergence, support=args.support, **{knob: getattr(args, knob)}
    )
    speculative = np.minimum(np.asarray(q, np.float64), np.asarray(p, np.float64)).sum(-1)
    columns = {"speculative": speculative} | {
        name: getattr(found, name)
        for name in ("acceptance", "divergence", "lower", "upper", "price", "gap")
    }
    if args.out:
        _save(args.out, found.target)
    if args.json:
        header = {"divergence": ct.divergence(args.divergence).spec, knob: getattr(args, knob)}
        return _print_json(header | {"vocabulary": int(q.shape[-1])} | columns)
    amount = f"{knob} = {getattr(args, knob):g}"
    print(f"optimal acceptance, {ct.divergence(args.divergence).spec}, {amount}")
    _print_rows(columns)
    return 0


def _audit(args: argparse.Namespace) -> int:
    q, p = _pair(args)
    rule = chosen_policy(args)
    report = ct.audit(rule, q, p, divergence=args.divergence)
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
    if args.json:
        declared = vars(report.declares) | {"budget": None if budget is None else vars(budget)}
        header = {"policy": report.policy, "declares": declared}
        return _print_json(header | {"divergences": report.divergences} | columns)
    print(f"{report.policy} declares: {'no budget' if budget is None else budget}")
    _print_rows(columns)
    print("mean divergences of the emitted law from the target:")
    for spec, value in report.divergences.items():
        print(f"  {spec:<20} {np.mean(value):.6g}")
    return 0


def _generate(args: argparse.Namespace) -> int:
    rule = chosen_policy(args)
    check.optional_module("transformers", "llm")
    from cactus_theory.decoding import generate, load_pair

    if args.threads is not None:
        torch.set_num_threads(int(check.number("threads", args.threads, 1)))
    pair = load_pair(args.target, args.draft, device=args.device)
    ids = torch.tensor([pair.tokenizer.encode(args.prompt)], device=args.device)
    if not ids.numel():
        raise ValueError(f"--prompt: must hold at least one token; got {args.prompt!r}")
    result = generate(
        pair.target,
        pair.draft,
        ids,
        policy=rule,
        num_draft_tokens=args.num_draft_tokens,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        eos_token_ids=pair.target.generation_config.eos_token_id,
        seed=args.seed,
    )
    text = pair.tokenizer.decode(result.output_token_ids[0], skip_special_tokens=True)
    statistics = result.statistics()
    if args.json:
        return _print_json({"policy": rule.spec, "text": text} | statistics)
    print(args.prompt + text)
    for name, value in statistics.items():
        shown = f"{value:.4g}" if isinstance(value, float) else value
        print(f"{name.replace('_', ' '):<28} {shown}", file=sys.stderr)
    return 0


def _save(path: str, rows: np.ndarray) -> None:
    if not path.endswith(".npy"):
        raise ValueError(f"--out: must end in .npy; got {path!r}")
    from cactus_theory._files import save_rows

    save_rows(path, rows)


def _plain(value: Any) -> Any:
    """Return ``value`` as JSON knows it; infinities and NaN become strings, as JSON has none."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _print_json(payload: dict[str, Any]) -> int:
    print(json.dumps(_plain(payload)))
    return 0


def _print_rows(columns: dict[str, Any]) -> None:
    """Print named per-row values: one row as a list, a batch as a table with its mean."""
    arrays = {name: np.atleast_1d(np.asarray(value)).reshape(-1) for name, value in columns.items()}
    count = len(next(iter(arrays.values())))
    if count == 1:
        for name, value in arrays.items():
            print(f"  {name:<30} {_cell(value[0])}")
        return
    _print_table(arrays, count)


def _print_table(arrays: dict[str, np.ndarray], count: int) -> None:
    widths = {name: max(12, len(name)) for name in arrays}
    line: Callable[[str, Callable[[str], str]], str] = lambda head, cell: "  ".join(  # noqa: E731
        [f"{head:>6}"] + [f"{cell(name):>{width}}" for name, width in widths.items()]
    )
    print(line("row", lambda name: name))
    for row in range(min(count, ROWS_SHOWN)):
        print(line(str(row), lambda name, row=row: _cell(arrays[name][row])))
    if count > ROWS_SHOWN:
        print(f"   … {count - ROWS_SHOWN} more rows (--json prints all)")
    print(line("mean", lambda name: _cell(arrays[name].astype(float).mean())))


def _cell(value: Any) -> str:
    return str(bool(value)) if isinstance(value, bool | np.bool_) else f"{float(value):.6g}"


if __name__ == "__main__":
    sys.exit(main())
