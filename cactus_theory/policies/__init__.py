"""The policies; importing a policy's file registers it."""

from cactus_theory.policies import (  # noqa: I001  (the order in which they are listed)
    speculative,
    sample_and_match,
    cactus,
    cactus_exact,
    band,
    mentored,
    soft_band,
    lenience,
    distillspec,
    mixture,
    typical,
    typical_exact,
    top_k,
    relaxed,
    thresholds,
    mars,
    fuzzy,
    cascade,
    reshaped,
)
from cactus_theory.policies._base import FixedTarget, Policy
from cactus_theory.policies._declaration import Budget, Declaration
from cactus_theory.policies._forms import Entrywise
from cactus_theory.policies._per_proposal import PerProposal
from cactus_theory.policies._registry import list_policies, policy, register
from cactus_theory.policies._path import Decision, Residual

__all__ = [
    "Budget",
    "Decision",
    "Declaration",
    "Entrywise",
    "FixedTarget",
    "PerProposal",
    "Policy",
    "Residual",
    "band",
    "cactus",
    "cactus_exact",
    "cascade",
    "distillspec",
    "fuzzy",
    "lenience",
    "list_policies",
    "mars",
    "mentored",
    "mixture",
    "policy",
    "register",
    "relaxed",
    "reshaped",
    "sample_and_match",
    "soft_band",
    "speculative",
    "thresholds",
    "top_k",
    "typical",
    "typical_exact",
]
