"""Drafts with siblings: greedy texts, batches, rows, refusals."""

from itertools import product

import pytest
import torch
import transformers

from cactus_theory.decoding import (
    Ledger,
    ModelDrafter,
    NGram,
    Siblings,
    generate,
)  # fmt: skip
from cactus_theory.decoding.options import Callbacks
from tests.amounts import amount, some
from tests.decoding.models.families import build, families
from tests.decoding.test_ragged import compare, prompts

TEXTS = torch.tensor([[1, 5, 9], [4, 4, 2], [7, 0, 3]])
MASK = torch.tensor([[1, 1, 1], [0, 1, 1], [0, 0, 1]])
TREE = {"verifier": "tree", "num_draft_tokens": 4}


def drafters(model):
    return {
        "model": ModelDrafter(model),
        "greedy": ModelDrafter(model, greedy=True),
        "stopped": ModelDrafter(model, stop=0.5),
        "ngram": NGram(),
    }


@pytest.mark.parametrize(
    ("name", "fast", "eos"), some(product(("model", "ngram"), (True, False), (None, 3)), 3)
)
def test_greedy_output_is_the_plain_one(tiny, name, fast, eos):
    """A penalty on used tokens makes the text depend on all that is shown: ancestors only."""
    options = {"temperature": 0.0, "max_new_tokens": 20, "eos_token_ids": eos}
    options["logits_processor"] = [transformers.RepetitionPenaltyLogitsProcessor(1.8)]
    plain = generate(tiny[0], None, TEXTS, attention_mask=MASK, **options)
    drafter = Siblings(drafters(tiny[1])[name], 3)
    options |= TREE | {"policy": "band:price=1", "fast_forward": fast, "attention_mask": MASK}
    found = generate(tiny[0], drafter, TEXTS, **options)
    assert found.output_token_ids.equal(plain.output_token_ids)
    assert found.target_calls < plain.target_calls


@pytest.mark.parametrize("name", some(("model", "greedy", "ngram", "stopped"), 2))
def test_a_batch_is_as_alone(tiny, name):
    options = TREE | {"max_new_tokens": 14, "eos_token_ids": 3}
    drafter = Siblings(drafters(tiny[1])[name], 2)
    both = compare(tiny[0], drafter, prompts(), options, "band:price=1")
    assert both.reading.emitted_divergence > 0


def test_without_siblings_it_is_the_path_itself(tiny):
    options = TREE | {"policy": "band:price=1", "max_new_tokens": 12, "seed": 3}
    bare = generate(*tiny, TEXTS, **options)
    found = generate(tiny[0], Siblings(ModelDrafter(tiny[1]), 0), TEXTS, **options)
    assert found.output_token_ids.equal(bare.output_token_ids)
    assert found.row_rounds == bare.row_rounds


def test_what_is_beside_a_path_was_likeliest_before_it_was_drawn(tiny):
    def see(q, draft, texts, before):
        for row in range(len(draft.lengths)):
            for node, children in enumerate(draft.children(row)):
                if children:
                    likeliest = draft.probs[row, node].topk(2).indices.tolist()
                    assert sorted(draft.fixed[row][node]) == sorted(likeliest)
                    tokens = draft.token_ids[row, children]
                    (drawn,) = tokens[draft.sampled[row, children]].tolist()
                    assert sorted(tokens.tolist()) == sorted({drawn, *likeliest})

    options = TREE | {"policy": "band:price=1", "max_new_tokens": amount(10, 24)}
    drafter = Siblings(ModelDrafter(tiny[1]), deterministic=True)
    told = Callbacks(on_rows=see)
    assert generate(tiny[0], drafter, TEXTS, callbacks=told, **options).num_accepted


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


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_cap_holds_beside_siblings(tiny, deterministic):
    """After every token of every text; most of it is spent."""
    drafter, cap = Siblings(ModelDrafter(tiny[1]), 2, deterministic=deterministic), 0.02
    options = TREE | {"policy": Ledger("band:price=0.2", cap), "max_new_tokens": 24}
    spent = generate(tiny[0], drafter, TEXTS, **options).token_charges.cumsum(-1)
    allowed = cap * torch.arange(1, spent.shape[1] + 1)
    assert bool((spent <= allowed * (1 + 1e-9)).all())
    assert float(spent[:, -1].mean()) > cap * spent.shape[1] / 2


def test_generate_of_the_library_and_the_command_line_take_siblings(tiny, monkeypatch):
    from cactus_theory.cli import main
    from cactus_theory.decoding import speculative_generate

    options = {"max_new_tokens": 12, "do_sample": False}
    plain = tiny[0].generate(TEXTS, **options)
    drafter = Siblings(ModelDrafter(tiny[1]), 2)
    options |= {"custom_generate": speculative_generate, "draft_model": drafter}
    found = tiny[0].generate(TEXTS, verifier="tree", return_dict_in_generate=True, **options)
    assert found.sequences.equal(plain) and found.result.target_calls < 12
    seen = []

    class Pair:
        target, draft = tiny
        dtype = "float32"

        class tokenizer:
            chat_template = bos_token_id = None

            def __new__(cls, text, add_special_tokens):
                return {"input_ids": [1, 2]}

    def spy(target, drafter, ids, options):
        seen.append((drafter, options.judge.spec))
        raise ValueError("no decode")

    monkeypatch.setattr("cactus_theory.decoding.decode", spy)
    monkeypatch.setattr("cactus_theory.commands.models.load_pair", lambda *a, **k: Pair)
    line = "generate --target t --draft d --prompt x --policy speculative --siblings 2".split()
    assert main(line) == main([*line, "--verifier", "tree:runs=chain"]) == 2
    assert seen == [(drafter, "tree"), (drafter, "tree:runs=chain")]
