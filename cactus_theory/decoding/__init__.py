"""Decode texts with a target and a draft model from Hugging Face."""

from cactus_theory.decoding.cuts import Cuts
from cactus_theory.decoding.drafters import (
    Drafter,
    EarlyExit,
    ModelDrafter,
    NGram,
    RecurrentDrafter,
    Siblings,
)
from cactus_theory.decoding.generate import decode, generate
from cactus_theory.decoding.hugging_face import speculative_generate
from cactus_theory.decoding.ledger import Ledger
from cactus_theory.decoding.load import Pair, load_pair
from cactus_theory.decoding.options import Callbacks, DecodeOptions
from cactus_theory.decoding.readings import Reading
from cactus_theory.decoding.result import GenerationResult, LogProbs
from cactus_theory.decoding.rounds import DecodingError
from cactus_theory.decoding.schedule import Between, ByPosition, Schedule

__all__ = [
    "Between",
    "ByPosition",
    "Callbacks",
    "Cuts",
    "DecodeOptions",
    "DecodingError",
    "Drafter",
    "EarlyExit",
    "GenerationResult",
    "Ledger",
    "LogProbs",
    "ModelDrafter",
    "NGram",
    "Pair",
    "Reading",
    "RecurrentDrafter",
    "Schedule",
    "Siblings",
    "decode",
    "generate",
    "load_pair",
    "speculative_generate",
]
