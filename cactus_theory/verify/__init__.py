"""One verification step on tensors: drafted tokens in, accepted, recovered and bonus out."""

from cactus_theory.verify.chain import ChainVerdict, verify_chain

__all__ = ["ChainVerdict", "verify_chain"]
