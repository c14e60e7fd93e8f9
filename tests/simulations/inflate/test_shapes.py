"""What a shape is said to read and multiply is what a model of it holds and does."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from simulations.inflate import SHAPES, Shape, step_cost

transformers = pytest.importorskip("transformers")

SMALL = Shape(32, 2, 4, 2, 16, 48, 40)


def made(shape):
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head,
        tie_word_embeddings=shape.tied,
    )
    config._attn_implementation = "eager"
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_those_of_the_model(name):
    with torch.device("meta"):
        model = made(SHAPES[name])
    assert SHAPES[name].parameters == sum(weight.numel() for weight in model.parameters())


def test_the_named_shapes_have_the_sizes_of_their_names():
    sizes = {name: SHAPES[name].parameters / 1e9 for name in ("8b", "14b", "0.6b")}
    assert sizes == pytest.approx({"8b": 8.22, "14b": 14.77, "0.6b": 0.596}, rel=2e-3)


@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (2, 3)])
def test_operations_are_those_that_are_counted(batch, tokens):
    """The library multiplies whole squares of scores; ours are counted up to the diagonal.

    Some releases count the angles of the positions, a product of their own, and some do not.
    """
    model, counter = made(SMALL), FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(torch.zeros(batch, tokens, dtype=torch.int64))
    above = tokens * (tokens - 1) // 2 * batch * SMALL.layers * SMALL.heads * SMALL.head * 4
    angles = 2 * tokens * SMALL.head // 2
    counted = counter.get_total_flops() - above
    ours = step_cost(SMALL, 0, batch=batch, tokens=tokens).flops
    assert counted - ours in (0, angles)


def test_the_cache_and_the_weights_are_what_is_read():
    read = SMALL.read_weights
    assert read == sum(w.numel() for w in made(SMALL).parameters()) - 40 * 32
    none, some = step_cost(SMALL, 0).bytes, step_cost(SMALL, 10).bytes
    assert none == 2 * (read + 32 + 2 * 2 * 2 * 16)
    assert some - none == 2 * 10 * 2 * 2 * 2 * 16
    rows = step_cost(SMALL, 10, batch=3, tokens=2, width=4).bytes
    assert rows == 4 * (read + 6 * 32 + 3 * 12 * 2 * 2 * 2 * 16)
