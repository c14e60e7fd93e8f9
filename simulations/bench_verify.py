"""Time one verification step at a large vocabulary, beside the straightforward dense way."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import cactus_theory as ct

BATCH, WIDTH, VOCAB = 8, 8, 151_936
DELTA = 0.1
POLICIES = ("speculative", "cactus:delta=0.1", "cactus_exact:delta=0.1", "band:delta=0.1")
MORE = ("band:price=2", "typical")
# how far the draft's logits stray from the target's: usual acceptance, and almost none
NOISES = {"usual draft": 1.0, "poor draft": 4.0}


def dense_step(
    q: Tensor, p: Tensor, ids: Tensor, delta: float, coins: Tensor
) -> tuple[Tensor, ...]:
    """Verify a chain under Cactus by building every row: h and (h − p)₊ at all (B, K, V).

    Every position is given a recovered token, whether it will be used or not.
    """
    n = ids[..., None]
    target = q[:, :-1]
    q_n, p_n = target.gather(-1, n), p.gather(-1, n)
    raised = (q_n + (2 * delta * q_n * (1 - q_n)).sqrt()).clamp(max=1.0)
    h = (target * ((1 - raised) / (1 - q_n))).scatter(-1, n, raised)
    kept = (coins < (raised / p_n)[..., 0]).long().cumprod(-1)
    residual = (h - p).clamp(min=0.0)
    total = residual.sum(-1, keepdim=True)
    residual = torch.where(total > 0, residual / total, h)
    recovered = torch.multinomial(residual.flatten(0, 1), 1).view(ids.shape)
    bonus = torch.multinomial(q[:, -1], 1)
    accepted = kept.sum(-1)
    last = torch.cat([recovered, bonus], -1).gather(-1, accepted[:, None])
    return torch.where(kept > 0, ids, -1), last, accepted


def rows(noise: float, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Return float32 target and draft rows, drafted tokens and coins."""
    source = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(BATCH, WIDTH + 1, VOCAB, generator=source)
    stray = noise * torch.randn(BATCH, WIDTH, VOCAB, generator=source)
    q, p = logits.softmax(-1), (logits[:, :-1] + stray).softmax(-1)
    ids = torch.multinomial(p.flatten(0, 1), 1, generator=source).view(BATCH, WIDTH)
    coins = torch.rand(BATCH, WIDTH + 1, generator=source, dtype=torch.float64)
    return q, p, ids, (coins[:, :WIDTH], coins[:, WIDTH])


def measure(repeats: int) -> list[dict[str, Any]]:
    """Return one dictionary per draft and job: median milliseconds, jobs interleaved."""
    return [row for kind, noise in NOISES.items() for row in _measured(kind, noise, repeats)]


def _measured(kind: str, noise: float, repeats: int) -> list[dict[str, Any]]:
    q, p, ids, coins = rows(noise)
    logits, memory = q.log(), torch.empty_like(q)  # a softmax that need not ask for memory
    jobs: dict[str, Callable[[], Any]] = {
        "softmax of the target rows": lambda: torch.softmax(logits, -1, out=memory),
        "dense, cactus:delta=0.1": lambda: dense_step(q, p, ids, DELTA, coins[0]),
    }
    for spec in POLICIES + MORE:
        rule = ct.policy(spec)
        jobs[f"verify_chain, {spec}"] = lambda rule=rule: ct.verify_chain(
            rule, q, p, ids, coins=coins, validate=False
        )
    times: dict[str, list[float]] = {name: [] for name in jobs}
    with torch.inference_mode():
        for repeat in range(repeats + 1):
            for name, job in jobs.items():
                started = time.perf_counter()
                job()
                if repeat:  # the first pays for memory
                    times[name].append(1e3 * (time.perf_counter() - started))
        kept = {
            f"verify_chain, {spec}": ct.verify_chain(
                ct.policy(spec), q, p, ids, coins=coins, validate=False
            ).num_accepted
            for spec in POLICIES + MORE
        }
    dense = statistics.median(times["dense, cactus:delta=0.1"])
    softmax = statistics.median(times["softmax of the target rows"])
    return [
        {
            "draft": kind,
            "job": name,
            "batch": BATCH,
            "drafted": WIDTH,
            "vocabulary": VOCAB,
            "milliseconds": statistics.median(own),
            "least": min(own),
            "most": max(own),
            "times_faster_than_dense": dense / statistics.median(own),
            "softmaxes": statistics.median(own) / softmax,
            "accepted": int(kept[name].sum()) if name in kept else "",
            "refused_rows": int((kept[name] < WIDTH).sum()) if name in kept else "",
        }
        for name, own in times.items()
    ]


def report(found: list[dict[str, Any]]) -> None:
    """Print the rows as a table."""
    for row in found:
        print(
            f"{row['draft']:<12} {row['milliseconds']:>10.2f} ms  "
            f"{row['times_faster_than_dense']:>7.1f}x dense  {row['softmaxes']:>6.2f} softmaxes  "
            f"{row['job']}  accepted {row['accepted']} refused {row['refused_rows']}"
        )
