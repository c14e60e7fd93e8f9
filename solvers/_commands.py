"""The programs of ``python -m solvers``: the arguments of each, and the job for each row."""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from cactus_theory.base.rows import load_rows, pair_in, pair_of
from cactus_theory.base.tensors import checked_rows

from . import block, decode, optimal, per_proposal, sequence
from .design import Design, DesignedRow
from .path_tree import PathTree

Parser = argparse.ArgumentParser
# a call without arguments that solves the program of one row
Job = Callable[[], Any]
Jobs = Iterator[Job]


class Command(NamedTuple):
    """A program on the command line: help, example, arguments, and a job for each row."""

    about: str
    example: str
    arguments: Callable[[Parser], None]
    solve: Callable[[argparse.Namespace], Jobs]


def _rows(parser: Parser, each: str = ": .npy .npz .json") -> None:
    parser.add_argument("target", help=f"rows of the target{each}")
    parser.add_argument(
        "draft", nargs="?", help="rows of the draft, as many; a .npz of target and draft has both"
    )
    parser.add_argument("--normalise", action="store_true", help="divide rows by their sums")


def _optimal_arguments(parser: Parser) -> None:
    _rows(parser)
    add = parser.add_argument
    add("--divergence", default="kl", help="kl, alpha:a=0.5, renyi:a=2, …")
    add("--delta", type=float, required=True, help="budget ≥ 0, nats for kl")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--support", choices=optimal.SUPPORTS, default="target")
    kind.add_argument("--sequence", action="store_true", help="one budget for the sum over rows")
    text = "raise this token, from 0, as far as the budget allows, without draft rows"
    kind.add_argument("--token", type=int, metavar="N", help=f"{text} (the Cactus program)")
    add("--logits", action="store_true", help="the files hold logits")
    add("--json", action="store_true", help="print one JSON object")


def _pairs(args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Read target and draft rows, (N, V) each, broadcast to one shape."""
    flags = {"logits": args.logits, "normalise": args.normalise}
    names = pair_of(args.target, args.draft)
    loaded = [load_rows(path, **flags) for path in names]
    target, draft = checked_rows(loaded[0], loaded[1], names=names)
    size = target.shape[-1]
    return target.reshape(-1, size).numpy(), draft.reshape(-1, size).numpy()


def _optimal(args: argparse.Namespace) -> Jobs:
    budget = {"divergence": args.divergence, "delta": args.delta}
    if args.token is not None:
        if args.draft is not None:
            raise ValueError(f"draft: must not be given with --token; got {args.draft}")
        path = (pair_in(args.target) or (args.target,))[0]
        rows = load_rows(path, logits=args.logits, normalise=args.normalise)
        for target in rows.reshape(-1, rows.shape[-1]):
            yield partial(per_proposal.solve, target, args.token, **budget)
    elif args.sequence:
        yield partial(sequence.solve, *_pairs(args), **budget)
    else:
        for q, p in zip(*_pairs(args), strict=True):
            yield partial(optimal.solve, q, p, support=args.support, **budget)


def _design_arguments(parser: Parser) -> None:
    _rows(parser)
    add = parser.add_argument
    add("--divergence", default="kl", help="of --delta: kl, alpha:a=0.5, renyi:a=2, …")
    add("--delta", type=float, help="budget ≥ 0, nats for kl; none without it")
    add("--protect", metavar="3,5,…", help="tokens never likelier than under the target")
    text = "h ≤ RATIO·q; may be repeated (Design in Python takes more)"
    add("--cap", action="append", default=[], metavar="[TOKEN=]RATIO", help=text)
    add("--logits", action="store_true", help="the rows are logits")
    add("--json", action="store_true", help="print one JSON object")


def _design(args: argparse.Namespace) -> Jobs:
    for q, p in zip(*_pairs(args), strict=True):
        yield partial(_designed, args, q, p)


def _designed(args: argparse.Namespace, q: np.ndarray, p: np.ndarray) -> DesignedRow:
    design = Design(q, p)
    if args.delta is not None:
        design = design.budget(args.divergence, args.delta)
    if args.protect is not None:
        design = design.protect(_numbers("--protect", args.protect))
    for text in args.cap:
        token, separator, ratio = text.rpartition("=")
        try:
            design = design.cap(float(ratio), int(token) if separator else None)
        except ValueError as error:
            raise ValueError(f"--cap: must read RATIO, or TOKEN=RATIO; {error}") from None
    return design.solve()


def _numbers(flag: str, text: str) -> list[int]:
    try:
        return [int(item) for item in text.split(",")]
    except ValueError:
        raise ValueError(f"{flag}: must be numbers of tokens, as in 3,5; got {text!r}") from None


def _block_arguments(parser: Parser) -> None:
    parser.add_argument(
        "rows", help="a .npz with target and draft, (nodes, V) each: a row a prefix, breadth first"
    )
    add = parser.add_argument
    add("--divergence", default="kl", help="what is metered: kl, alpha:a=0.5, …")
    add("--price", type=float, help="ν ≥ 0, tokens given up for a unit of divergence")
    add("--nats", type=float, metavar="KAPPA", help="budget of an emitted token")
    add("--logits", action="store_true", help="the file holds logits")
    add("--json", action="store_true", help="print one JSON object")


def _block(args: argparse.Namespace) -> Jobs:
    tree = PathTree.load(args.rows, logits=args.logits)
    goal = {"price": args.price, "per_token": args.nats}
    yield partial(block.solve, tree, args.divergence, **goal)


def _decode_arguments(parser: Parser) -> None:
    _rows(parser, ", (V, V): one for each last token")
    add = parser.add_argument
    add("--num-draft-tokens", type=int, required=True, metavar="K", help="drafted a call")
    add("--divergence", default="kl", help="what is metered: kl, alpha:a=0.5, …")
    add("--nats", type=float, required=True, metavar="KAPPA", help="nats for kl")
    add("--logits", action="store_true", help="the files hold logits")
    add("--json", action="store_true", help="print one JSON object")


def _decode(args: argparse.Namespace) -> Jobs:
    rows = [load_rows(path, logits=args.logits) for path in pair_of(args.target, args.draft)]
    goal = {"divergence": args.divergence, "per_token": args.nats}
    yield partial(decode.solve, *rows, args.num_draft_tokens, **goal)


COMMANDS = {
    "optimal": Command(
        "maximise acceptance under a budget: a row, all rows, one token",
        "simulations/data/rows.npz --delta 0.1",
        _optimal_arguments,
        _optimal,
    ),
    "design": Command(
        "maximise acceptance under constraints of your own",
        "simulations/data/rows.npz --protect 0 --cap 2",
        _design_arguments,
        _design,
    ),
    "block": Command(
        "verify one drafted path as well as any verifier can",
        "simulations/data/rows.npz --nats 0.1",
        _block_arguments,
        _block,
    ),
    "decode": Command(
        "verify a text of Markov models in as few calls as any verifier can",
        "simulations/data/markov.npz --num-draft-tokens 2 --nats 0.1",
        _decode_arguments,
        _decode,
    ),
}
