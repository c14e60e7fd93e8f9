"""Divergences of an emitted row h from a target row q, as budgets of the best acceptance."""

from cactus_theory.divergences import classical as classical  # registers them
from cactus_theory.divergences.definition import Divergence, FDivergence, list_divergences
from cactus_theory.divergences.definition import read_divergence as read_divergence
from cactus_theory.divergences.definition import register_divergence as register_divergence

__all__ = ["Divergence", "FDivergence", "list_divergences"]
