"""Compile the kernels for a Hopper GPU, which need not be here, and say what each costs (CSV).

``python -m tests.kernels.hopper --out FILE.csv``, with ``--steps`` those of one use.

A variant is what Triton itself would compile for a launch: the types, the constants, which
numbers are 1 or multiples of 16. What is compiled lies in Triton's cache, where a run on a GPU
finds it; so ``make gpu-check`` begins with some of this, on all cores.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import cactus_theory as ct
from cactus_theory.kernels import has_kernel, logits
from cactus_theory.kernels.buffers import Form
from simulations.common.results import provenance, write_csv
from simulations.gpu_check.timings import SHAPES
from simulations.gpu_check.timings import STEPS as TIMED

Row = dict[str, Any]
COMPUTE_CAPABILITY, WARP = 90, 32
# kernels that read a part of each row
STREAMING = ("sum_rows", "band_step", "shortfall", "leftover")
# the kernel that compiles in a second: sums by parts, float64, random numbers
FEW = "judge"

# every kind of kernel, token by token and in blocks
CHAIN = (
    "speculative", "lenience:lenience=0.5", "mixture:alpha=0.3", "cactus:delta=0.5",
    "cactus_exact:delta=0.3", "band:price=2", "band:price=0.5",
)  # fmt: skip
BLOCK = ("speculative", "band:price=2,per_row=True")
RULES = (*((spec, "chain") for spec in CHAIN), *((spec, "block") for spec in BLOCK))
# requests at each vocabulary and kind of kernel: more than 10,000 of each kind together
KERNEL_ROWS = {2: 2000, 7: 4000, 1000: 4000, 32_000: 500, 151_936: 200}
WIDTH = 4  # drafted tokens of a request that is checked
LAWS = (
    ("speculative", "chain"), ("cactus:delta=0.5", "chain"), ("band:price=1", "chain"),
    ("mixture:alpha=0.3", "chain"), ("speculative", "block"),
    ("band:price=1,per_row=True", "block"),
)  # fmt: skip
ZERO_RULES = ("speculative", "cactus:delta=1", "band:price=0.5")


@dataclass(frozen=True)
class StepShape:
    """A verification step: what its launches are compiled for."""

    spec: str
    verifier: str
    batch: int
    width: int
    vocab: int
    dtype: torch.dtype = torch.float32
    deterministic: bool = False
    asked_by: str = ""  # an ``engine`` has a temperature a request, the device ``loop`` lengths
    same: bool = False  # every request has the same rows, of stride 0

    def run(self) -> None:
        """Launch the step's kernels on memory that nobody writes to."""
        batch, width = self.batch, self.width
        target, draft = (self._rows(places) for places in (width + 1, width))
        ids, numbers = torch.zeros(batch, width, dtype=torch.int64), torch.arange(batch)
        extra: dict[str, Any] = {
            "": {}, "engine": {"temperature": torch.ones(batch)}, "loop": {"lengths": numbers},
        }[self.asked_by]  # fmt: skip
        logits.verify_logits(
            ct.policy(self.spec), target, None if self.deterministic else draft, ids,
            seeds=numbers, positions=numbers, verifier=self.verifier, **extra,
        )  # fmt: skip

    def _rows(self, places: int) -> torch.Tensor:
        shape = places, self.vocab
        if self.same:
            return torch.empty(*shape, dtype=self.dtype).expand(self.batch, -1, -1)
        return torch.empty(self.batch, *shape, dtype=self.dtype)


@dataclass(frozen=True)
class Variant:
    """Arguments of ``triton.compile``: a kernel by its module and name, and its inputs."""

    module: str
    name: str
    signature: tuple[tuple[str, Any], ...]  # a group's types are the group
    constants: tuple[tuple[tuple[int, ...], Any], ...]
    attributes: tuple[tuple[tuple[int, ...], tuple[tuple[Any, ...], ...]], ...]
    warps: int

    @property
    def text(self) -> str:
        """Return the constants, and the arguments that are multiples of 16, in a line."""
        kinds = {path: self._at(path) for path, _ in (*self.constants, *self.attributes)}
        constants = [f"{kinds[path][0]}={value}" for path, value in self.constants]
        types = sorted({kind for _, kind in kinds.values() if kind.startswith("*")})
        unaligned = [kinds[path][0] for path, parts in self.attributes
                     if not parts and kinds[path][1].startswith("i")]  # fmt: skip
        return " ".join([*types, *constants, *(f"16∤{name}" for name in unaligned)])

    def _at(self, path: tuple[int, ...]) -> tuple[str, str]:
        """Return the name and type of an argument, or of a part of a group."""
        name, kind = self.signature[path[0]]
        for place in path[1:]:
            name, kind = f"{name}.{kind._fields[place]}", kind[place]
        return name, kind


def agreement_steps(vocabularies: Iterable[int] = KERNEL_ROWS) -> Iterator[StepShape]:
    """Yield the steps that the checks against the closed forms launch."""
    for vocab in vocabularies:
        for spec, verifier in RULES:
            yield StepShape(spec, verifier, 16, WIDTH, vocab)
    for spec, verifier in LAWS:
        yield StepShape(spec, verifier, 16, 2, 4, same=True)
    for spec in ZERO_RULES:
        yield StepShape(spec, "chain", 16, 1, 16, same=True)


def verify_steps() -> Iterator[StepShape]:
    """Yield the steps that the timings of a verification launch."""
    for batch, width, vocab in SHAPES:
        for spec, verifier in TIMED:
            if has_kernel(ct.policy(spec), verifier):
                yield StepShape(spec, verifier, batch, width, vocab, torch.bfloat16)


def engine_steps() -> Iterator[StepShape]:
    """Yield the steps of engines: three dtypes, a vocabulary that 16 does not divide.

    Engines have float32, the device loop what models give. Not among them is float16 at a
    vocabulary that 16 does not divide: there ``shortfall`` spills 16 bytes (Triton 3.6).
    """
    rules = [("speculative", "chain"), ("band:price=1", "chain"), ("cactus:delta=0.5", "chain")]
    rules += [("speculative", "block"), ("band:price=1,per_row=True", "block")]
    types = torch.float32, torch.bfloat16, torch.float16
    shapes = itertools.product(rules, types, (151_936, 50_257), (False, True))
    for (spec, verifier), dtype, vocab, deterministic in shapes:
        by = "engine" if dtype == torch.float32 else "loop"
        if dtype != torch.float16 or vocab % 16 == 0:
            yield StepShape(spec, verifier, 16, 8, vocab, dtype, deterministic, asked_by=by)


STEPS: dict[str, Callable[[], Iterator[StepShape]]] = {
    "agreement": agreement_steps,
    "verify": verify_steps,
    "engines": engine_steps,
    # what agreement launches at the largest vocabulary, which a GPU's first minutes need
    "large": lambda: agreement_steps([max(KERNEL_ROWS)]),
}


def variants(steps: Iterable[StepShape]) -> list[Variant]:
    """Return the variants that steps launch, each once, as Triton specialises them."""
    from triton.runtime.jit import create_function_from_signature

    from cactus_theory.kernels import _launch

    backend, unique = _backend(), {}

    def note(kernel: Any, grid: Any, shared: dict[str, Any], warps: int) -> None:
        arguments = {name: shared[name] for name in kernel.arg_names}
        options = {"num_warps": warps, "enable_fp_fusion": True}
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, kinds, leftover = bind(**arguments, **options)
        _, signature, constants, attributes = kernel._pack_args(
            backend, options | {"debug": False}, bound, kinds, leftover
        )
        hashable = {path: tuple(map(tuple, parts)) for path, parts in attributes.items()}
        variant = Variant(
            kernel.fn.__module__, kernel.fn.__name__, tuple(signature.items()),
            tuple(constants.items()), tuple(hashable.items()), warps,
        )  # fmt: skip
        unique[variant] = None

    originals = _launch.launch, _launch.overlaps, logits.runs_kernels
    _launch.launch = note
    _launch.overlaps = logits.runs_kernels = lambda device: True
    try:
        for step in steps:
            step.run()
    finally:
        _launch.launch, _launch.overlaps, logits.runs_kernels = originals
    return list(unique)


def compiled(variant: Variant) -> Row:
    """Return the cost of one variant: registers, spilled bytes, instructions, wide loads."""
    import triton
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(variant.module), variant.name)
    attributes = {path: [list(part) for part in parts] for path, parts in variant.attributes}
    source = ASTSource(kernel, dict(variant.signature), dict(variant.constants), attributes)
    options = _backend().parse_options({"num_warps": variant.warps, "enable_fp_fusion": True,
                                        "launch_pdl": True, "debug": False})  # fmt: skip
    binary = triton.compile(source, target=_target(), options=options.__dict__)
    return {"kernel": variant.name, "warps": variant.warps, **_cost(binary, variant)} | {
        "variant": variant.text
    }


def _cost(binary: Any, variant: Variant) -> Row:
    """Return the costs; instructions a token of kernels that read each row."""
    part = next(value.part for _, value in variant.constants if isinstance(value, Form))
    cubin = binary.asm["cubin"]
    usage = re.findall(r"(?:REG|STACK):(\d+)", _cuobjdump(cubin, "-res-usage"))
    registers, stack = map(int, usage)
    instructions = re.findall(r"/\*[0-9a-f]{4,}\*/\s+([^;]+);", _cuobjdump(cubin, "-sass"))
    count = sum("NOP" not in line for line in instructions)
    spilled = sum(bool(re.search(r"\b(LDL|STL)\b", line)) for line in instructions)
    a_token = None
    if variant.name in STREAMING:
        a_token = count * WARP * variant.warps / part
    return {
        "registers": registers, "stack_bytes": stack, "spills": spilled, "instructions": count,
        "instructions_per_token": a_token,
        "wide_loads": len(re.findall(r"ld\.global[^\n]*v4", binary.asm["ptx"])),
        "loads": binary.asm["ptx"].count("ld.global"),
    }  # fmt: skip


def _cuobjdump(cubin: bytes, flag: str) -> str:
    """Return the report of cuobjdump, which comes with Triton, on a compiled kernel."""
    import triton

    tool = Path(triton.__path__[0]) / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), flag, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _target() -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", COMPUTE_CAPABILITY, WARP)


def _backend() -> Any:
    from triton.compiler import make_backend

    return make_backend(_target())


def compile_all(variants: Sequence[Variant], jobs: int) -> Iterator[Row]:
    """Yield the cost of each variant as it is done, by ``jobs`` processes."""
    if jobs == 1:
        yield from map(compiled, variants)
        return
    with multiprocessing.get_context("spawn").Pool(min(jobs, len(variants))) as pool:
        yield from pool.imap_unordered(compiled, variants)


def main(arguments: list[str] | None = None) -> int:
    """Compile and write the table; return 1 if a kernel spills registers."""
    import triton

    parser = argparse.ArgumentParser(prog="python -m tests.kernels.hopper", description=__doc__)
    add, all_steps = parser.add_argument, [name for name in STEPS if name != "large"]
    add("--steps", nargs="+", choices=list(STEPS), default=all_steps, help="whose kernels")
    add("--few", action="store_true", help="one variant of one kernel")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    add("--out", type=Path, required=True, metavar="FILE.csv")
    args = parser.parse_args(arguments)
    todo = variants(step for name in args.steps for step in STEPS[name]())
    if args.few:
        todo = [variant for variant in todo if variant.name == FEW][:1]
    rows = sorted(compile_all(todo, args.jobs), key=lambda row: (row["kernel"], row["variant"]))
    named = "" if args.steps == all_steps else f" --steps {' '.join(args.steps)}"
    about = provenance(f"{parser.prog}{named}{' --few' * args.few}")
    about |= {"triton": triton.__version__, "target": f"sm_{COMPUTE_CAPABILITY}"}
    write_csv(args.out, rows, about)
    worst = max(row["registers"] for row in rows)
    spilled = sum(row["stack_bytes"] > 0 or row["spills"] > 0 for row in rows)
    print(f"{len(rows)} variants, {spilled} spill, at most {worst} registers: {args.out}")
    return int(spilled > 0)


if __name__ == "__main__":
    sys.exit(main())
