"""Drafts as they ship: padded to another size, of a shorter context, quantised: all lossless."""

import copy
import warnings
from pathlib import Path

import pytest
import torch

from cactus_theory.decoding import ModelDrafter, generate, speculative_generate
from cactus_theory.traces import Trace, log_trace, replay
from tests.decoding.conftest import random_llama

PROMPT = torch.tensor([[3, 1, 4], [1, 5, 9]])


def llama(seed: int, vocabulary: int = 24, positions: int = 64):
    return random_llama(vocabulary, 1, positions, seed, pad_token_id=0, bos_token_id=None)


@pytest.fixture(scope="module")
def target():
    return llama(0)


@pytest.mark.parametrize("verifier", ["chain", "block"])
@pytest.mark.parametrize("size", [20, 30])
def test_a_draft_of_another_size_has_the_law_of_its_own_tokens(target, size, verifier) -> None:
    small, options = llama(1, size), {"max_new_tokens": 24, "seed": 5, "verifier": verifier}
    got = generate(target, small, PROMPT, record_rows=True, **options)
    assert got.rows is not None and got.reading.emitted_divergence_per_token < 1e-12
    p = got.rows.draft_probs
    assert p.shape[-1] == 24 and torch.allclose(p.sum(-1), torch.ones_like(p[..., 0]))
    assert size > 24 or not p[..., size:].any()
    if size > 24:  # what is cut is nothing but a smaller softmax
        cut = llama(1, 24)
        cut.load_state_dict({
            name: weight[:24] if name in ("model.embed_tokens.weight", "lm_head.weight") else weight
            for name, weight in small.state_dict().items()
        })  # fmt: skip
        alike = generate(target, cut, PROMPT, **options)
        assert got.output_token_ids.equal(alike.output_token_ids)
    hooked = target.generate(
        PROMPT[:1], custom_generate=speculative_generate, draft_model=small, max_new_tokens=8,
        do_sample=True, policy="speculative",
    )  # fmt: skip
    assert hooked.shape == (1, 11)


def test_a_trace_of_a_padded_draft_replays(target, tmp_path: Path) -> None:
    log_trace(target, llama(1, 20), PROMPT.tolist(), tmp_path, num_draft_tokens=2,
              max_new_tokens=8)  # fmt: skip
    trace = Trace.open(tmp_path)
    assert trace.header.vocab_size == 24
    assert replay(trace, "speculative").divergence_per_token().value < 1e-6


@pytest.mark.parametrize("fast", [True, False])
def test_a_shorter_draft_stops_where_its_positions_end(target, fast) -> None:
    short, long = llama(1, positions=12), llama(1)
    options = {"seed": 3, "num_draft_tokens": 3, "fast_forward": fast}
    got = generate(target, short, PROMPT, max_new_tokens=30, **options)
    assert got.output_token_ids.shape == (2, 30) and got.draft_calls < got.target_calls
    alike = generate(target, long, PROMPT, max_new_tokens=30, **options)
    assert got.output_token_ids[:, :5].equal(alike.output_token_ids[:, :5])
    assert generate(target, short, PROMPT.repeat(1, 5), max_new_tokens=4, seed=1).draft_calls == 0
    greedy = generate(target, ModelDrafter(short), PROMPT, max_new_tokens=30, temperature=0)
    assert greedy.output_token_ids.equal(
        generate(target, None, PROMPT, max_new_tokens=30, temperature=0).output_token_ids
    )


def test_quantised_drafts_are_lossless(target, tmp_path: Path) -> None:
    draft = copy.deepcopy(llama(1)).float()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a later torch has it elsewhere
        int8 = torch.ao.quantization.quantize_dynamic(draft, {torch.nn.Linear}, torch.qint8).eval()
    greedy = generate(target, None, PROMPT, max_new_tokens=12, temperature=0).output_token_ids
    got = generate(target, int8, PROMPT, max_new_tokens=12, seed=1)
    assert got.reading.emitted_divergence_per_token < 1e-12
    same = generate(target, int8, PROMPT, max_new_tokens=12, temperature=0)
    assert same.output_token_ids.equal(greedy)
    log_trace(target, int8, PROMPT.tolist(), tmp_path, num_draft_tokens=2, max_new_tokens=4)
