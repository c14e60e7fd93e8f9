"""Whether answers are right: torch forms and kernels on the device against float64 on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from . import forms
from .kernels import has_triton, in_a_process
from .sections import Bench, Job, Message, Note, Row, in_turn, optional

KERNEL_CHECKS = "simulations.gpu_check.kernel_agreement"
# requests at each vocabulary and kind of kernel: more than 10,000 of each kind together
KERNEL_ROWS = {2: 2000, 7: 4000, 1000: 4000, 32_000: 500, 151_936: 200}
TINY_KERNEL_ROWS = {7: 2}
# requests of each chi-square test, and of the search for tokens that the target excludes
TRIALS, TINY_TRIALS = 200_000, 20
DRAWS, TINY_DRAWS = 10**8, 20
NOT_THERE = "not there"


def rows(bench: Bench) -> Iterator[Message]:
    """Yield check, what it looked at, its margin, passed (None where it could not run)."""
    # the forms last, as float64 on the CPU takes longest
    jobs = [*_compilation(bench), *_kernel_jobs(bench), *_form_jobs(bench)]
    yield from in_turn(jobs, bench.budget)


def _compilation(bench: Bench) -> Iterator[Job]:
    """Yield what compiles the kernels of all checks at once, counted."""
    if has_triton():
        yield (
            "kernels compiled",
            lambda: [in_a_process("agreement", bench.tiny, bench.budget.left)],
        )


def _form_jobs(bench: Bench) -> Iterator[Job]:
    yield "stored programs", lambda: forms.against_programs(bench.device)
    for vocab in forms.TINY_VOCABULARIES if bench.tiny else forms.VOCABULARIES:
        yield (
            f"torch forms at V = {vocab:,}",
            lambda vocab=vocab: forms.against_cpu(vocab, bench.device, bench.settings.seed),
        )


def _kernel_jobs(bench: Bench) -> Iterator[Job]:
    """Yield a job a check of the kernels, the cheap ones first."""
    device, seed = bench.device, bench.settings.seed
    trials, draws = (TINY_TRIALS, TINY_DRAWS) if bench.tiny else (TRIALS, DRAWS)
    if device.type == "cuda":
        yield _kernel_job("kernel_laws", "kernel_laws", lambda run: run(device, TRIALS, seed))
    else:
        why = "interpreted kernels are too slow to count what they emit; their tests do"
        yield "kernel_laws", lambda: [Note("skipped", "kernel_laws", why)]
    yield _kernel_job("kernel_streams", "kernel_streams", lambda run: run(device, trials, seed))
    for vocab, count in (TINY_KERNEL_ROWS if bench.tiny else KERNEL_ROWS).items():
        yield _kernel_job(
            "kernel_agreement",
            f"kernels at V = {vocab:,}",
            lambda run, vocab=vocab, count=count: run(device, count, [vocab], seed),
        )
    yield _kernel_job("zero_tokens", "zero_tokens", lambda run: run(device, draws, seed))


def _kernel_job(function: str, name: str, call: Callable[..., Any]) -> Job:
    def job() -> Sequence[Row]:
        run = optional(KERNEL_CHECKS, function)
        if run is None:
            return [{"check": name, "passed": None, "note": NOT_THERE}]
        found = call(run)
        return [dict(found)] if isinstance(found, Mapping) else found

    return name, job
