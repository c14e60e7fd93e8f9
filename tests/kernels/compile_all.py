"""Compile every kernel for a Hopper GPU, without one: ``python -m tests.kernels.compile_all``.

Prints a line a kernel: registers, bytes of stack (0 unless registers were spilled), and how many
of its loads from memory take 16 bytes at once.
"""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import cactus_theory as ct
from cactus_theory.kernels import _launch, draft_from_logits, logits

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float32: "*fp32", torch.float64: "*fp64", torch.int32: "*i32", torch.int64: "*i64",
    torch.bfloat16: "*bf16", torch.float16: "*fp16",
}  # fmt: skip
CUOBJDUMP = Path(triton.__path__[0]) / "backends" / "nvidia" / "bin" / "cuobjdump"
CHAIN = (
    "speculative", "cactus:delta=0.5", "cactus_exact:delta=0.3", "mixture:alpha=0.3",
    "distillspec:epsilon=0.5,form=exp", "band:price=1",
)  # fmt: skip
_seen: set[Any] = set()


def compile_only(kernel: Any, grid: Any, shared: dict[str, Any], warps: int) -> None:
    """Stand in for the launch of a kernel."""
    signature, constants, aligned = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        name, value = parameter.name, shared[parameter.name]
        if parameter.is_constexpr:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            whole = isinstance(value, torch.Tensor)
            signature[name] = TYPES[value.dtype] if whole else "i32"
            if whole or value % 16 == 0:
                aligned[(place,)] = [["tt.divisibility", 16]]
    key = (kernel.__name__, *signature.items(), *constants.items(), *aligned)
    if key in _seen:
        return
    _seen.add(key)
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    found = triton.compile(source, target=HOPPER, options={"num_warps": warps})
    print(kernel.__name__, *resources(found.asm["cubin"]), wide_loads(found.asm["ptx"]), flush=True)


def resources(cubin: bytes) -> list[str]:
    """Return registers and stack of a compiled kernel, as ``name:number``."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), "-res-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.findall(r"(?:REG|STACK):\d+", printed)


def wide_loads(ptx: str) -> str:
    """Return how many loads take 16 bytes, of how many."""
    wide = len(re.findall(r"ld\.global[^\n]*v4", ptx))
    return f"wide:{wide}/{ptx.count('ld.global')}"


def step(spec: str, verifier: str = "chain", *, certain: bool = False, flat: bool = False) -> None:
    """Compile what one step launches, with flat half-precision rows and other temperatures."""
    batch, width, vocab = 4, 8, 151_936
    dtype = torch.bfloat16 if flat else torch.float32
    target, draft = (torch.empty(batch, k, vocab, dtype=dtype) for k in (width + 1, width))
    ids, numbers = torch.zeros(batch, width, dtype=torch.int64), torch.arange(batch)
    more: dict[str, Any] = {}
    if flat:
        target, draft, ids = target.flatten(0, 1), draft.flatten(0, 1), ids.flatten()
        ends = width * torch.arange(1, batch + 1, dtype=torch.int32)
        more = {"cu_num_draft_tokens": ends, "width": width, "temperature": torch.ones(batch)}
    rows = None if certain else draft
    given = {"seeds": numbers, "positions": numbers, "verifier": verifier, **more}
    logits.verify_logits(ct.policy(spec), target, rows, ids, **given)


def main() -> None:
    """Compile everything."""
    _launch.launch = compile_only
    logits.runs_kernels = lambda device: True
    for spec in CHAIN:
        step(spec)
    for verifier in ("chain", "block"):
        for flat in (False, True):
            step("band:price=1", verifier, flat=flat)
            step("band:price=1", verifier, certain=True, flat=flat)
    step("speculative", "block")
    numbers = torch.arange(4)
    draft_from_logits(torch.empty(4, 300), seeds=numbers, positions=numbers, place=2)


if __name__ == "__main__":
    main()
