"""A cache with rollback must give the logits of a full recomputation."""

import pytest
import torch
import transformers

from cactus_theory.decoding._cache import allocate, rollback
from cactus_theory.decoding._model import CachedModel

ROUNDS = [(7, 0), (1, 0), (5, 3), (2, 2), (9, 8), (1, 0), (4, 1), (1, 0)]  # feed, take back


def random_ids(count, vocab, generator):
    return torch.randint(0, vocab, (1, count), generator=generator)


def compare_with_recomputation(model, vocab, tolerance):
    generator = torch.Generator().manual_seed(3)
    cached = CachedModel(model, 64)
    text = torch.empty(1, 0, dtype=torch.int64)
    with torch.inference_mode():
        for feed, back in ROUNDS:
            new = random_ids(feed, vocab, generator)
            text = torch.cat([text, new], 1)
            logits = cached.feed(new, feed)
            full = model(input_ids=text, use_cache=False).logits[:, -feed:]
            assert logits.shape == full.shape
            assert (logits - full).abs().max() < tolerance
            cached.rollback(text.shape[1] - back)
            text = text[:, : text.shape[1] - back]


def test_equals_full_recomputation_in_float64(tiny):
    compare_with_recomputation(tiny[0], 24, 1e-10)


def test_equals_full_recomputation_on_a_real_model(stories):
    compare_with_recomputation(stories.target, 512, 1e-4)


def test_equals_full_recomputation_with_eager_attention(make_model):
    model = make_model(attn_implementation="eager")  # its softmax is float32
    compare_with_recomputation(model, 24, 1e-4)


def test_equals_full_recomputation_with_sliding_windows():
    config = transformers.MistralConfig(
        vocab_size=24,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=5,
    )
    compare_with_recomputation(transformers.MistralForCausalLM(config).double().eval(), 24, 1e-10)


def test_agrees_with_the_dynamic_cache(tiny):
    target = tiny[0]
    generator = torch.Generator().manual_seed(5)
    dynamic, cached = transformers.DynamicCache(config=target.config), CachedModel(target, 40)
    with torch.inference_mode():
        for count in (6, 1, 4, 1):
            new = random_ids(count, 24, generator)
            theirs = target(input_ids=new, past_key_values=dynamic, use_cache=True).logits
            assert (cached.feed(new, count) - theirs).abs().max() < 1e-10


def test_rollback_copies_nothing(tiny):
    cache = allocate(tiny[0], 16)
    with torch.inference_mode():
        tiny[0](input_ids=torch.arange(6)[None], past_key_values=cache)
        memory = [layer.keys.data_ptr() for layer in cache.layers]
        rollback(cache, 2)
        tiny[0](input_ids=torch.arange(3)[None], past_key_values=cache)
    assert cache.get_seq_length() == 5
    assert [layer.keys.data_ptr() for layer in cache.layers] == memory


def test_refuses_lengths_it_does_not_hold(tiny):
    cache = allocate(tiny[0], 4)
    with pytest.raises(ValueError, match=r"length: must lie in \[0, 0\]; got 1"):
        rollback(cache, 1)
    with (
        torch.inference_mode(),
        pytest.raises(ValueError, match="the cache holds 4 positions; got position 5"),
    ):
        tiny[0](input_ids=torch.arange(5)[None], past_key_values=cache)


def test_refuses_layers_that_cannot_be_rolled_back(make_model):
    model = make_model()
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match="model: every layer .* got 'linear_attention'"):
        allocate(model, 8)
