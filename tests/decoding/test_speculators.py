"""The format's own library reads heads as this package does: ``make speculators-test``.

It asks for an older transformers, so it has an environment apart; without it this is skipped.
"""

import json
import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from cactus_theory.decoding.drafters.eagle3_head import Eagle3Head
from simulations.train import eagle3 as heads
from simulations.train.eagle3 import Unrolled
from tests.decoding.conftest import random_llama
from tests.decoding.test_eagle3 import write
from tests.threads import one_thread  # noqa: F401

speculators = pytest.importorskip("speculators.models.eagle3")
create_float_mask = pytest.importorskip("speculators.models.attention").create_float_mask
VOCAB, LENGTH, STEPS = 40, 24, 5
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    target = random_llama(vocab=VOCAB, layers=6, pad_token_id=None).float().requires_grad_(False)
    target.save_pretrained(folder := tmp_path_factory.mktemp("target"))
    return target, folder


def exported(folder, out):
    """Do what TRAIN.md says gives a folder the target's embedding, as printed but for names."""
    page = (ROOT / "cactus_theory" / "TRAIN.md").read_text(encoding="utf-8")
    ((code, before, after),) = re.findall(
        r'^```text\n(from speculators.*?pretrained\("(.*?)".*?save_pretrained\("(.*?)"\)\n)```$',
        page, flags=re.S | re.M,
    )  # fmt: skip
    code = code.replace(f'"{before}"', repr(str(folder))).replace(f'"{after}"', repr(str(out)))
    with patch("torch.empty_like", torch.zeros_like):  # what memory holds for a larger model
        exec(code, {})
    return out


def theirs(folder, states, ids):
    """Return the logits (STEPS, units, D) of the library's own model."""
    model = speculators.Eagle3DraftModel.from_pretrained(folder, torch_dtype=torch.float32)
    model.config.transformer_layer_config._attn_implementation = model._attn_impl = "eager"
    model._create_mask_fn = create_float_mask  # that of flex attention needs a compiler
    found = []
    model.lm_head.register_forward_hook(lambda _, inputs, output: found.append(output[0]))
    with torch.no_grad():
        model(states, ids, torch.zeros_like(ids), ttt_steps=STEPS)
    return found


def ours(head, embedding, states, ids):
    """Return the same of an unrolled head: later steps have tokens for fewer units."""
    student, units, memory = Unrolled(head), torch.arange(ids.shape[1])[None], []
    stream, found = head.fc(states), []
    for step in range(STEPS):
        shifted = torch.nn.functional.pad(ids[:, step:], (0, step))
        stream = student.step(embedding[shifted], stream, units, memory)
        found.append(head.core.lm_head(head.core.model.norm(stream))[0])
    return found


@pytest.mark.parametrize("normed", [False, True, None])
def test_logits_are_those_of_its_own_model_over_unrolled_steps(target, tmp_path, normed):
    model, folder = target
    embedding = model.get_input_embeddings().weight
    if normed is None:  # as train-head writes it
        ids = torch.arange(1, VOCAB, 3)
        heads.write(heads.build(model, ids, (1, 2, 3), 0), tmp_path, model, str(folder), STEPS)
        embedding = embedding.half().float()  # as the folder with the embedding has it
    else:
        verifier = {"architectures": ["LlamaForCausalLM"], "name_or_path": str(folder)}
        told = {"algorithm": "eagle3", "verifier": verifier, "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                }  # fmt: skip
        weights = write(tmp_path, VOCAB, [*range(0, VOCAB, 2)], norm_before_residual=normed,
                        speculators_config=told)  # fmt: skip
        embedding = weights["embed_tokens.weight"]
    text = torch.randint(VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    hidden = model(text, output_hidden_states=True).hidden_states
    states = torch.cat([hidden[layer][:, :-1] for layer in (1, 2, 3)], -1)
    found = ours(Eagle3Head.load(tmp_path), embedding, states, text[:, 1:])
    read = exported(tmp_path, tmp_path / "whole") if normed is None else tmp_path
    for step, logits in enumerate(theirs(read, states, text[:, 1:])):
        inside, close = LENGTH - 1 - step, 3e-5 * float(logits.abs().max())
        torch.testing.assert_close(logits[:inside], found[step][:inside], rtol=0, atol=close)


def test_the_folder_with_the_embedding_is_read_here_too(target, tmp_path):
    model, folder = target
    head = heads.build(model, torch.arange(1, VOCAB, 3), (1, 2, 3), 0)
    heads.write(head, tmp_path, model, str(folder), STEPS)
    again = Eagle3Head.load(exported(tmp_path, tmp_path / "whole"))
    own = model.get_input_embeddings().weight.half().float()
    assert not again.shares and torch.equal(again.core.model.embed_tokens.weight, own)


def test_its_configuration_reads_what_is_written(target, tmp_path):
    model, folder = target
    heads.write(heads.build(model, torch.arange(9), (1, 2, 3), 0), tmp_path, model, str(folder), 4)
    config = speculators.Eagle3SpeculatorConfig.from_pretrained(tmp_path)
    told = json.loads((tmp_path / "config.json").read_text())
    assert config.draft_vocab_size == told["draft_vocab_size"] == 9
    assert config.eagle_aux_hidden_state_layer_ids == [1, 2, 3]
    assert config.speculators_config.proposal_methods[0].speculative_tokens == 4
