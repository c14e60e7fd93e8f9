"""Time the closed forms beside what one would otherwise use, in one run and one thread.

``theory``: the optimum, its policy form, exact laws and audits at real vocabulary sizes,
beside one softmax of the same row, a plain numpy sort-and-bisect, and CLARABEL.
``verify``: one verification step of a batch, beside the straightforward dense way.
``decode``: tokens per second of a model pair, beside Hugging Face assisted generation.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import cactus_theory as ct

from .results import provenance, write_csv

HERE = Path(__file__).resolve().parent
PAIR, PROMPTS = HERE / "pair", HERE / "data" / "prompts.jsonl"
DELTA = 0.1
LARGE, MEDIUM = 151_936, 32_000
PROGRAM_SIZES = (1_000, 10_000)
BATCH = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("what", choices=("theory", "verify", "decode"), help="which benchmark")
    parser.add_argument("--repeats", type=int, default=7, help="the median is reported")
    parser.add_argument("--programs", type=int, default=5, help="rows solved by CLARABEL a size")
    parser.add_argument("--target", type=Path, default=PAIR / "target", help="of decode")
    parser.add_argument("--draft", type=Path, default=PAIR / "draft", help="of decode")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="of decode, JSON lines")
    parser.add_argument("--out", type=Path, help="build/bench/WHAT.csv unless given")


def run(args: argparse.Namespace) -> int:
    """Time everything, print a table, write the CSV."""
    torch.set_num_threads(1)
    args.out = args.out or Path("build/bench") / f"{args.what}.csv"
    if args.what != "theory":
        return _run_module(args)
    rows = []
    for row in _all(args):
        rows.append(row)
        print(f"{row['milliseconds']:>12.3f} ms  {row['job']}  {row['note']}", flush=True)
    write_csv(args.out, rows, provenance("python -m simulations bench theory"))
    return 0


def _run_module(args: argparse.Namespace) -> int:
    """Run a benchmark that has a file of its own."""
    if args.what == "verify":
        from . import bench_verify as bench

        rows = bench.measure(args.repeats)
    else:
        from . import bench_decode as bench

        rows = bench.measure(args.target, args.draft, args.prompts, args.repeats)
    bench.report(rows)
    names = {name: getattr(args, name) for name in ("target", "draft", "prompts")}
    own = {"target": PAIR / "target", "draft": PAIR / "draft", "prompts": PROMPTS}
    flags = [f" --{k} {v.name}" for k, v in names.items() if v != own[k]]
    write_csv(
        args.out, rows, provenance(f"python -m simulations bench {args.what}{''.join(flags)}")
    )
    return 0


def pair_of_rows(rows: int, vocab: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return peaked target rows and drafts that err by a unit of noise in the logits."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, vocab, generator=generator, dtype=torch.float64)
    noise = torch.randn(rows, vocab, generator=generator, dtype=torch.float64)
    return logits.softmax(-1), (logits + noise).softmax(-1)


def median_ms(job: Callable[[], Any], repeats: int) -> tuple[float, float, float]:
    """Return median, least and most milliseconds after one warm-up."""
    job()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        job()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times), min(times), max(times)


def _all(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name, vocab, rows, job in _jobs():
        yield _timed(name, vocab, rows, job, args.repeats)
    for vocab in PROGRAM_SIZES:
        yield from _against_program(vocab, args)


def _timed(
    name: str, vocab: int, rows: int, job: Callable[[], Any], repeats: int, note: str = ""
) -> dict[str, Any]:
    median, least, most = median_ms(job, repeats)
    return {
        "job": f"{name}, V = {vocab:,}" + (f", {rows} rows" if rows > 1 else ""),
        "vocabulary": vocab,
        "rows": rows,
        "milliseconds": median,
        "least": least,
        "most": most,
        "milliseconds_per_row": median / rows,
        "note": note or (f"{median / rows:.2f} ms a row" if rows > 1 else ""),
    }


def _jobs() -> Iterator[tuple[str, int, int, Callable[[], Any]]]:
    q, p = pair_of_rows(1, LARGE)
    logits = q.log()
    yield "softmax in float64", LARGE, 1, lambda: logits.softmax(-1)
    yield "sort-and-bisect in numpy", LARGE, 1, lambda: naive_optimum(q[0].numpy(), p[0].numpy())
    yield "optimal_acceptance kl", LARGE, 1, lambda: ct.optimal_acceptance(q, p, delta=DELTA)
    for spec in ("band:delta=0.1", "band:price=2"):
        rule = ct.policy(spec)
        yield f"edges of {spec}", LARGE, 1, lambda rule=rule: rule.edges(q, p)  # type: ignore[attr-defined]
    for spec in ("cactus:delta=0.1", "cactus_exact:delta=0.1", "typical"):
        rule = ct.policy(spec)
        yield f"emitted_law {spec}", LARGE, 1, lambda rule=rule: ct.emitted_law(rule, q, p)
        yield f"audit {spec}", LARGE, 1, lambda rule=rule: ct.audit(rule, q, p)
    many_q, many_p = pair_of_rows(BATCH, MEDIUM)
    yield (
        "optimal_acceptance kl", MEDIUM, BATCH,
        lambda: ct.optimal_acceptance(many_q, many_p, delta=DELTA),
    )  # fmt: skip


def naive_optimum(q: np.ndarray, p: np.ndarray) -> float:
    """Return the best acceptance at KL ≤ DELTA by nested bisection over whole rows."""
    order = np.argsort(p / q)
    q, p = q[order], p[order]

    def edge(shortfall: Callable[[float], float], low: float, high: float, aim: float) -> float:
        for _ in range(45):
            middle = (low + high) / 2
            low, high = (middle, high) if shortfall(middle) < aim else (low, middle)
        return low

    least, most = 0.0, float(np.maximum(q - p, 0).sum())
    ratio_top = float((p / q).max())
    for _ in range(12):
        rejected = (least + most) / 2
        a = edge(lambda x: float(np.maximum(x * q - p, 0).sum()), 0.0, 1.0, rejected)
        b = -edge(lambda x: float(np.maximum(p + x * q, 0).sum()), -ratio_top, -1.0, rejected)
        h = np.clip(p, a * q, b * q)
        spent = float(np.sum(h * np.log(h / q)))
        least, most = (least, rejected) if spent < DELTA else (rejected, most)
    return 1 - most


def _against_program(vocab: int, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the closed form's and CLARABEL's times on the same rows; failures are counted."""
    from solvers import optimal
    from solvers._program import SolverGaveUp

    q, p = pair_of_rows(args.programs, vocab, seed=1)
    times, errors, gave_up = [], [], 0
    for row_q, row_p in zip(q.numpy(), p.numpy(), strict=True):
        started = time.perf_counter()
        try:
            solved = optimal.solve(row_q, row_p, divergence="kl", delta=DELTA)
        except SolverGaveUp:
            gave_up += 1
        else:
            closed = ct.optimal_acceptance(row_q, row_p, delta=DELTA)
            errors.append(abs(float(closed.acceptance) - solved.acceptance))
        times.append(1e3 * (time.perf_counter() - started))
    closed = _timed(
        "optimal_acceptance kl", vocab, 1,
        lambda: ct.optimal_acceptance(q[0], p[0], delta=DELTA), args.repeats,
    )  # fmt: skip
    yield closed
    factor = statistics.median(times) / closed["milliseconds"]
    worst = f"differ by at most {max(errors):.1e}" if errors else "none solved"
    yield closed | {
        "job": f"cvxpy with CLARABEL, V = {vocab:,}",
        "milliseconds": statistics.median(times),
        "least": min(times),
        "most": max(times),
        "milliseconds_per_row": statistics.median(times),
        "note": f"{factor:.0f} times the closed form; {worst}; {gave_up} of {len(q)} gave up",
    }
