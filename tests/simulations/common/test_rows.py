import pytest
import torch

from simulations.common.inputs import log_rows, next_token_probs, sample

transformers = pytest.importorskip("transformers")


def tiny(seed, vocab=23):
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        eos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return transformers.LlamaForCausalLM(config).eval()


def test_rows_are_those_of_the_sampled_text():
    target, draft = tiny(0), tiny(1)
    q, p = log_rows(target, draft, [[1, 2, 3], [4]], 5, seed=7)
    assert q.shape == p.shape == (10, 23) and q.dtype == p.dtype == torch.float64
    torch.testing.assert_close(q.sum(-1), torch.ones(10, dtype=torch.float64))
    with torch.inference_mode():
        text = sample(target, [1, 2, 3], 5, torch.Generator().manual_seed(7))
        assert len(text) == 8
        torch.testing.assert_close(q[:5], next_token_probs(target, text, 23)[2:7])
        torch.testing.assert_close(p[:5], next_token_probs(draft, text, 23)[2:7])


@pytest.mark.parametrize(
    "prompts, tokens, vocab, message",
    [
        ([], 3, 23, "prompts_ids"),
        ([[1], []], 3, 23, "prompts_ids"),
        ([[1]], 0, 23, "tokens_each: must be from 1 to 31; got 0"),
        ([[1]], 32, 23, "tokens_each"),
        ([[1]], 3, 46, r"that of target_model \(23 tokens\), up to padding; got 46"),
    ],
)
def test_bad_arguments_are_named(prompts, tokens, vocab, message):
    with pytest.raises(ValueError, match=message):
        log_rows(tiny(0), tiny(1, vocab), prompts, tokens, seed=0)
