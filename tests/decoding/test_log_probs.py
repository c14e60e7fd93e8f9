"""ln q and ln h of every new token, side by side."""

import pytest
import torch

from cactus_theory.decoding import generate
from tests.decoding.test_ragged import padded, prompts

# float64 models; the library's norms are float32 whatever the model is
CLOSE = 1e-5
ROUNDING = 1e-10
OPTIONS = {"max_new_tokens": 25, "num_draft_tokens": 5, "eos_token_ids": (7, 13, 15)}


def decode(tiny, policy, verifier="block", trial=0, **options):
    ids, mask = padded(prompts(seed=trial))
    given = {"policy": policy, "verifier": verifier, "seed": trial, "log_probs": True} | OPTIONS
    return ids, mask, generate(*tiny, ids, attention_mask=mask, **(given | options))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_ln_q_is_what_the_target_gives_the_text(tiny, temperature):
    ids, mask, result = decode(tiny, "cactus:delta=0.4", "chain", temperature=temperature)
    assert len(set(result.row_lengths)) > 3
    for row, length in enumerate(result.row_lengths):
        prompt, new = ids[row][mask[row].bool()], result.output_token_ids[row, :length]
        text = torch.cat([prompt, new])[None]
        with torch.inference_mode():
            full = (tiny[0](input_ids=text).logits[0] / temperature).log_softmax(-1)
        expected = full[len(prompt) - 1 : -1].gather(-1, new[:, None])[:, 0]
        assert torch.allclose(result.log_probs.target[row, :length], expected, atol=CLOSE)
        assert result.log_probs.target[row, length:].isnan().all()
        assert result.log_probs.emitted[row, length:].isnan().all()


def test_they_need_the_meter_and_are_off_unless_asked_for(tiny):
    ids = torch.tensor([[1, 5, 9]])
    with pytest.raises(ValueError, match="log_probs: needs the meter"):
        generate(*tiny, ids, policy="speculative", max_new_tokens=4, log_probs=True, meter=False)
    assert generate(*tiny, ids, policy="speculative", max_new_tokens=4).log_probs is None
