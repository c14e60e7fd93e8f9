"""Verification on a device from raw logits, in Triton; needs the extra ``kernels``.

``verify_logits`` is the step, and ``has_kernel`` tells which policies it decides by in a kernel.
Nothing here imports Triton until one is used.
"""

from cactus_theory.kernels.buffers import Workspace
from cactus_theory.kernels.logits import LogitsVerdict as LogitsVerdict
from cactus_theory.kernels.logits import verify_logits
from cactus_theory.kernels.policies import has_kernel

__all__ = ["Workspace", "has_kernel", "verify_logits"]
