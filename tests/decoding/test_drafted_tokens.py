"""Drafted tokens are exactly what the reported rows and the coins give.

A drafter that samples from rows other than the ones it reports breaks every acceptance rule
and may still pass a test of frequencies.
"""

import pytest
import torch

from cactus_theory.decoding import Cascade, EarlyExit, ModelDrafter, NGram
from cactus_theory.decoding._text import Texts
from cactus_theory.decoding._warp import Warp
from cactus_theory.decoding.drafters import Setting
from cactus_theory.decoding.drafters.early_exit import first_layers
from cactus_theory.decoding.result import Stopwatch
from cactus_theory.verify.draw import pick

WIDTH, VOCAB, ROUNDS = 6, 24, 20
PROMPTS = [[1, 5, 9], [2], [3, 3, 7, 3, 3, 7, 3], [8, 4, 8, 1]]
TEMPERATURE = 0.8


def drafters(target, model):
    """Return every drafter that reports rows, with the model they must come from."""
    return {
        "model": (ModelDrafter(model), model),
        "stopped": (ModelDrafter(model, stop=0.4), model),
        "early exit": (EarlyExit(1), first_layers(target, 1)),
        "cascade": (Cascade(ModelDrafter(model), NGram(2, 2)), model),
    }


def rounds(drafter, target, seed=0):
    """Yield proposals with the coins and the texts they were made for, rows going on unequally."""
    texts = Texts(PROMPTS, 8 * ROUNDS, frozenset(), torch.device("cpu"))
    drafting = drafter.begin(
        Setting(target, texts, Warp(TEMPERATURE, (), [0] * 4), Stopwatch(), WIDTH)
    )
    source = torch.Generator().manual_seed(seed)
    for turn in range(ROUNDS):
        wanted = [WIDTH - (row + turn) % 3 for row in range(len(PROMPTS))]
        coins = torch.rand(len(PROMPTS), WIDTH, generator=source, dtype=torch.float64)
        before = [list(ids) for ids in texts.ids]
        drafted = drafting.propose(wanted, coins)
        yield drafted, coins, before
        last = torch.randint(0, VOCAB, (len(PROMPTS),), generator=source)
        taken = [
            [*ids[: min((turn + row) % 4, count)], token]
            for row, (ids, count, token) in enumerate(
                zip(drafted.token_ids.tolist(), drafted.counts, last.tolist(), strict=True)
            )
        ]
        texts.settle(taken, last)
        drafting.settle()


@pytest.mark.parametrize("name", ["model", "stopped", "early exit", "cascade"])
def test_tokens_are_what_rows_and_coins_give(make_model, make_draft, name):
    target = make_model(layers=2)
    drafter, model = drafters(target, make_draft(target))[name]
    checked = sampled = 0
    with torch.inference_mode():
        for drafted, coins, before in rounds(drafter, target):
            assert drafted.probs is not None
            for row, count in enumerate(drafted.counts):
                rows, ids = drafted.probs[row, :count], drafted.token_ids[row, :count]
                assert torch.equal(pick(rows, coins[row, :count]), ids)
                text = torch.tensor([before[row] + ids.tolist()])
                logits = model(input_ids=text, use_cache=False).logits[0, -count - 1 : -1]
                own = (logits / TEMPERATURE).softmax(-1)
                certain = rows.amax(-1) == 1.0  # the cascade's copies
                assert bool(((rows - own)[~certain].abs() < 1e-5).all())
                checked += count
                sampled += int((~certain).sum())
    assert sampled > 150
    assert (sampled < checked) == (name == "cascade")
