"""Time the closed forms and their alternatives, in one run and one thread.

The optimum, its policy form, exact laws and audits at real vocabulary sizes, compared with one
softmax of the same row and a plain numpy sort-and-bisect.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import cactus_theory as ct

# budget of every timed solve, in nats
DELTA = 0.1
# vocabularies of Qwen 3 and of Llama 2
LARGE, MEDIUM = 151_936, 32_000
HEADS = {"job": "job", "milliseconds": "ms", "note": ""}
# rows per call, for the time per row in a batch
BATCH, LARGE_BATCH = 64, 40
# policies whose emitted laws are also timed on a batch of large rows and row by row
LAWS = ("band:price=1", "band:delta=0.1", "cactus:delta=0.1", "speculative")


def measure(repeats: int) -> Iterator[dict[str, Any]]:
    for name, vocab, rows, job in _jobs():
        yield _timed(name, vocab, rows, job, repeats)


def pair_of_rows(rows: int, vocab: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return peaked target rows, and draft rows with unit Gaussian noise on the logits."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, vocab, generator=generator, dtype=torch.float64)
    noise = torch.randn(rows, vocab, generator=generator, dtype=torch.float64)
    return logits.softmax(-1), (logits + noise).softmax(-1)


def clocked(
    jobs: Mapping[str, Callable[[], Any]], repeats: int
) -> tuple[dict[str, dict[str, float]], dict[str, Any]]:
    """Time jobs in turn; return median, least and most milliseconds, and the jobs' results.

    The first call of each job, which allocates memory, is not timed.
    """
    last = {name: job() for name, job in jobs.items()}
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats):
        for name, job in jobs.items():
            started = time.perf_counter()
            job()
            times[name].append(1e3 * (time.perf_counter() - started))
    numbers = {"milliseconds": statistics.median, "least": min, "most": max}
    spreads = {
        name: {number: of(each) for number, of in numbers.items()} for name, each in times.items()
    }
    return spreads, last


def _timed(
    name: str, vocab: int, rows: int, job: Callable[[], Any], repeats: int
) -> dict[str, Any]:
    times = clocked({name: job}, repeats)[0][name]
    median = times["milliseconds"]
    return {
        "job": f"{name}, V = {vocab:,}" + (f", {rows} rows" if rows > 1 else ""),
        "vocabulary": vocab,
        "rows": rows,
        **times,
        "milliseconds_per_row": median / rows,
        "note": f"{median / rows:.2f} ms a row" if rows > 1 else "",
    }


def _jobs() -> Iterator[tuple[str, int, int, Callable[[], Any]]]:
    q, p = pair_of_rows(1, LARGE)
    logits = q.log()
    yield "softmax in float64", LARGE, 1, lambda: logits.softmax(-1)
    yield "sort-and-bisect in numpy", LARGE, 1, lambda: naive_optimum(q[0].numpy(), p[0].numpy())
    optimum = partial(ct.optimal_acceptance, delta=DELTA)
    yield "optimal_acceptance kl", LARGE, 1, partial(optimum, q, p)
    for spec in ("band:delta=0.1", "band:price=2"):
        policy = ct.policy(spec)
        yield f"row of {spec}", LARGE, 1, lambda policy=policy: policy.target(q, p)
    for spec in ("cactus:delta=0.1", "cactus_exact:delta=0.1", "typical"):
        policy = ct.policy(spec)
        yield f"emitted_law {spec}", LARGE, 1, lambda policy=policy: ct.emitted_law(policy, q, p)
        yield f"audit {spec}", LARGE, 1, lambda policy=policy: ct.audit(policy, q, p)
    yield "optimal_acceptance kl", MEDIUM, BATCH, partial(optimum, *pair_of_rows(BATCH, MEDIUM))
    large = pair_of_rows(LARGE_BATCH, LARGE)
    jobs: dict[str, Callable[..., Any]] = {
        f"emitted_law {spec}": partial(ct.emitted_law, ct.policy(spec)) for spec in LAWS
    }
    jobs["audit cactus:delta=0.1"] = partial(ct.audit, ct.policy("cactus:delta=0.1"))
    jobs["optimal_acceptance kl"] = optimum
    for name, job in jobs.items():
        yield f"{name} of a batch", LARGE, LARGE_BATCH, partial(job, *large)
        yield f"{name} one by one", LARGE, LARGE_BATCH, lambda job=job: list(map(job, *large))


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
