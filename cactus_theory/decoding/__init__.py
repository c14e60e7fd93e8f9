"""Decode texts speculatively with a target and a draft model from Hugging Face."""

from cactus_theory.decoding.drafters import (
    Drafter,
    Eagle3Drafter,
    EarlyExit,
    FourBit,
    ModelDrafter,
    NGram,
    Siblings,
    SkipLayers,
)
from cactus_theory.decoding.generate import decode as decode
from cactus_theory.decoding.generate import generate as generate
from cactus_theory.decoding.hugging_face import speculative_generate
from cactus_theory.decoding.ledger import Ledger
from cactus_theory.decoding.load import Pair as Pair
from cactus_theory.decoding.load import load_pair, read_drafter
from cactus_theory.decoding.options import Callbacks
from cactus_theory.decoding.options import DecodeOptions as DecodeOptions
from cactus_theory.decoding.result import GenerationResult as GenerationResult
from cactus_theory.decoding.rounds import DecodingError
from cactus_theory.decoding.schedule import Between, ByPosition, Schedule
from cactus_theory.decoding.truncation import Cuts

__all__ = [
    "Between",
    "ByPosition",
    "Callbacks",
    "Cuts",
    "DecodingError",
    "Drafter",
    "Eagle3Drafter",
    "EarlyExit",
    "FourBit",
    "Ledger",
    "ModelDrafter",
    "NGram",
    "Schedule",
    "Siblings",
    "SkipLayers",
    "load_pair",
    "read_drafter",
    "speculative_generate",
]
