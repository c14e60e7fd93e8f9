"""Whether answers are right: torch forms and kernels on the device against float64 on the CPU.

The torch forms are also held against stored programs. Rows are random and extreme, up to a
vocabulary of 151,936.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

import cactus_theory as ct

from ..common.inputs import ROOT
from . import kernel_checks as kernel
from .kernels import has_triton, in_a_process
from .sections import Bench, Job, Message, Note, Row, in_turn

# requests at each vocabulary and kind of kernel: more than 10,000 of each kind together
KERNEL_ROWS = {2: 2000, 7: 4000, 1000: 4000, 32_000: 500, 151_936: 200}
TINY_KERNEL_ROWS = {7: 2}
# requests of each chi-square test, and of the search for tokens that the target excludes
TRIALS, TINY_TRIALS = 200_000, 20
DRAWS, TINY_DRAWS = 10**8, 20
# two float64 evaluations of one formula in different summation orders, V up to 151,936
AGREEMENT = 1e-9
# closed forms against stored answers of convex programs, which are good to about 1e-9
PROGRAM_TOLERANCE = 1e-6
REFERENCE = ROOT / "tests" / "data" / "reference.npz"
VOCABULARIES, TINY_VOCABULARIES = (7, 1000, 32_000, 151_936), (7, 300)
ROWS = 4
CHECKED = (
    "speculative", "typical", "cactus:delta=0.1", "cactus_exact:delta=0.1",
    "band:delta=0.1", "band:price=2",
)  # fmt: skip
BLOCKS = ("speculative", "band:price=2")
WIDTH = 3  # drafted tokens of a verified step
Verify = Callable[..., ct.ChainVerdict]


def rows(bench: Bench) -> Iterator[Message]:
    """Yield check, what it looked at, its margin, passed (None where it could not run)."""
    # the forms last, as float64 on the CPU takes longest
    yield from in_turn([*_kernel_jobs(bench), *_form_jobs(bench)], bench.budget)


def _form_jobs(bench: Bench) -> Iterator[Job]:
    yield "stored programs", partial(against_programs, bench.device)
    for vocab in TINY_VOCABULARIES if bench.tiny else VOCABULARIES:
        check = partial(against_cpu, vocab, bench.device, bench.settings.seed)
        yield f"torch forms at V = {vocab:,}", check


def _kernel_jobs(bench: Bench) -> Iterator[Job]:
    """Yield a job a check of the kernels: all compiled at once, counted, then the cheap ones."""
    device, seed = bench.device, bench.settings.seed
    trials, draws = (TINY_TRIALS, TINY_DRAWS) if bench.tiny else (TRIALS, DRAWS)
    if has_triton():
        yield (
            "kernels compiled",
            lambda: [in_a_process("agreement", bench.tiny, bench.budget.left)],
        )
    if device.type == "cuda":
        yield "kernel_laws", lambda: kernel.kernel_laws(device, TRIALS, seed)
    else:
        why = "interpreted kernels are too slow to count what they emit; their tests do"
        yield "kernel_laws", lambda: [Note("skipped", "kernel_laws", why)]
    yield "kernel_streams", lambda: kernel.kernel_streams(device, trials, seed)
    for vocab, count in (TINY_KERNEL_ROWS if bench.tiny else KERNEL_ROWS).items():
        check = partial(kernel.kernel_agreement, device, count, [vocab], seed)
        yield f"kernels at V = {vocab:,}", check
    yield "zero_tokens", lambda: [kernel.zero_tokens(device, draws, seed)]


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


def against_cpu(vocab: int, device: torch.device, seed: int) -> Iterator[Row]:
    """Yield one row a check: the largest difference between device and CPU, both float64."""
    for family, q, p in families(vocab, seed):
        moved = q.to(device), p.to(device)
        for name, compute in _quantities().items():
            result = compute(*moved).cpu().double()
            exact = compute(q, p).double()
            yield _row(name, vocab, len(q), family, float((result - exact).abs().max()), AGREEMENT)


def against_programs(device: torch.device) -> Iterator[Row]:
    """Yield one row a divergence and support: the distance to the stored programs."""
    with np.load(REFERENCE) as stored:
        groups = sorted(set(zip(stored["divergence"], stored["support"], strict=True)))
        for spec, support in groups:
            in_group = (stored["divergence"] == spec) & (stored["support"] == support)
            q, p, delta, acceptance = (
                torch.from_numpy(stored[name][in_group]).to(device)
                for name in ("target_probs", "draft_probs", "delta", "acceptance")
            )
            closed = ct.optimal_acceptance(
                q, p, divergence=str(spec), delta=delta, support=str(support)
            )
            error = float((closed.acceptance - acceptance).abs().max())
            name, family = f"optimal acceptance, {spec}", f"stored programs, support {support}"
            yield _row(name, q.shape[-1], len(q), family, error, PROGRAM_TOLERANCE)


def _row(name: str, vocab: int, rows: int, family: str, error: float, tolerance: float) -> Row:
    return {
        "check": name,
        "vocabulary": vocab,
        "rows": rows,
        "family": family,
        "largest_difference": error,
        "passed": error <= tolerance,
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
        table[f"verify_chain, {spec}"] = lambda q, p, rule=rule: _verified(
            ct.verify_chain, rule, q, p
        )
    for spec in BLOCKS:
        rule = ct.policy(spec)
        table[f"verify_block, {spec}"] = lambda q, p, rule=rule: _verified(
            ct.verify_block, rule, q, p
        )
    return table


def _verified(verify: Verify, rule: ct.Policy, q: Tensor, p: Tensor) -> Tensor:
    """Return the output of one step whose every choice is fixed by coins."""
    ids = p.argmax(-1, keepdim=True).expand(-1, WIDTH).contiguous()
    coins = torch.linspace(0.05, 0.95, ids.numel(), dtype=torch.float64, device=q.device)
    draw = torch.linspace(0.9, 0.1, len(q), dtype=torch.float64, device=q.device)
    rows = [row[:, None].expand(-1, width, -1) for row, width in ((q, WIDTH + 1), (p, WIDTH))]
    both = coins.view(ids.shape), draw
    return verify(rule, *rows, ids, coins=both, validate=False).output_token_ids
