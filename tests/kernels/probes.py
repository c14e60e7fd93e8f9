"""Kernels that show what others compute on the way."""

import triton
import triton.language as tl

from cactus_theory.kernels._draws import exponential


@triton.jit
def show_noise(bits, out, COUNT: tl.constexpr):
    """Write the noise made of 32-bit numbers, which come as int64."""
    lane = tl.arange(0, COUNT)
    tl.store(out + lane, exponential(tl.load(bits + lane).to(tl.uint32)))
