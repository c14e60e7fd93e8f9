"""The policies; importing a policy's file registers it."""

import sys  # noqa: I001  (the order in which they are listed)

from cactus_theory.policies import (  # noqa: F401
    speculative,
    sample_and_match,
    cactus,
    band,
    mentored,
    soft_band,
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
from cactus_theory.policies._base import Policy
from cactus_theory.policies._forms import Entrywise, FixedTarget, PerProposal
from cactus_theory.policies._records import Budget, Decision, Declaration, Residual
from cactus_theory.policies._registry import list_policies, policy, register

# files that went into those of the published forms, by their older names
cactus_exact, typical_exact = cactus, typical
sys.modules |= {f"{__name__}.cactus_exact": cactus, f"{__name__}.typical_exact": typical}

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
