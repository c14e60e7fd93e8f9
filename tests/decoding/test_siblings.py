"""Drafts with siblings: greedy texts, batches, rows, refusals."""

import torch

from cactus_theory.decoding import (
    ModelDrafter,
    NGram,
    Siblings,
    generate,
)  # fmt: skip
from cactus_theory.decoding.options import Callbacks
from tests.decoding.models.families import build, families

TEXTS = torch.tensor([[1, 5, 9], [4, 4, 2], [7, 0, 3]])
TREE = {"verifier": "tree", "num_draft_tokens": 4}


def test_the_default_dtype_of_torch_changes_no_text(tiny):
    def decode():
        drafter = Siblings(ModelDrafter(tiny[1]), 2)
        options = TREE | {"policy": "band:price=1", "max_new_tokens": 8, "seed": [1, 2, 3]}
        return generate(tiny[0], drafter, TEXTS, **options)

    single = decode().output_token_ids
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(decode().output_token_ids, single)
    finally:
        torch.set_default_dtype(torch.float32)


def test_ngrams_offer_what_else_followed():
    ids = torch.tensor([[5, 6, 7, 5, 6, 8, 9, 5, 6, 8, 5, 6]])
    seen = []
    options = TREE | {"policy": "speculative", "max_new_tokens": 4, "meter": False}
    see = Callbacks(on_rows=lambda q, draft, texts, before: seen.append(draft))
    model = build(*families()["LlamaForCausalLM"])
    generate(model, Siblings(NGram(), 2), ids, callbacks=see, **options)
    draft = seen[0]
    assert draft.token_ids[0, : draft.lengths[0]].tolist() == [8, 5, 6, 7, 9]
    assert draft.parents[0, : draft.lengths[0]].tolist() == [-1, 0, 1, -1, 0]
    assert draft.probs is None and not bool(draft.sampled.any())


def test_the_command_line_takes_siblings(tiny, monkeypatch):
    from cactus_theory.cli import main

    drafter, seen = Siblings(ModelDrafter(tiny[1]), 2), []

    class Pair:
        target, draft = tiny
        dtype = "float32"

        class tokenizer:
            chat_template = bos_token_id = None

            def __new__(cls, text, add_special_tokens):
                return {"input_ids": [1, 2]}

    def spy(target, drafter, ids, options):
        seen.append((drafter, options.parsed_verifier.spec))
        raise ValueError("no decode")

    monkeypatch.setattr("cactus_theory.decoding.decode", spy)
    monkeypatch.setattr("cactus_theory.commands.models.load_pair", lambda *a, **k: Pair)
    line = "generate --target t --draft d --prompt x --policy speculative --siblings 2".split()
    assert main(line) == 2
    assert seen == [(drafter, "tree")]
