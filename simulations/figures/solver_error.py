r"""How far convex programs are from the closed form, and where they fail, over the vocabulary.

The optimum :math:`\max_h Σ_i \min(p_i, h_i)` under KL ≤ δ three times: the closed form, the
program of this project (``solvers.optimal``, in ratios to the row, which checks its own
answer) and the same program written down plainly in h. Reported are the distances of the two
programs' acceptances from the closed form's, whose own error its certificate bounds, and whether
the solver said that it was done.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import cactus_theory as ct
from cactus_theory.base.terminal import Progress
from solvers import optimal

from ..common.results import publish

OUT = Path("paper_figures/data/solver_error.csv")
DELTA = 0.1
# deviation of the logits: ordinary rows, and rows of a sure model
ROWS = {"ordinary": 3.0, "spiky": 8.0}
Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags; the defaults made the committed table."""
    parser.description = __doc__
    add = parser.add_argument
    add("--vocab", type=int, nargs="+", default=[10, 30, 100, 300, 1000, 3000, 10_000])
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="a pair of rows each")
    add("--delta", type=float, default=DELTA, help="KL in nats")
    add("--out", type=Path, default=OUT, help="the CSV")


def run(args: argparse.Namespace) -> int:
    """Write the table and print one line per size."""
    cases = [(v, kind, s) for v in args.vocab for kind in ROWS for s in args.seeds]
    rows: list[Row] = []
    list(compared(10, "ordinary", 0, args.delta))  # imports and first calls are not timed
    with Progress("solving", len(cases)) as progress:
        for vocab, kind, seed in cases:
            rows += compared(vocab, kind, seed, args.delta)
            progress.advance(f"V = {vocab:,}, {kind}")
    publish(args, rows)
    for vocab in args.vocab:
        print(f"V = {vocab:>7,}  {_summary([row for row in rows if row['vocabulary'] == vocab])}")
    print(f"{len(rows)} rows in {args.out}")
    return 0


def compared(vocab: int, kind: str, seed: int, delta: float) -> Iterator[Row]:
    """Yield one row per program for one pair of rows."""
    q, p = pair(vocab, ROWS[kind], seed)
    started = time.perf_counter()
    best = ct.optimal_acceptance(q, p, divergence="kl", delta=delta)
    case = {
        "vocabulary": vocab, "rows": kind, "seed": seed, "acceptance": float(best.acceptance),
        "gap": float(best.gap), "closed_form_seconds": time.perf_counter() - started,
    }  # fmt: skip
    for name, program in (("ratios", _in_ratios), ("plain", _plain)):
        started = time.perf_counter()
        value, status = program(q, p, delta)
        seconds = time.perf_counter() - started
        error = None if value is None else abs(value - case["acceptance"])
        yield case | {"program": name, "status": status, "error": error, "seconds": seconds}


def pair(vocab: int, deviation: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a target row and a draft row (V,) that errs by a unit of noise in the logits."""
    random = np.random.default_rng([vocab, seed])
    logits = deviation * random.standard_normal(vocab)
    rows = np.stack([logits, logits + random.standard_normal(vocab)])
    rows = np.exp(rows - rows.max(-1, keepdims=True))
    q, p = rows / rows.sum(-1, keepdims=True)
    return q, p


def _in_ratios(q: np.ndarray, p: np.ndarray, delta: float) -> tuple[float | None, str]:
    try:
        answer = optimal.solve(q, p, divergence="kl", delta=delta)
    except RuntimeError:
        return None, "refused its answer"
    return answer.acceptance, answer.status


def _plain(q: np.ndarray, p: np.ndarray, delta: float) -> tuple[float | None, str]:
    """Return what the program in h itself comes to, and what the solver says of it."""
    import cvxpy

    cp: Any = cvxpy
    h = cp.Variable(len(q), nonneg=True)
    budget = cp.sum(cp.rel_entr(h, q)) <= delta
    problem = cp.Problem(cp.Maximize(cp.sum(cp.minimum(p, h))), [cp.sum(h) == 1, budget])
    try:
        problem.solve(solver=cp.CLARABEL)
    except cp.error.SolverError:
        return None, "failed"
    if h.value is None:
        return None, str(problem.status)
    return float(np.minimum(p, h.value).sum()), str(problem.status)


def _summary(rows: list[Row]) -> str:
    parts = []
    for name in ("ratios", "plain"):
        all_errors = [row["error"] for row in rows if row["program"] == name]
        errors = [error for error in all_errors if error is not None]
        worst = f"off by at most {max(errors):.1e}" if errors else "no answer"
        count = len(all_errors)
        parts.append(f"{name}: {worst}, {count - len(errors)} of {count} without an answer")
    return "; ".join(parts)
