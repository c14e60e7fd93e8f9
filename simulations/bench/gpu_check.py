"""Check and time the device path: closed forms on the device against float64 on the CPU.

Needs the checkout, torch and transformers, no solver. Rows are random and extreme, up to a
vocabulary of 151,936. Then times, then the demo's decode table on the device. Without a CUDA
device it says so and stops; ``--device cpu`` rehearses the same steps.
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

from ..common.decode import Harness
from ..common.inputs import ROOT, add_pair_arguments, load_prompts
from ..common.results import provenance, write_csv, write_json
from ..demo.command import POLICIES
from ..demo.table import measure

# two float64 evaluations of one formula in different summation orders, V up to 151,936
AGREEMENT = 1e-9
# closed forms against stored answers of convex programs, which are good to about 1e-9
PROGRAM_TOLERANCE = 1e-6
REFERENCE = ROOT / "tests" / "data" / "reference.npz"
VOCABULARIES = (7, 1000, 32_000, 151_936)
ROWS = 4
CHECKED = (
    "speculative", "typical", "cactus:delta=0.1", "cactus_exact:delta=0.1",
    "band:delta=0.1", "band:price=2",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    add("--device", default="cuda", help="cuda (default), or cpu for a rehearsal")
    add("--out", type=Path, default=Path("build/gpu-check"))
    add("--batch", type=int, default=4, help="rows of the timed verification step")
    add("--num-draft-tokens", type=int, default=3, metavar="K")
    add("--num-prompts", type=int, default=4)
    add("--max-new-tokens", type=int, default=48, metavar="N")
    add("--repeats", type=int, default=3)
    add_pair_arguments(parser)
    add("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    """Check, time and decode; return 1 if any check failed."""
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        print("gpu-check: no CUDA device here, nothing was checked (--device cpu rehearses it)")
        return 0
    torch.set_num_threads(1)
    device = torch.device(args.device)
    source = provenance("python -m simulations gpu-check") | {"device": _name(device)}
    checks = [_show(row) for row in _checks(device, args.seed)]
    checks += [_show(row) for row in _reference_checks(device)]
    times = [_show(row) for row in _times(device, args)]
    decoded = _decode(device, args)
    for row in decoded:
        _show({key: row[key] for key in ("policy", "knob", "speedup")})
    failed = sum(not row["passed"] for row in checks)
    for name, rows in (("checks", checks), ("times", times), ("policies", decoded)):
        write_csv(args.out / f"{name}.csv", rows, source)
    payload = {"provenance": source, "checks": checks, "times": times, "policies": decoded}
    write_json(args.out / "gpu_check.json", payload)
    print(f"gpu-check on {_name(device)}: {len(checks) - failed} passed, {failed} failed")
    return 1 if failed else 0


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu (rehearsal)"


def _show(row: dict[str, Any]) -> dict[str, Any]:
    shown = (f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values() if v is not None)
    print("  ".join(shown), flush=True)
    return row


def families(vocab: int, seed: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield named target and draft rows (ROWS, V), float64, from ordinary to extreme."""
    generator = torch.Generator().manual_seed(seed)

    def noise() -> Tensor:
        return torch.randn(ROWS, vocab, generator=generator, dtype=torch.float64)

    base = 3 * noise()
    q, p = base.softmax(-1), (base + noise()).softmax(-1)
    yield "random", q, p
    spiky = (25 * noise()).softmax(-1)
    yield "spiky, to 1e-30 and below", spiky, (25 * noise()).softmax(-1)
    half = torch.arange(vocab) % 2 == 0
    zeros_q, zeros_p = torch.where(half, q, 0.0), torch.where(torch.arange(vocab) % 3 > 0, p, 0.0)
    yield "zeros", zeros_q / zeros_q.sum(-1, keepdim=True), zeros_p / zeros_p.sum(-1, keepdim=True)
    one_hot = torch.zeros_like(p)
    one_hot[:, 1] = 1.0
    yield "one-hot draft", q, one_hot
    yield "equal", q, q.clone()


def _checks(device: torch.device, seed: int) -> Iterator[dict[str, Any]]:
    """Yield one row a check: the largest difference between device and CPU."""
    for vocab in VOCABULARIES:
        for family, q, p in families(vocab, seed):
            moved = q.to(device), p.to(device)
            for name, compute in _quantities().items():
                there = compute(*moved).cpu().double()
                here = compute(q, p).double()
                error = float((there - here).abs().max())
                yield {
                    "vocabulary": vocab,
                    "rows": family,
                    "quantity": name,
                    "largest_difference": error,
                    "passed": error <= AGREEMENT,
                }


def _reference_checks(device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield one row a divergence and support: the distance to the stored programs."""
    with np.load(REFERENCE) as stored:
        groups = sorted(set(zip(stored["divergence"], stored["support"], strict=True)))
        for spec, support in groups:
            mine = (stored["divergence"] == spec) & (stored["support"] == support)
            q, p, delta, acceptance = (
                torch.from_numpy(stored[name][mine]).to(device)
                for name in ("target_probs", "draft_probs", "delta", "acceptance")
            )
            closed = ct.optimal_acceptance(
                q, p, divergence=str(spec), delta=delta, support=str(support)
            )
            error = float((closed.acceptance - acceptance).abs().max())
            yield {
                "vocabulary": q.shape[-1],
                "rows": f"stored programs, support {support}",
                "quantity": f"optimal acceptance, {spec}",
                "largest_difference": error,
                "passed": error <= PROGRAM_TOLERANCE,
            }


def _quantities() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Return what is compared: closed forms, exact laws, and whole verification steps."""
    table: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "optimal_acceptance": lambda q, p: ct.optimal_acceptance(q, p, delta=0.1).acceptance,
        "optimal row": lambda q, p: ct.optimal_acceptance(q, p, delta=0.1).target,
        "certificate gap": lambda q, p: ct.optimal_acceptance(q, p, delta=0.1).gap,
    }
    for spec in CHECKED:
        rule = ct.policy(spec)
        table[f"emitted law, {spec}"] = lambda q, p, rule=rule: ct.emitted_law(rule, q, p)
        table[f"verify_chain, {spec}"] = lambda q, p, rule=rule: _verified(rule, q, p)
    return table


def _verified(rule: ct.Policy, q: Tensor, p: Tensor) -> Tensor:
    """Return the output of one step whose every choice is fixed by coins."""
    ids = p.argmax(-1)[:, None]
    accept = torch.linspace(0.05, 0.95, len(q), dtype=torch.float64, device=q.device)[:, None]
    draw = torch.linspace(0.9, 0.1, len(q), dtype=torch.float64, device=q.device)
    rows = torch.stack([q, q], 1)
    return ct.verify_chain(
        rule, rows, p[:, None], ids, coins=(accept, draw), validate=False
    ).output_token_ids


def _times(device: torch.device, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield median milliseconds of the optimum and of one verification step, float32 rows."""
    vocab, batch, width = VOCABULARIES[-1], args.batch, args.num_draft_tokens
    generator = torch.Generator().manual_seed(args.seed)
    logits = 3 * torch.randn(batch, width + 1, vocab, generator=generator)
    noise = torch.randn(batch, width, vocab, generator=generator)
    q = logits.softmax(-1).to(device)
    p = (logits[:, :width] + noise).softmax(-1).to(device)
    ids = torch.multinomial(p.cpu().flatten(0, 1), 1, generator=generator).reshape(batch, width)
    ids = ids.to(device)
    jobs: dict[str, Callable[[], Any]] = {
        "softmax of the target rows": lambda: q.log().softmax(-1),
        "optimal_acceptance, 1 row": lambda: ct.optimal_acceptance(q[0, 0], p[0, 0], delta=0.1),
    }
    coins = (
        torch.full((batch, width), 0.7, dtype=torch.float64, device=device),
        torch.full((batch,), 0.5, dtype=torch.float64, device=device),
    )
    for spec in CHECKED:
        rule = ct.policy(spec)
        jobs[f"verify_chain, {spec}"] = lambda rule=rule: ct.verify_chain(
            rule, q, p, ids, coins=coins, validate=False
        )
    for name, job in jobs.items():
        yield {
            "job": name,
            "batch": batch,
            "drafted": width,
            "vocabulary": vocab,
            "milliseconds": 1e3 * _median_seconds(job, device, args.repeats),
        }


def _median_seconds(job: Callable[[], Any], device: torch.device, repeats: int) -> float:
    def once() -> float:
        _wait(device)
        started = time.perf_counter()
        job()
        _wait(device)
        return time.perf_counter() - started

    once()  # the first call pays for allocations and kernel loading
    return statistics.median(once() for _ in range(max(3, repeats)))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _decode(device: torch.device, args: argparse.Namespace) -> list[dict[str, Any]]:
    from cactus_theory.decoding import load_pair

    pair = load_pair(args.target, args.draft, device=str(device))
    prompts = load_prompts(args.prompts, args.target)[: args.num_prompts]
    harness = Harness(pair, prompts, args.max_new_tokens, args.seed)
    return measure(harness, POLICIES, widths=[args.num_draft_tokens], repeats=args.repeats)
