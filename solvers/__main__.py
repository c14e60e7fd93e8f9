"""``python -m solvers PROGRAM …``: solve one convex program on rows from files."""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import numpy as np

from cactus_theory._arguments import as_tensor, check_pair
from cactus_theory._files import load_rows
from solvers import optimal, per_proposal, reference

Parser = argparse.ArgumentParser
Results = Iterator[Any]


class Command(NamedTuple):
    """A program on the command line: its help, its arguments, and what it yields per row."""

    about: str
    arguments: Callable[[Parser], None]
    solve: Callable[[argparse.Namespace], Results]


class _OneLineParser(Parser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _common(parser: Parser) -> None:
    parser.add_argument("--divergence", default="kl", help="kl, alpha:a=0.5, renyi:a=2, …")
    parser.add_argument("--delta", type=float, required=True, help="budget ≥ 0, nats for kl")
    parser.add_argument("--logits", action="store_true", help="the files hold logits")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _per_proposal_arguments(parser: Parser) -> None:
    parser.add_argument("target", help="rows of the target: .npy .npz .safetensors .csv .json")
    parser.add_argument("--token", type=int, required=True, help="drafted token, from 0")
    _common(parser)


def _optimal_arguments(parser: Parser) -> None:
    parser.add_argument("target", help="rows of the target: .npy .npz .safetensors .csv .json")
    parser.add_argument("draft", help="rows of the draft, as many")
    parser.add_argument("--support", choices=optimal.SUPPORTS, default="target")
    _common(parser)


def _per_proposal(args: argparse.Namespace) -> Results:
    rows = load_rows(args.target, logits=args.logits)
    for target in rows.reshape(-1, rows.shape[-1]):
        yield per_proposal.solve(target, args.token, divergence=args.divergence, delta=args.delta)


def _optimal(args: argparse.Namespace) -> Results:
    target, draft = (load_rows(path, logits=args.logits) for path in (args.target, args.draft))
    check_pair(
        as_tensor(args.target, target), as_tensor(args.draft, draft), (args.target, args.draft)
    )
    try:
        shape = np.broadcast_shapes(target.shape, draft.shape)
    except ValueError:
        raise ValueError(
            f"{args.draft}: shape must broadcast with {args.target} {target.shape}; "
            f"got {draft.shape}"
        ) from None
    pairs = (np.broadcast_to(x, shape).reshape(-1, shape[-1]) for x in (target, draft))
    for q, p in zip(*pairs, strict=True):
        yield optimal.solve(q, p, args.divergence, delta=args.delta, support=args.support)


def _reference_arguments(parser: Parser) -> None:
    parser.add_argument("--out", default=reference.OUT, help="the .npz to write")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _reference(args: argparse.Namespace) -> Results:
    yield reference.save(args.out)


COMMANDS = {
    "per-proposal": Command(
        "raise one drafted token as far as a budget allows (the Cactus program)",
        _per_proposal_arguments,
        _per_proposal,
    ),
    "optimal": Command(
        "maximise acceptance under a budget on what is emitted", _optimal_arguments, _optimal
    ),
    "reference": Command(
        "store solved programs for machines without a solver", _reference_arguments, _reference
    ),
}


def _parser() -> Parser:
    parser = _OneLineParser(prog="python -m solvers", description=__doc__)
    commands = parser.add_subparsers(dest="program", required=True, metavar="PROGRAM")
    for name, command in COMMANDS.items():
        command.arguments(commands.add_parser(name, help=command.about, description=command.about))
    return parser


def _plain(value: Any) -> Any:
    """Return a JSON value; JSON has no infinity, so it is the string "inf"."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _text(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return np.array2string(value, precision=6, threshold=16, max_line_width=10_000)
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _show(program: str, results: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        rows = [{name: _plain(value) for name, value in row.items()} for row in results]
        print(json.dumps({"program": program, "rows": rows}, allow_nan=False))
        return
    for index, row in enumerate(results):
        if len(results) > 1:
            print(f"row {index}")
        for name, value in row.items():
            print(f"{name:<11} {_text(value)}")


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        results = [
            {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
            for result in COMMANDS[args.program].solve(args)
        ]
    except (ValueError, TypeError, OSError, RuntimeError, ModuleNotFoundError) as error:
        print(f"python -m solvers {args.program}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    _show(args.program, results, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
