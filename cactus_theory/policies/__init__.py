"""Acceptance rules; importing a rule's file registers it."""

from cactus_theory.policies import (  # noqa: I001  (the order in which rules are listed)
    speculative,
    cactus,
    cactus_exact,
    band,
    lenience,
    distillspec,
    mixture,
    typical,
    typical_exact,
    top_k,
    fuzzy,
    cascade,
    reshaped,
)
from cactus_theory.policies._base import FixedTarget, Policy, SharedRecovery
from cactus_theory.policies._declaration import Budget, Declaration
from cactus_theory.policies._per_proposal import PerProposal
from cactus_theory.policies._registry import list_policies, policy, register

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
    "cascade",
    "distillspec",
    "fuzzy",
    "lenience",
    "list_policies",
    "mixture",
    "policy",
    "register",
    "reshaped",
    "speculative",
    "top_k",
    "typical",
    "typical_exact",
]
