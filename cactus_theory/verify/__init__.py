"""One verification step on tensors: drafted tokens in, accepted, recovered and bonus out."""

from cactus_theory.verify.block import Block, verify_block
from cactus_theory.verify.chain import Chain, verify_chain
from cactus_theory.verify.contract import (
    VerdictLaw,
    Verifier,
    find_verifier,
    register_verifier,
    verifiers,
)
from cactus_theory.verify.draft import Assignment, Draft, Verdict
from cactus_theory.verify.fly import Fly
from cactus_theory.verify.tree import Tree, verify_tree

__all__ = [
    "Assignment",
    "Block",
    "Chain",
    "Draft",
    "Fly",
    "Tree",
    "Verdict",
    "VerdictLaw",
    "Verifier",
    "find_verifier",
    "register_verifier",
    "verifiers",
    "verify_block",
    "verify_chain",
    "verify_tree",
]
