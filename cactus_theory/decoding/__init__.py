"""Decode texts with a target and a draft model from Hugging Face."""

from cactus_theory.decoding.drafters import (
    BlockDrafter,
    Cascade,
    Drafter,
    EarlyExit,
    ModelDrafter,
    NGram,
    RecurrentDrafter,
    Siblings,
)
from cactus_theory.decoding.hugging_face import speculative_generate
from cactus_theory.decoding.ledger import Ledger
from cactus_theory.decoding.load import Pair, load_pair
from cactus_theory.decoding.loop import decode, generate, generate_plain
from cactus_theory.decoding.options import DecodeOptions
from cactus_theory.decoding.readings import Reading
from cactus_theory.decoding.result import GenerationResult, LogProbs
from cactus_theory.decoding.rounds import DecodingError
from cactus_theory.decoding.schedule import Between, ByPosition, Schedule
from cactus_theory.decoding.stream import (
    speculative_stream,
)

__all__ = [
    "Between",
    "BlockDrafter",
    "ByPosition",
    "Cascade",
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
    "generate_plain",
    "load_pair",
    "speculative_generate",
    "speculative_stream",
]
