"""One verification step on tensors: drafted tokens in, accepted, recovered and bonus out."""

from cactus_theory.verify.chain import Chain, ChainVerdict, verify_chain
from cactus_theory.verify.contract import (
    Assignment,
    Draft,
    Verdict,
    Verifier,
    find_verifier,
    register_verifier,
    verifiers,
)

__all__ = [
    "Assignment",
    "Chain",
    "ChainVerdict",
    "Draft",
    "Verdict",
    "Verifier",
    "find_verifier",
    "register_verifier",
    "verifiers",
    "verify_chain",
]
