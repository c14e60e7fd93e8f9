"""Which policies have a kernel, and the numbers that it needs of them."""

import math
from dataclasses import dataclass

from cactus_theory.policies import Policy
from cactus_theory.policies.band import Band
from cactus_theory.policies.cactus import Cactus
from cactus_theory.policies.cactus_exact import CactusExact
from cactus_theory.policies.distillspec import DistillSpec
from cactus_theory.policies.lenience import Lenience
from cactus_theory.policies.mixture import Mixture
from cactus_theory.policies.speculative import Speculative

# how a rule's ceiling follows from q_n and p_n
SCALED, POWER, MIXED, CACTUS, CACTUS_EXACT, BAND = range(6)
# below this price the band's upper edge may be e^10 and more, and float32 sums lose the residual
LEAST_PRICE = 0.1
# with a smaller budget Newton's start is too far away in units of its root
LEAST_DELTA = 1e-6


@dataclass(frozen=True)
class KernelRule:
    """A policy as a kernel takes it.

    Attributes
    ----------
    kind : how the ceiling follows from q_n and p_n.
    knob : the number in it: a factor of q_n (SCALED), an exponent (POWER), the draft's weight
        (MIXED), δ (CACTUS, CACTUS_EXACT), a/b (BAND).
    """

    kind: int
    knob: float

    @property
    def parts(self) -> tuple[float, float]:
        """Return the knob as a sum of two numbers that float32 holds."""
        high = _float32(self.knob)
        return high, _float32(self.knob - high)


def has_kernel(rule: Policy, verifier: str = "chain") -> bool:
    """Return whether :func:`verify_logits` decides by this policy in a kernel.

    Chain: ``speculative``, ``lenience``, ``distillspec``, ``mixture``, ``cactus``,
    ``cactus_exact`` for KL and ``band`` at a KL price. Block: ``speculative`` and ``band`` at a
    KL price. Knobs at their ends (δ = ∞, prices below 0.1) and all else take the torch path.

    Examples
    --------
    >>> has_kernel(ct.policy("band:price=2")), has_kernel(ct.policy("typical:epsilon=0.3"))
    (True, False)
    """
    return kernel_rule(rule, verifier) is not None


def kernel_rule(rule: Policy, verifier: str) -> KernelRule | None:
    """Return the rule as a kernel takes it, None if it has no kernel."""
    found = _found(rule)
    if found is None or verifier not in ("chain", "block"):
        return None
    if verifier == "block" and not (found.kind == BAND or found == KernelRule(SCALED, 1.0)):
        return None
    return found


def _found(rule: Policy) -> KernelRule | None:
    kind = type(rule)  # a subclass may decide otherwise
    if kind is Speculative:
        return KernelRule(SCALED, 1.0)
    if isinstance(rule, Lenience) and kind is Lenience:
        return KernelRule(SCALED, 1 / rule.lenience)
    if isinstance(rule, DistillSpec) and kind is DistillSpec:
        return _distillspec(rule)
    if isinstance(rule, Mixture) and kind is Mixture:
        return KernelRule(MIXED, rule.alpha) if rule.support == "target" else None
    if isinstance(rule, Cactus) and kind is Cactus:
        return KernelRule(CACTUS, rule.delta) if rule.delta < math.inf else None
    if isinstance(rule, CactusExact) and kind is CactusExact:
        return _cactus_exact(rule)
    if isinstance(rule, Band) and kind is Band:
        return _band(rule)
    return None


def _distillspec(rule: DistillSpec) -> KernelRule:
    if rule.form == "exp":
        return KernelRule(POWER, rule.epsilon)
    return KernelRule(SCALED, 1 / (rule.epsilon if rule.form == "lin" else rule.epsilon**2))


def _cactus_exact(rule: CactusExact) -> KernelRule | None:
    if rule.delta == 0:
        return KernelRule(SCALED, 1.0)
    fits = rule.divergence == "kl" and LEAST_DELTA <= rule.delta < math.inf
    return KernelRule(CACTUS_EXACT, rule.delta) if fits else None


def _band(rule: Band) -> KernelRule | None:
    if rule.price is None or rule.divergence != "kl" or rule.price < LEAST_PRICE:
        return None
    if rule.price == math.inf:
        return KernelRule(SCALED, 1.0)
    return KernelRule(BAND, math.exp(-1 / rule.price))


def _float32(value: float) -> float:
    import numpy as np

    return float(np.float32(value))
