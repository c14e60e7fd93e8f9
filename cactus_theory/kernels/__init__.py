"""Verification of drafted tokens from raw logits by Triton kernels; needs the extra ``kernels``.

:func:`verify_logits` verifies one round; :func:`has_kernel` returns whether a policy has a kernel.
Triton is imported when the first kernel runs.
"""

from cactus_theory.kernels.buffers import Workspace
from cactus_theory.kernels.logits import LogitsVerdict as LogitsVerdict
from cactus_theory.kernels.logits import verify_logits
from cactus_theory.kernels.policies import has_kernel

__all__ = ["Workspace", "has_kernel", "verify_logits"]
