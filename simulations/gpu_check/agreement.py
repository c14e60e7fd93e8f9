"""Whether answers are right: torch forms and kernels on the device against float64 on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from . import forms
from .sections import Bench, Job, Message, Row, in_turn, optional

KERNEL_CHECKS = "simulations.gpu_check.kernel_agreement"
# rows of each vocabulary that the kernels are compared on: more than 10,000 together
KERNEL_ROWS = {2: 2000, 7: 4000, 1000: 4000, 32_000: 500, 151_936: 200}
TINY_KERNEL_ROWS = {7: 6, 33: 6}
# draws of each chi-square test, and of the search for tokens that the target excludes
TRIALS, TINY_TRIALS = 200_000, 300
DRAWS, TINY_DRAWS = 10**8, 300
NOT_THERE = "not there"


def rows(bench: Bench) -> Iterator[Message]:
    """Yield check, what it looked at, its margin, passed (None where it could not run)."""
    yield from in_turn([*_form_jobs(bench), *_kernel_jobs(bench)], bench.budget)


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
    for name in ("kernel_laws", "kernel_streams"):
        yield _kernel_job(name, name, lambda run: run(device, trials, seed))
    for vocab, count in (TINY_KERNEL_ROWS if bench.tiny else KERNEL_ROWS).items():
        yield _kernel_job(
            "kernel_agreement",
            f"kernels at V = {vocab:,}",
            lambda run, vocab=vocab, count=count: run(device, count, [vocab], seed),
        )
    yield _kernel_job("zero_tokens", "zero_tokens", lambda run: run(device, draws, seed))


def _kernel_job(function: str, name: str, call: Callable[..., list[Row]]) -> Job:
    def job() -> list[Row]:
        run = optional(KERNEL_CHECKS, function)
        if run is None:
            return [{"check": name, "passed": None, "note": NOT_THERE}]
        return call(run)

    return name, job
