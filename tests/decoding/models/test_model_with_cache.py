"""Both forward passes over the cache must give the logits of a full recomputation."""

import pytest
import torch
import transformers

from cactus_theory.decoding.models import CachedModel
from cactus_theory.decoding.models.cache import RaggedCache, allocate
from tests.decoding.models.families import build, families


def full_logits(model, text):
    return model(input_ids=text, use_cache=False).logits


# options of families that the fast pass takes
OPTIONS = {"Llama": {"attention_bias": True}, "Mistral": {"sliding_window": None}}
OPTIONS |= {"Qwen2": {}, "Qwen3": {}}
PASSES = [(name, True) for name in OPTIONS] + [("Llama", False)]


def family(name, **options):
    kinds = (getattr(transformers, f"{name}{kind}") for kind in ("Config", "ForCausalLM"))
    return build(*kinds, **OPTIONS[name] | options)


# the library's norms are float32 whatever the model is
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("name", "fast"), PASSES)
def test_ragged_rows_equal_each_row_alone(name, fast, half, batch):
    """Rows consume and take back different numbers of tokens; some consume none."""
    model = family(name)
    model = model.half().float() if half else model
    generator = torch.Generator().manual_seed(8)
    cached = CachedModel(model, 64, batch, slack=1, fast_forward=fast)
    texts = [torch.empty(1, 0, dtype=torch.int64) for _ in range(batch)]
    with torch.inference_mode():
        for _ in range(7):
            counts = torch.randint(int(batch == 1), 6, (batch,), generator=generator).tolist()
            new = torch.randint(0, 24, (batch, max(counts)), generator=generator)
            keep = [min(count, 1 + row % 3) for row, count in enumerate(counts)]
            logits = cached.feed(new, counts, keep)
            for row, count in enumerate(counts):
                texts[row] = torch.cat([texts[row], new[row : row + 1, :count]], 1)
                if keep[row]:
                    full = full_logits(model, texts[row])[0, -keep[row] :]
                    assert (logits[row, : keep[row]] - full).abs().max() < 2e-5
                back = max(0, texts[row].shape[1] - (row + batch) % 4)
                cached.rollback(row, back)
                texts[row] = texts[row][:, :back]
    assert len({len(text[0]) for text in texts}) > 2 or batch == 1


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


POSITIONS = 2048
WHOLE = {"fast": ("Llama", True), "library": ("Llama", False), "GPT2": ("GPT2", None)}


@pytest.fixture(scope="module")
def models(make_model):
    config, model_class = families()["GPT2LMHeadModel"]
    gpt = build(config, model_class, n_positions=POSITIONS, max_position_embeddings=POSITIONS)
    return {"Llama": make_model(positions=POSITIONS), "GPT2": gpt}


@pytest.mark.parametrize("name", WHOLE)
def test_cached_logits_equal_a_whole_pass_up_to_the_last_position(models, name):
    """Two rows at different lengths, so that masks are made; pieces of 1 to 211 tokens."""
    own, fast = WHOLE[name]
    model = models[own]
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
