"""How many draft tokens may a speculative sampler accept, and what does it cost in fidelity?"""

from cactus_theory.divergences import divergence, register_divergence
from cactus_theory.emitted import Audit, audit, emitted_law
from cactus_theory.optimum import (
    Frontier,
    OptimalAcceptance,
    PooledAcceptance,
    PooledFrontier,
    frontier,
    optimal_acceptance,
    pooled_acceptance,
    pooled_frontier,
)
from cactus_theory.policies import (
    Budget,
    Declaration,
    FixedTarget,
    PerProposal,
    Policy,
    list_policies,
    policy,
    register,
)
from cactus_theory.policies._custom import rule
from cactus_theory.tuned import TunedSetting, load_tuned
from cactus_theory.verify import ChainVerdict, verify_block, verify_chain

__all__ = [
    "Audit",
    "Budget",
    "ChainVerdict",
    "Declaration",
    "FixedTarget",
    "Frontier",
    "OptimalAcceptance",
    "PerProposal",
    "Policy",
    "PooledAcceptance",
    "PooledFrontier",
    "TunedSetting",
    "audit",
    "divergence",
    "emitted_law",
    "frontier",
    "list_policies",
    "load_tuned",
    "optimal_acceptance",
    "policy",
    "pooled_acceptance",
    "pooled_frontier",
    "register",
    "register_divergence",
    "rule",
    "verify_block",
    "verify_chain",
]
