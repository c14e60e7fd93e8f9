"""A tree fed in one pass equals its paths fed as chains, and a selected path goes on alone."""

import pytest
import torch

from cactus_theory.decoding.models import CachedModel
from tests.decoding.models.families import build, families

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
MODELS = {
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
    family, fast = MODELS[name]
    config, model_class = families()[family]
    # wide windows would hide nothing; the fast pass takes none
    options = {} if name.endswith("windows") else {"sliding_window": None}
    model = build(config, model_class, **(options if hasattr(config(), "sliding_window") else {}))
    found = CachedModel(model, capacity, batch, fast_forward=fast)
    assert found.fast == (name == "fast")
    assert found.branches
    return found


def texts(seed=0):
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


@pytest.mark.parametrize("name", MODELS)
def test_a_tree_pass_equals_its_chains_and_goes_on_from_the_selected_path(name):
    """Each row keeps another path, feeds more, and gives a fresh pass's logits."""
    kept = [[0, 1, 6], [0, 4], [2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]
    with torch.inference_mode():
        model, ids, tokens = cached(name), texts(), texts(1)[:, :12]
        model.feed(ids[:, : max(PREFIXES)], PREFIXES, [1, 1, 1])
        found = model.feed(tokens, COUNTS, COUNTS, torch.tensor(PARENTS))
        for row, count in enumerate(COUNTS):
            prefix = ids[row, : PREFIXES[row]]
            own = chains(model.model, prefix, tokens[row], PARENTS[row], count)
            assert (found[row, :count] - own).abs().max() < TOLERANCE * own.abs().max()
        for row, path in enumerate(kept):
            model.select(row, PREFIXES[row], path)
        assert model.lengths == [7, 11, 11]
        more = texts(2)[:, :5]
        found = model.feed(more, [5, 3, 4], [5, 3, 4])
        for row, count in enumerate([5, 3, 4]):
            parts = ids[row, : PREFIXES[row]], tokens[row, kept[row]], more[row, :count]
            whole = model.model(input_ids=torch.cat(parts)[None], use_cache=False).logits[0]
            difference = (found[row, :count] - whole[-count:]).abs().max()
            assert difference < TOLERANCE * whole.abs().max()


def test_refuses_what_is_no_tree():
    model = cached("Llama")
    tokens = texts()[:, :2]
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
