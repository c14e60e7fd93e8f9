"""How many draft tokens may a speculative sampler accept, and what does it cost in fidelity?

The package computes the best acceptance within a divergence budget, and decodes with policies that
reach it. It has policies, the law that each emits, and verification of drafted tokens.
:mod:`cactus_theory.decoding` decodes texts, :mod:`cactus_theory.verify` is the contract of
verifiers, and :mod:`cactus_theory.kernels` verifies raw logits on a GPU.
:mod:`cactus_theory.traces` logs rows and replays them, :mod:`cactus_theory.tuning` chooses the
setting to decode with, and :mod:`cactus_theory.testing` checks policies, verifiers and drafters of
your own. :mod:`cactus_theory.losses` has losses for training drafts.
:mod:`cactus_theory.policies` and :mod:`cactus_theory.divergences` hold the registries of both.

q is the target's row and p the draft's, (..., V) over V tokens; divergences are in nats. In
examples ``ct`` is this package, ``np`` NumPy and ``torch`` PyTorch. Names of the module that an
example stands in are imported, and ``pair`` is the pair of models in a checkout:
``decoding.load_pair("simulations/pair/target", "simulations/pair/draft")``.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cactus_theory.answer_bounds import EventBounds, confidence_bound
    from cactus_theory.decoding.generate import generate
    from cactus_theory.decoding.truncation import cut_rows
    from cactus_theory.divergences import read_divergence as divergence
    from cactus_theory.divergences import register_divergence
    from cactus_theory.emitted import audit, emitted_law
    from cactus_theory.optimum import (
        optimal_acceptance,
        optimal_regret,
        pooled_acceptance,
        pooled_frontier,
        selection_law,
        tilted_acceptance,
    )
    from cactus_theory.policies import (
        Budget,
        Declaration,
        PerProposal,
        Policy,
        list_policies,
        register,
    )
    from cactus_theory.policies import read_policy as policy
    from cactus_theory.policies.rule import rule
    from cactus_theory.tuned import load_tuned
    from cactus_theory.tuning.compare import compare
    from cactus_theory.tuning.knobs import solve_knob
    from cactus_theory.verify import verify_block, verify_chain, verify_tree

__all__ = [
    "Budget",
    "Declaration",
    "PerProposal",
    "Policy",
    "audit",
    "compare",
    "confidence_bound",
    "cut_rows",
    "divergence",
    "emitted_law",
    "EventBounds",
    "generate",
    "list_policies",
    "load_tuned",
    "optimal_acceptance",
    "optimal_regret",
    "policy",
    "pooled_acceptance",
    "pooled_frontier",
    "register",
    "register_divergence",
    "rule",
    "selection_law",
    "solve_knob",
    "tilted_acceptance",
    "verify_block",
    "verify_chain",
    "verify_tree",
]

# module → its public names, as public=name where they differ; modules load on first use, so that a
# plugin without a policy needs no torch
_NAMES = {
    "answer_bounds": "confidence_bound EventBounds",
    "decoding": "generate",
    "decoding.truncation": "cut_rows",
    "divergences": "divergence=read_divergence register_divergence",
    "emitted": "audit emitted_law",
    "optimum": "optimal_acceptance optimal_regret pooled_acceptance pooled_frontier "
    "selection_law tilted_acceptance",
    "policies": "Budget Declaration PerProposal Policy list_policies policy=read_policy register",
    "policies.rule": "rule",
    "tuned": "load_tuned",
    "tuning.compare": "compare",
    "tuning.knobs": "solve_knob",
    "verify": "verify_block verify_chain verify_tree",
}
_FROM = {
    name: (module, own or name)
    for module, names in _NAMES.items()
    for name, _, own in (word.partition("=") for word in names.split())
}


def __getattr__(name: str) -> Any:
    """Return a public name; its module is imported on first use."""
    if name not in _FROM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, own = _FROM[name]
    value = getattr(importlib.import_module(f"{__name__}.{module}"), own)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, loaded or not."""
    return sorted({*globals(), *__all__})
