"""Texts of 2,048 positions, up to the model's last, against the library's pass as a whole."""

import pytest
import torch

from cactus_theory.decoding.models import CachedModel

POSITIONS = 2048
PASSES = {"fast": ("Llama", True), "library": ("Llama", False), "GPT2": ("GPT2", None)}


@pytest.fixture(scope="module")
def models(make_model):
    from tests.decoding.models.families import build, families

    config, model_class = families()["GPT2LMHeadModel"]
    gpt = build(config, model_class, n_positions=POSITIONS, max_position_embeddings=POSITIONS)
    return {"Llama": make_model(positions=POSITIONS), "GPT2": gpt}


@pytest.mark.parametrize("name", PASSES)
def test_cached_logits_equal_a_whole_pass_up_to_the_last_position(models, name):
    """Two rows at different lengths, so that masks are made; pieces of 1 to 211 tokens."""
    family, fast = PASSES[name]
    model = models[family]
    source = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 24, (2, POSITIONS), generator=source)
    cached = CachedModel(model, POSITIONS, 2, fast_forward=fast)
    worst = 0.0
    with torch.inference_mode():
        whole = model(input_ids=ids, use_cache=False).logits
        while min(cached.lengths) < POSITIONS:
            sizes = torch.randint(1, 212, (2,), generator=source).tolist()
            counts = [
                min(size, POSITIONS - n) for size, n in zip(sizes, cached.lengths, strict=True)
            ]
            fed = torch.zeros(2, max(counts), dtype=torch.int64)
            for row, (start, count) in enumerate(zip(cached.lengths, counts, strict=True)):
                fed[row, :count] = ids[row, start : start + count]
            logits = cached.feed(fed, counts, counts)
            for row, (end, count) in enumerate(zip(cached.lengths, counts, strict=True)):
                difference = logits[row, :count] - whole[row, end - count : end]
                worst = max([worst, *difference.abs().amax(-1).tolist()])
    assert worst < 2e-5 * float(whole.abs().max())
