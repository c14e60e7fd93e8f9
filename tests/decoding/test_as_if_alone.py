"""Texts of a batch are those they are alone, in the precision that states so."""

from pathlib import Path

import pytest
import torch

from cactus_theory.decoding import generate, load_pair
from tests.amounts import THOROUGH
from tests.decoding.test_ragged import padded

PAIR = Path(__file__).resolve().parents[2] / "simulations" / "pair"
STARTS = (
    "def f(",
    "import os\n",
    "class A:\n",
    "for i in range(",
    "return x",
    "    self.",
    "try:\n",
)


@pytest.mark.skipif(not THOROUGH, reason="60 texts of the shipped pair; run by make test-thorough")
def test_seeded_float32_texts_of_a_batch_are_those_they_are_alone():
    """60 texts of the shipped pair; in bfloat16 45 of such texts differed, in float32 none."""
    pair = load_pair(PAIR / "target", PAIR / "draft")
    own = [pair.tokenizer(start)["input_ids"] for start in STARTS[:6]]
    ids, shown = padded(own)
    options = {"policy": "band:price=1", "max_new_tokens": 24, "meter": False}
    for first in range(0, 1000, 100):
        seeds = list(range(first, first + len(own)))
        both = generate(pair.target, pair.draft, ids, attention_mask=shown, seed=seeds, **options)
        for row, seed in enumerate(seeds):
            alone = generate(
                pair.target, pair.draft, torch.tensor([own[row]]), seed=seed, **options
            )
            assert torch.equal(alone.output_token_ids[0], both.output_token_ids[row])
