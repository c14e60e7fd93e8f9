"""Small models: random Llama pairs, built here."""

import copy

import pytest
import torch

from tests.threads import one_thread  # noqa: F401

transformers = pytest.importorskip("transformers")


def random_llama(vocab=24, layers=2, positions=128, seed=0, dtype=torch.float64, **options):
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        **{"eos_token_id": None} | options,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(config).to(dtype).eval()
        with torch.no_grad():  # spread the logits, or every row would be nearly uniform
            model.lm_head.weight.mul_(18)
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight.mul_(12)
    return model


def disturbed(model, noise=0.25, seed=1):
    """Return a copy with relative noise on every weight: a draft that is often right."""
    draft = copy.deepcopy(model)
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.mul_(1 + noise * torch.randn(weight.shape, generator=source))
    return draft


@pytest.fixture(scope="session")
def make_model():
    return random_llama


@pytest.fixture(scope="session")
def make_draft():
    return disturbed


@pytest.fixture(scope="session")
def tiny():
    target = random_llama()
    return target, disturbed(target)
