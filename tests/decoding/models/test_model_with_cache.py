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


VOCAB = 40
# parents of each row's fed tokens: a deep bush, a chain beside a leaf, and a chain longer than a
# window whose slots and positions differ; padded with −1
PARENTS = [
    [-1, 0, 1, 2, 3, 4, 1, 5, -1, -1, -1, -1],
    [-1, 0, 1, 2, 0, -1, -1, -1, -1, -1, -1, -1],
    [-1, -1, -1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
]
COUNTS = [8, 5, 12]
PREFIXES = [4, 9, 1]
TREES = {
    "fast": ("LlamaForCausalLM", None),
    "Llama": ("LlamaForCausalLM", False),
    "GPT2": ("GPT2LMHeadModel", None),
    "Mixtral": ("MixtralForCausalLM", None),
    "Mistral in windows": ("MistralForCausalLM", None),
    "Gemma2 in windows": ("Gemma2ForCausalLM", None),
}
# norms of the Llama-like families are float32 whatever the model is
TOLERANCE = 2e-5


def cached(name, capacity=48, batch=3):
    family, fast = TREES[name]
    config, model_class = families()[family]
    # wide windows would hide nothing; the fast pass takes none
    options = {} if name.endswith("windows") else {"sliding_window": None}
    model = build(config, model_class, **(options if hasattr(config(), "sliding_window") else {}))
    found = CachedModel(model, capacity, batch, fast_forward=fast)
    assert found.fast == (name == "fast")
    assert found.branches
    return found


def random_ids(seed=0):
    source = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (3, 40), generator=source)


def paths(parents, count):
    """Return every fed token's path from its root."""
    found = []
    for node in range(count):
        found.append([node] if parents[node] < 0 else [*found[parents[node]], node])
    return found


def chains(model, prefix, tokens, parents, count):
    """Return the logits at each fed token, its path fed as a whole pass without a cache."""
    rows = []
    for path in paths(parents, count):
        ids = torch.cat([prefix, tokens[path]])[None]
        rows.append(model(input_ids=ids, use_cache=False).logits[0, -1])
    return torch.stack(rows)


@pytest.mark.parametrize("name", TREES)
def test_a_tree_pass_equals_its_chains_and_goes_on_from_the_selected_path(name):
    """Each row keeps another path, feeds more, and gives a fresh pass's logits."""
    kept = [[0, 1, 6], [0, 4], [2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]
    with torch.inference_mode():
        model, ids, tokens = cached(name), random_ids(), random_ids(1)[:, :12]
        model.feed(ids[:, : max(PREFIXES)], PREFIXES, [1, 1, 1])
        found = model.feed(tokens, COUNTS, COUNTS, torch.tensor(PARENTS))
        for row, count in enumerate(COUNTS):
            prefix = ids[row, : PREFIXES[row]]
            own = chains(model.model, prefix, tokens[row], PARENTS[row], count)
            assert (found[row, :count] - own).abs().max() < TOLERANCE * own.abs().max()
        for row, path in enumerate(kept):
            model.select(row, PREFIXES[row], path)
        assert model.lengths == [7, 11, 11]
        more = random_ids(2)[:, :5]
        found = model.feed(more, [5, 3, 4], [5, 3, 4])
        for row, count in enumerate([5, 3, 4]):
            parts = ids[row, : PREFIXES[row]], tokens[row, kept[row]], more[row, :count]
            whole = model.model(input_ids=torch.cat(parts)[None], use_cache=False).logits[0]
            difference = (found[row, :count] - whole[-count:]).abs().max()
            assert difference < TOLERANCE * whole.abs().max()


def test_refuses_what_is_no_tree():
    model = cached("Llama")
    tokens = random_ids()[:, :2]
    for bad in ([0, 0], [-2, 0], [-1, 1]):
        parents = torch.tensor([[-1, 0], bad, [-1, 0]])
        with pytest.raises(ValueError, match="parents: each must be −1 or the index of an earlier"):
            model.feed(tokens, [2, 2, 2], [1, 1, 1], parents)
    with torch.inference_mode():
        model.feed(tokens, [2, 2, 2], [1, 1, 1])
    for path in ([1, 0], [0, 0], [2], [-1]):
        with pytest.raises(ValueError, match=r"path: must ascend within \[0, 2\); got"):
            model.select(0, 0, path)
    with pytest.raises(ValueError, match=r"length: must lie in \[0, 2\]; got 3"):
        model.select(0, 3, [])
    bloom = CachedModel(build(*families()["BloomForCausalLM"]), 8, 1)
    with pytest.raises(ValueError, match="parents: must be None for BloomForCausalLM"):
        bloom.feed(tokens[:1], [2], [1], torch.tensor([[-1, 0]]))


LAYERS = (0, 1, 2)  # embeddings, after the first layer, what the head reads


def assert_states_are_those_of(model, ids, start, states):
    """Compare states of a text from ``start`` on with those of a pass without a cache."""
    output = model(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    for layer, own in states.items():
        assert torch.allclose(own, output.hidden_states[layer][0, start:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("fast", [True, False])
def test_states_move_with_the_keys(tiny, fast):
    model = CachedModel(tiny[0], 12, 2, fast_forward=fast, reads=LAYERS)
    with torch.inference_mode():
        model.feed(torch.tensor([[1, 5, 9], [4, 2, 0]]), [3, 2], [1, 1])
        tree, parents = torch.tensor([[7, 8, 6, 3]] * 2), torch.tensor([[-1, -1, 1, 0]] * 2)
        model.feed(tree, [4, 4], [1, 1], parents)
        model.select(0, 3, [1, 2])
        model.select(1, 2, [0, 3])
        model.keep([1])
        assert list(model.lengths) == [4]
        for _ in range(2):
            states = {own: model.hidden(own, [1], [3])[0] for own in LAYERS}
            assert_states_are_those_of(tiny[0], [4, 2, 7, 3], 1, states)
            for rows in states.values():
                rows.fill_(torch.nan)  # they are copies: nobody else sees this
        model.rollback(0, 3)
        with pytest.raises(ValueError, match="counts: row 0 has states of 3 tokens; got 3 from 1"):
            model.hidden(0, [1], [3])
        with pytest.raises(ValueError, match=r"layer: must be one of those to read \[0, 1, 2\]"):
            model.hidden(3, [0], [1])
