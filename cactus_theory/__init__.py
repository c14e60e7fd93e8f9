"""How many draft tokens may a speculative sampler accept, and what does it cost in fidelity?"""

from cactus_theory.divergences import divergence, register_divergence
from cactus_theory.emitted import Audit, audit, emitted_law
from cactus_theory.optimum import Frontier, OptimalAcceptance, frontier, optimal_acceptance
from cactus_theory.policies import Budget, Declaration, Policy, policies, policy, register
from cactus_theory.policies._custom import rule
from cactus_theory.verify import ChainVerdict, verify_chain

__all__ = [
    "Audit",
    "Budget",
    "ChainVerdict",
    "Declaration",
    "Frontier",
    "OptimalAcceptance",
    "Policy",
    "audit",
    "divergence",
    "emitted_law",
    "frontier",
    "optimal_acceptance",
    "policies",
    "policy",
    "register",
    "register_divergence",
    "rule",
    "verify_chain",
]
