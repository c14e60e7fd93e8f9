"""The policies that have a kernel, and the numbers that a kernel needs of a policy."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cactus_theory.kernels.buffers import SplitKnob
from cactus_theory.policies import Policy
from cactus_theory.policies.band import Band
from cactus_theory.policies.cactus import Cactus, CactusExact
from cactus_theory.policies.raised import Lenience, Mixture, Speculative
from cactus_theory.policies.tilt import tilt_of, untilted

# kinds of formulas for the most that a policy may emit of the drafted token, from q_n and p_n
SCALED, MIXED, CACTUS, CACTUS_EXACT, BAND = KINDS = range(5)
# least price: below it the upper edge may exceed e^10, and float32 sums lose the residual
LEAST_PRICE = 0.1
# least budget δ in nats: below it Newton's method starts too far from the root for its steps
LEAST_DELTA = 1e-6


@dataclass(frozen=True)
class KernelPolicy:
    """A policy in the form that a kernel takes: kind of formula in q_n and p_n, knob and tilt.

    The knob is the factor of q_n (SCALED), the draft's weight (MIXED), δ (CACTUS, CACTUS_EXACT) or
    the ratio a/b of the edges (BAND).
    """

    kind: int
    knob: float
    tilt: float = 0.0

    @property
    def high_and_low(self) -> SplitKnob:
        """Return the knob as a sum of two float32 numbers."""
        high = float(np.float32(self.knob))
        return SplitKnob(high, float(np.float32(self.knob - high)))


def has_kernel(policy: Policy, verifier: str = "chain") -> bool:
    """Return whether :func:`verify_logits` has a kernel for a policy under a verifier.

    ``chain`` has kernels for ``speculative``, ``lenience``, ``mixture``, ``cactus``,
    ``cactus_exact`` for KL and ``band`` at a KL price. ``block`` has kernels for ``speculative``,
    and for ``band`` at a KL price with ``per_row``. All other policies run in PyTorch, and so do
    these policies with knobs at the ends of their ranges (δ = ∞, prices below 0.1).

    Examples
    --------
    >>> has_kernel(ct.policy("band:price=2")), has_kernel(ct.policy("typical:epsilon=0.3"))
    (True, False)
    """
    return kernel_policy(policy, verifier) is not None


def kernel_policy(policy: Policy, verifier: str) -> KernelPolicy | None:
    """Return the :class:`KernelPolicy` of a policy; None if the verifier has no kernel for it."""
    of_policy = KERNELS.get(type(policy))  # by exact class: a subclass may change the formula
    kernel = None if of_policy is None else of_policy(untilted(policy))
    if kernel is None or verifier not in ("chain", "block"):
        return None
    band_per_row = isinstance(policy, Band) and not policy.of_path
    if verifier == "block" and not (band_per_row or kernel == KernelPolicy(SCALED, 1.0)):
        return None
    return replace(kernel, tilt=tilt_of(policy))


def _mixture(policy: Mixture) -> KernelPolicy | None:
    return KernelPolicy(MIXED, policy.alpha) if policy.support == "target" else None


def _cactus_exact(policy: CactusExact) -> KernelPolicy | None:
    if policy.delta == 0:
        return KernelPolicy(SCALED, 1.0)
    fits = policy.divergence == "kl" and LEAST_DELTA <= policy.delta < math.inf
    return KernelPolicy(CACTUS_EXACT, policy.delta) if fits else None


def _band(policy: Band) -> KernelPolicy | None:
    if policy.price is None or policy.divergence != "kl" or policy.boxed:
        return None
    if policy.price < LEAST_PRICE:
        return None
    if policy.price == math.inf:
        return KernelPolicy(SCALED, 1.0)
    return KernelPolicy(BAND, math.exp(-1 / policy.price))


KERNELS: dict[type[Policy], Callable[[Any], KernelPolicy | None]] = {
    Speculative: lambda policy: KernelPolicy(SCALED, 1.0),
    Lenience: lambda policy: KernelPolicy(SCALED, 1 / policy.lenience),
    Mixture: _mixture,
    Cactus: lambda policy: KernelPolicy(CACTUS, policy.delta) if policy.delta < math.inf else None,
    CactusExact: _cactus_exact,
    Band: _band,
}
