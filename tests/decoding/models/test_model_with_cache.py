"""Both forward passes over the cache must give the logits of a full recomputation."""

import pytest
import torch
import transformers

from cactus_theory.decoding.models import CachedModel
from cactus_theory.decoding.models.cache import RaggedCache, allocate
from cactus_theory.decoding.models.recognised import obstacle
from tests.decoding.models.families import build, families

ROUNDS = [(7, 0), (1, 0), (5, 3), (2, 2), (9, 8), (1, 0), (4, 1), (1, 0)]  # feed, take back


def full_logits(model, text):
    return model(input_ids=text, use_cache=False).logits


def assert_equals_recomputation(model):
    generator = torch.Generator().manual_seed(3)
    cached = CachedModel(model, 64, fast_forward=True)
    text = torch.empty(1, 0, dtype=torch.int64)
    with torch.inference_mode():
        for feed, back in ROUNDS:
            new = torch.randint(0, 24, (1, feed), generator=generator)
            text = torch.cat([text, new], 1)
            logits = cached.feed(new, [feed], [feed])
            full = full_logits(model, text)[:, -feed:]
            assert logits.shape == full.shape
            assert (logits - full).abs().max() < 2e-5
            cached.rollback(0, text.shape[1] - back)
            text = text[:, : text.shape[1] - back]


def family(name, **options):
    config = getattr(transformers, f"{name}Config")(
        vocab_size=24,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **options,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForCausalLM")(config).double().eval()
        with torch.no_grad():  # biases start as zeros and norms as ones: neither would show
            for weight in model.parameters():
                weight.add_(0.05 * torch.randn_like(weight))
    return model


OPTIONS = {
    "Llama": {"attention_bias": True, "mlp_bias": False},
    "Mistral": {"sliding_window": None},
    "Qwen2": {},
    "Qwen3": {},
}


# the library's norms are float32 whatever the model is
@pytest.mark.parametrize("name", OPTIONS)
def test_the_fast_pass_equals_full_recomputation(name):
    assert_equals_recomputation(family(name, **OPTIONS[name]))


@pytest.mark.parametrize("name", OPTIONS)
def test_so_it_does_on_weights_stored_in_half_precision(name):
    assert_equals_recomputation(family(name, **OPTIONS[name]).half().float())


@pytest.mark.parametrize("fast", [False, True])
def test_ragged_rows_equal_each_row_alone(tiny, fast):
    """Rows consume and take back different numbers of tokens; some consume none."""
    model = tiny[0]
    generator = torch.Generator().manual_seed(8)
    batch = CachedModel(model, 40, 5, slack=1, fast_forward=fast)
    texts = [torch.empty(1, 0, dtype=torch.int64) for _ in range(5)]
    with torch.inference_mode():
        for _ in range(7):
            counts = torch.randint(0, 6, (5,), generator=generator).tolist()
            new = torch.randint(0, 24, (5, max(counts)), generator=generator)
            keep = [min(count, 1 + row % 3) for row, count in enumerate(counts)]
            logits = batch.feed(new, counts, keep)
            for row, count in enumerate(counts):
                texts[row] = torch.cat([texts[row], new[row : row + 1, :count]], 1)
                if keep[row]:
                    full = full_logits(model, texts[row])[0, -keep[row] :]
                    assert (logits[row, : keep[row]] - full).abs().max() < 2e-5
                back = max(0, texts[row].shape[1] - row % 4)
                batch.rollback(row, back)
                texts[row] = texts[row][:, :back]
    assert len({len(text[0]) for text in texts}) > 2


@pytest.mark.parametrize("fast", [False, True])
def test_rollback_copies_nothing(tiny, fast):
    model = CachedModel(tiny[0], 16, fast_forward=fast)
    with torch.inference_mode():
        model.feed(torch.arange(6)[None], [6], [1])
        memory = [keys.data_ptr() for keys in model.cache.keys]
        model.rollback(0, 2)
        model.feed(torch.arange(3)[None], [3], [1])
    assert model.lengths == [5]
    assert [keys.data_ptr() for keys in model.cache.keys] == memory


def test_refuses_lengths_it_does_not_hold(tiny):
    cache = RaggedCache(2, 1, 4)
    with pytest.raises(ValueError, match=r"length: must lie in \[0, 0\]; got 1"):
        cache.rollback(0, 1)
    for fast in (False, True):
        model = CachedModel(tiny[0], 4, fast_forward=fast)
        with pytest.raises(ValueError, match="counts: row 0 must feed 0 to 4 tokens, .* got 5"):
            model.feed(torch.arange(5)[None], [5], [1])


def test_refuses_layers_that_cannot_be_rolled_back(make_model):
    model = make_model()
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match="model: every layer .* got 'linear_attention'"):
        allocate(model, 1, 8)


def test_recognises_nothing_that_was_changed(make_model):
    plain = make_model()
    assert obstacle(plain, 64) is None
    adapted = make_model()
    projection = adapted.model.layers[1].self_attn.q_proj

    class Adapted(type(projection)):
        pass

    projection.__class__ = Adapted
    assert obstacle(adapted, 64)
    hooked = make_model()
    hooked.model.layers[0].register_forward_hook(lambda *given: None)
    assert obstacle(hooked, 64)
    gpt = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=24, n_embd=32, n_layer=2, n_head=4)
    )
    assert obstacle(gpt, 64)


def test_the_switch_takes_the_pass_that_is_asked_for(tiny):
    model = tiny[0]
    gpt = build(*families()["GPT2LMHeadModel"])
    assert CachedModel(model, 8).fast
    assert CachedModel(model, 8, fast_forward=True).fast
    assert not CachedModel(model, 8, fast_forward=False).fast
    assert not CachedModel(gpt, 8).fast
    with pytest.raises(ValueError, match="fast_forward: must be None or False here, .*GPT2LMHead"):
        CachedModel(gpt, 8, fast_forward=True)
    near = family("Mistral", sliding_window=5)
    assert CachedModel(near, 5, fast_forward=True).fast
    with pytest.raises(ValueError, match="its sliding window is shorter than the text; got True"):
        CachedModel(near, 6, fast_forward=True)
