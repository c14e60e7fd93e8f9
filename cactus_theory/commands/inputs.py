"""Read the rows, traces and truncation (top-k, top-p) that the flags of a command name."""

import argparse
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import cactus_theory as ct
from cactus_theory.base import arguments as check
from cactus_theory.base.rows import load_rows, pair_of
from cactus_theory.base.terminal import Progress
from cactus_theory.commands.flags import flag, refuse
from cactus_theory.decoding.truncation import WHOLE, Cuts
from cactus_theory.traces import SavedRows, Trace
from cactus_theory.traces.folder import Header

# flags that turn logits into rows
OF_LOGITS = ("temperature", *(field.name for field in fields(Cuts)))


def given_cuts(args: argparse.Namespace) -> Cuts | None:
    """Return the truncation (top-k, top-p) that the flags name, or None without such a flag."""
    values = {field.name: getattr(args, field.name) for field in fields(Cuts)}
    given = {name: value for name, value in values.items() if value is not None}
    try:
        return Cuts(**given) if given else None
    except ValueError as error:
        name, _, rule = str(error).partition(":")
        raise ValueError(f"{flag(name)}:{rule}") from None


def check_cuts(args: argparse.Namespace, header: Header) -> None:
    """Raise ValueError if the flags name another truncation than that of the trace's rows."""
    asked, logged = given_cuts(args), header.cuts
    if None not in (asked, logged) and asked != logged:
        raise ValueError(f"--top-k, --top-p: must be those of the trace, {logged}; got {asked}")


def rows(args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Read target and draft rows from two files, from one .npz file or from a trace."""
    if Path(args.target).is_dir():
        target, draft = (rows.numpy() for rows in _trace(args).rows())
        return target, draft
    if not Path(args.target.partition("::")[0]).exists():
        raise FileNotFoundError(f"target: no such file; got {args.target!r}")
    if args.logits and args.normalise:
        raise ValueError("--logits, --normalise: at most one may be given; got both")
    if not args.logits:
        refuse(args, OF_LOGITS, "must be given with --logits")
    cut = any(getattr(args, name) is not None for name in OF_LOGITS)
    # with a temperature or a cut, the logits become rows below
    read = partial(load_rows, logits=args.logits and not cut, normalise=args.normalise)
    target, draft = map(read, pair_of(args.target, args.draft))
    if cut:
        heat = 1.0 if args.temperature is None else args.temperature
        check.finite("--temperature", heat, 0)
        target, draft = (given_cuts(args) or WHOLE).rows(target, draft, temperature=heat)
    return target, draft


def source(args: argparse.Namespace) -> Trace | SavedRows:
    """Return the trace that the flags name, or the rows of files in the form of a trace."""
    return _trace(args) if Path(args.target).is_dir() else SavedRows.of(*rows(args))


def _trace(args: argparse.Namespace) -> Trace:
    for name in ("draft", "logits", "normalise", *OF_LOGITS):
        if (value := getattr(args, name)) is not None and value is not False:
            raise ValueError(f"{name}: must not be given with a trace; got {value}")
    return Trace.open(args.target)


def shown_frontier(q: Any, p: Any, divergence: str, points: int = 33) -> Any:
    """Compute :func:`cactus_theory.pooled_frontier` and show its progress."""
    progress = Progress("points of the frontier", points)
    return ct.pooled_frontier(q, p, divergence=divergence, points=points, on_point=progress.update)
