"""Many rows on the command line: where they are from, a table of policies, one budget over all."""

import argparse
import re
from typing import Any

import numpy as np
import torch

import cactus_theory as ct
from cactus_theory import _pooled as row_inputs
from cactus_theory._plot import check_picture
from cactus_theory.base.rows import load_rows, save_rows
from cactus_theory.base.tables import (
    both,
    print_json,
    print_rows,
    print_table,
    save_csv,
    save_latex,
    save_table,
)
from cactus_theory.policies import Policy
from cactus_theory.traces import PooledAudit, SavedRows, Trace, pooled_audit, row_pairs
from cactus_theory.traces.trace import is_trace

# of a frontier, unless another number is given
POINTS = 33
# columns of the table of policies that hold words
WORDS = (0, 5)
OUTPUTS = {"csv": ".csv", "latex": ".tex", "out": ".npy"}
LEGEND = """\
means over rows ± one standard error over texts
of row optimum: of the best acceptance for what the policy spends, row by row
of pooled: of the best mean acceptance for the same mean divergence, at one price on all rows"""
Line = dict[str, Any]


def audit_several(args: argparse.Namespace) -> int:
    """Print one table of policies on all rows; write the CSV, the LaTeX and the picture asked."""
    _check_outputs(args)
    rules, source = _rules(args), row_inputs.source(args)
    spec = ct.divergence(args.divergence).spec
    lines, q, p = _lines(source, rules, spec)
    notes = {"divergence": spec, "rows": lines[0]["rows"], "texts": source.texts}
    heads, cells = _heads(spec), [_cells(line, spec) for line in lines]
    shown = heads, cells, WORDS
    if args.by:
        lines: list[Line] = [
            {"group": value} | line
            for value, part in _parts(source, args.by).items()
            for line in _lines(part, rules, spec)[0]
        ]
        cells = [[line["group"], *_cells(line, spec)] for line in lines]
        shown = [args.by, *heads], cells, (0, *(place + 1 for place in WORDS))
    if args.csv:
        save_table(args.csv, lines, notes)
    if args.latex:
        said = "; ".join([f"{name} {value}" for name, value in notes.items()])
        save_latex(args.latex, *shown, note="; ".join([said, *LEGEND.splitlines()]))
    if args.plot:
        from cactus_theory._plot import save_pooled_plot

        points = [(line["policy"], line[spec], line["acceptance"]) for line in lines]
        save_pooled_plot(args.plot, ct.pooled_frontier(q, p, divergence=spec), spec, points)
    if args.json:
        return print_json(notes | {"policies": lines})
    print("{rows} rows of {texts} texts".format(**notes))
    print_table(*shown)
    print(LEGEND)
    return 0


def _lines(
    source: Trace | SavedRows, rules: list[Policy], spec: str
) -> tuple[list[Line], torch.Tensor, torch.Tensor]:
    """Return a line for each policy, and all rows."""
    audits = [pooled_audit(rule, source, divergence=spec) for rule in rules]
    q, p = (torch.cat(part) for part in zip(*[own[1:] for own in row_pairs(source)], strict=True))
    return [_line(one, _pooled_share(one, q, p)) for one in audits], q, p


def _parts(source: Trace | SavedRows, column: str) -> dict[str, Trace]:
    """Return the texts of each value of a column of the prompts, as traces."""
    if not isinstance(source, Trace):
        raise ValueError(f"--by: rows have no prompts, a trace has; got {column!r}")
    return {value: source.part(texts) for value, texts in source.groups(column).items()}


def _check_outputs(args: argparse.Namespace) -> None:
    """Raise ValueError, before any work, for a file of the wrong kind."""
    for flag, suffix in OUTPUTS.items():
        path = getattr(args, flag, None)
        if path and not path.endswith(suffix):
            raise ValueError(f"--{flag}: must end in {suffix}; got {path!r}")
    if args.plot:
        check_picture(args.plot)


def _rules(args: argparse.Namespace) -> list[Policy]:
    knobs = {"delta": args.delta, "price": args.price, "set": args.set or None}
    for flag, given in knobs.items():
        if given is not None:
            raise ValueError(
                f"--{flag}: must be written in the spec in a table of policies, as in "
                f"cactus:delta=0.1; got {given}"
            )
    return [ct.policy(spec) for spec in args.policy]


def _line(one: PooledAudit, pooled_share: float | None) -> Line:
    budget = one.declares.budget
    return {
        "policy": one.policy,
        "acceptance": one.acceptance.value,
        "acceptance_se": one.acceptance.standard_error,
        one.reference: one.divergence.value,
        f"{one.reference}_se": one.divergence.standard_error,
        "share_of_row_optimum": one.share.value,
        "share_of_row_optimum_se": one.share.standard_error,
        "share_of_pooled_optimum": pooled_share,
        "declares": "no budget" if budget is None else str(budget),
        "held": one.held,
        "rows": one.rows,
    }


def _pooled_share(one: PooledAudit, q: torch.Tensor, p: torch.Tensor) -> float | None:
    """Return acceptance over the best of all rows together for the same mean divergence.

    None for divergences that cannot be pooled.
    """
    if not ct.divergence(one.reference).pools:
        return None
    spent = max(one.divergence.value, 0.0)
    best = ct.pooled_acceptance(q, p, divergence=one.reference, delta=spent)
    return one.acceptance.value / best.mean_acceptance


def _heads(spec: str) -> list[str]:
    emitted = f"emitted {'KL' if spec == 'kl' else spec}"
    return ["policy", "acceptance", emitted, "of row optimum", "of pooled", "declares", "held on"]


def _cells(line: Line, spec: str) -> list[str]:
    pooled, held = line["share_of_pooled_optimum"], line["held"]
    return [
        line["policy"],
        both(line["acceptance"], line["acceptance_se"]),
        both(line[spec], line[f"{spec}_se"]),
        f"{line['share_of_row_optimum']:.4f}",
        "" if pooled is None else f"{pooled:.4f}",
        line["declares"],
        "" if held is None else f"{held} of {line['rows']}",
    ]


def solve_pooled(args: argparse.Namespace, q: np.ndarray, p: np.ndarray, knob: str) -> int:
    """Print the best mean acceptance of all rows for one mean divergence."""
    _check_outputs(args)
    spec = ct.divergence(args.divergence).spec
    amount = getattr(args, knob)
    found = ct.pooled_acceptance(q, p, divergence=spec, **{knob: amount})
    names = ("mean_acceptance", "mean_divergence", "price", "bound", "gap")
    header = {"divergence": spec, f"pooled_{knob}": amount}
    numbers = {name: getattr(found, name) for name in names}
    columns = {"acceptance": found.acceptance, "divergence": found.divergence}
    if args.out:
        save_rows(args.out, found.target)
    if args.csv:
        save_csv(args.csv, columns, header | numbers)
    if args.plot:
        from cactus_theory._plot import save_pooled_plot

        point = (f"{knob} = {amount:g}", found.mean_divergence, found.mean_acceptance)
        save_pooled_plot(args.plot, ct.pooled_frontier(q, p, divergence=spec), spec, [point])
    if args.json:
        return print_json(header | {"vocabulary": int(q.shape[-1])} | numbers | columns)
    print(f"best mean acceptance, {spec}, {knob} = {amount:g} over all rows")
    print_rows(numbers)
    print_rows(columns)
    return 0


def solve_frontier(args: argparse.Namespace, q: np.ndarray, p: np.ndarray) -> int:
    """Print the best mean acceptance of all rows at every mean divergence, a point a line."""
    if args.out:
        raise ValueError(f"--out: must not be given with --frontier; got {args.out!r}")
    _check_outputs(args)
    spec = ct.divergence(args.divergence).spec
    found = ct.pooled_frontier(q, p, divergence=spec, points=args.frontier)
    columns = {name: getattr(found, name) for name in ("delta", "acceptance", "price", "bound")}
    columns["gap"] = found.bound - found.acceptance
    lines = [dict(zip(columns, own, strict=True)) for own in zip(*columns.values(), strict=True)]
    header = {"divergence": spec, "rows": int(np.prod(q.shape[:-1]))}
    if args.csv:
        save_table(args.csv, lines, header)
    if args.plot:
        from cactus_theory._plot import save_pooled_plot

        save_pooled_plot(args.plot, found, spec, [])
    if args.json:
        return print_json(header | columns)
    print(f"best mean acceptance of {header['rows']} rows by mean {spec}; bound and gap prove it")
    print_table(list(columns), [[f"{x:.6g}" for x in line.values()] for line in lines], ())
    return 0


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
