"""Acceptance rules; importing a rule's file registers it."""

from cactus_theory.policies import speculative, cactus, cactus_exact, band, typical  # noqa: I001
from cactus_theory.policies._base import FixedTarget, Policy, SharedRecovery
from cactus_theory.policies._declaration import Budget, Declaration
from cactus_theory.policies._per_proposal import PerProposal
from cactus_theory.policies._registry import policies, policy, register

__all__ = [
    "Budget",
    "Declaration",
    "FixedTarget",
    "PerProposal",
    "Policy",
    "SharedRecovery",
    "band",
    "cactus",
    "cactus_exact",
    "policies",
    "policy",
    "register",
    "speculative",
    "typical",
]
