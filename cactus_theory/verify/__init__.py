"""Verify drafted tokens on tensors: which are accepted, and which token follows them.

The decode loop (:mod:`cactus_theory.decoding`), replays of traces and tests use these verifiers.
"""

from cactus_theory.verify.block import Block as Block
from cactus_theory.verify.block import verify_block as verify_block
from cactus_theory.verify.chain import Chain as Chain
from cactus_theory.verify.chain import verify_chain as verify_chain
from cactus_theory.verify.contract import VerdictLaw, Verifier, find_verifier, register_verifier
from cactus_theory.verify.contract import verifiers as verifiers
from cactus_theory.verify.draft import Assignment, Draft, Verdict
from cactus_theory.verify.tree import Tree as Tree
from cactus_theory.verify.tree import verify_tree as verify_tree

__all__ = [
    "Assignment",
    "Draft",
    "Verdict",
    "VerdictLaw",
    "Verifier",
    "find_verifier",
    "register_verifier",
]
