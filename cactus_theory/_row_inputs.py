"""The rows that a command is given: files, the folder of a trace, or tokens of certain drafts."""

import argparse
import re
from typing import Any

import numpy as np

from cactus_theory._files import load_rows
from cactus_theory.traces import SavedRows, Trace
from cactus_theory.traces.trace import is_trace


def pair(args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Return target and draft rows of two files, or all those of a trace."""
    if is_trace(args.target):
        return _logged(args)
    if args.draft is None:
        raise ValueError("draft: must be given, unless target is a trace; got target alone")
    return _rows(args, args.target), _rows(args, args.draft)


def drafts(args: argparse.Namespace) -> tuple[np.ndarray, Any, np.ndarray | None]:
    """Return target rows, and draft rows or the tokens of certain drafts; the other is None."""
    if args.draft_tokens is None and is_trace(args.target):
        return *_logged(args), None
    if (args.draft is None) == (args.draft_tokens is None):
        given = "neither" if args.draft is None else "both"
        raise ValueError(f"draft, --draft-tokens: exactly one must be given; got {given}")
    if args.draft_tokens is None:
        return *pair(args), None
    q = _rows(args, args.target)
    ids = _token_ids(args.draft_tokens)
    return q, None, ids.reshape(q.shape[:-1]) if ids.size == q[..., 0].size else ids


def source(args: argparse.Namespace) -> Trace | SavedRows:
    """Return the trace that is named, or rows as one; certain drafts as one-hot rows."""
    if args.draft_tokens is None and is_trace(args.target):
        _refuse_with_a_trace(args)
        return Trace.open(args.target)
    q, p, ids = drafts(args)
    if ids is not None:
        q = np.broadcast_to(q, (*np.broadcast_shapes(q.shape[:-1], ids.shape), q.shape[-1]))
        p = np.zeros_like(q)
        np.put_along_axis(p, ids[..., None], 1.0, -1)
    return SavedRows.of(q, p)


def _rows(args: argparse.Namespace, path: str) -> np.ndarray:
    """Return the rows of a file, as the flags read them."""
    if args.logits and args.normalise:
        raise ValueError("--logits, --normalise: at most one may be given; got both")
    return load_rows(path, logits=args.logits, normalise=args.normalise)


def _logged(args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Return all rows of a trace that have a draft row."""
    _refuse_with_a_trace(args)
    q, p = Trace.open(args.target).rows()
    return q.numpy(), p.numpy()


def _refuse_with_a_trace(args: argparse.Namespace) -> None:
    for name in ("draft", "logits", "normalise"):
        if given := getattr(args, name):
            raise ValueError(f"{name}: must not be given with a trace; got {given}")


def _token_ids(text: str) -> np.ndarray:
    """Return the token ids of ``3,1,4``, or those in a file."""
    if re.fullmatch(r"\s*\d+(\s*,\s*\d+)*\s*", text):
        return np.array([int(part) for part in text.split(",")])
    ids = load_rows(text)
    if (ids != np.floor(ids)).any():
        raise ValueError(f"--draft-tokens: must hold whole numbers; got {text!r}")
    return ids.astype(np.int64)
