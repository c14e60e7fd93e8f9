"""Acceptance policies. Importing this package registers every policy of the package by name."""

from cactus_theory.policies import (  # noqa: I001  (the order in which they are listed)
    raised as raised,
    cactus as cactus,
    band as band,
    accepted_sets as accepted_sets,
    reshaped as reshaped,
    regret as regret,
)
from cactus_theory.policies.policy import Policy as Policy
from cactus_theory.policies._base_classes import Entrywise, FixedTarget, SharedResidual
from cactus_theory.policies._base_classes import PerProposal as PerProposal
from cactus_theory.policies.claims import Budget as Budget
from cactus_theory.policies.claims import Declaration as Declaration
from cactus_theory.policies.registry import list_policies as list_policies
from cactus_theory.policies.registry import read_policy as read_policy
from cactus_theory.policies.registry import register as register

__all__ = ["Entrywise", "FixedTarget", "SharedResidual"]
