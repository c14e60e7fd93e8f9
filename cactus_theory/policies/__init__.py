"""The policies; importing a policy's file registers it."""

from cactus_theory.policies import (  # noqa: F401, I001  (the order in which they are listed)
    speculative,
    sample_and_match,
    cactus,
    band,
    mentored,
    lenience,
    distillspec,
    mixture,
    typical,
    top_k,
    relaxed,
    thresholds,
    mars,
    fuzzy,
    cascade,
    reshaped,
)
from cactus_theory.policies._policy import Policy
from cactus_theory.policies._base_classes import Entrywise, FixedTarget, PerProposal, SharedResidual
from cactus_theory.policies._decisions import Budget, Decision, Declaration, Residual
from cactus_theory.policies._registry import list_policies, policy, register

__all__ = [
    "Budget",
    "Decision",
    "Declaration",
    "Entrywise",
    "FixedTarget",
    "PerProposal",
    "Policy",
    "Residual",
    "SharedResidual",
    "list_policies",
    "policy",
    "register",
]
