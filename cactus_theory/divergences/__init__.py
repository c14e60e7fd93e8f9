"""Divergences of an emitted row h from a target row q, each with its geometry.

A new one is a class in one file, decorated with :func:`register_divergence`; see
:class:`Divergence` for what it carries.
"""

from typing import Any

from cactus_theory.divergences.classical import (
    KL,
    Alpha,
    JensenShannon,
    MaxDivergence,
    NeymanChi2,
    PearsonChi2,
    Renyi,
    ReverseKL,
    SquaredHellinger,
    TotalVariation,
)
from cactus_theory.divergences.definition import (
    SAFE_RATIO,
    Divergence,
    FDivergence,
    divergence,
    divergences,
    examples,
    register_divergence,
    registered_divergence,
)

__all__ = [
    "EXAMPLES",
    "KL",
    "NAMES",
    "SAFE_RATIO",
    "Alpha",
    "Divergence",
    "FDivergence",
    "JensenShannon",
    "MaxDivergence",
    "NeymanChi2",
    "PearsonChi2",
    "Renyi",
    "ReverseKL",
    "SquaredHellinger",
    "TotalVariation",
    "divergence",
    "divergences",
    "examples",
    "register_divergence",
    "registered_divergence",
]

NAMES: tuple[str, ...]
EXAMPLES: tuple[str, ...]


def __getattr__(name: str) -> Any:
    """Return NAMES and EXAMPLES as registered at the time of asking."""
    if name == "NAMES":
        return divergences()
    if name == "EXAMPLES":
        return examples()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
