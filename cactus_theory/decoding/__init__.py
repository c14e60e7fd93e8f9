"""Decode text with a target and a draft model from Hugging Face."""

from cactus_theory.decoding.load import Pair, load_pair
from cactus_theory.decoding.loop import generate
from cactus_theory.decoding.plain import generate_plain
from cactus_theory.decoding.result import GenerationResult
from cactus_theory.decoding.vocabulary import check_same_vocabulary

__all__ = [
    "GenerationResult",
    "Pair",
    "check_same_vocabulary",
    "generate",
    "generate_plain",
    "load_pair",
]
