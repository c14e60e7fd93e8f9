"""The folder that ``make smollm`` makes: weights, tokenizer, template, licence."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from cactus_theory.decoding import generate, load_pair
from simulations.__main__ import main
from simulations.common.inputs import ROOT
from tests.simulations.test_smollm import SPLIT


def test_the_folder_holds_a_whole_model(smollm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((smollm / "config.json").read_text())
    shape = config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]
    assert shape == (30, 576, 49_152)
    assert config["tie_word_embeddings"] and config["max_position_embeddings"] == 8192
    assert json.loads((smollm / "generation_config.json").read_text())["eos_token_id"] == 2
    with safe_open(smollm / "model.safetensors", "pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}
    licence = (smollm / "LICENSE").read_text()
    assert all(words in licence for words in ("HuggingFaceTB", "Apache-2.0", "4-bit"))
    assert main(["smollm", "--out", str(smollm)]) == 0  # nothing is made again
    assert capsys.readouterr().out.endswith("is there\n")


@pytest.mark.parametrize(("text", "pieces"), SPLIT.items())
def test_ids_are_those_of_its_own_tokenizer(text: str, pieces: list[str], pair: Any) -> None:
    """After 17 special tokens come the bytes: those from "!" on in order."""
    ids = pair.tokenizer(text)["input_ids"]
    assert pair.tokenizer.convert_ids_to_tokens(ids) == pieces
    blanks = {"Ġ": 216, "Ċ": 198, "ĉ": 197}
    for piece, token in zip(pieces, ids, strict=True):
        if len(piece) == 1:
            assert token == blanks.get(piece, ord(piece) - ord("!") + 17)
    assert pair.tokenizer.decode(ids) == text


def test_it_answers_a_question(pair: Any) -> None:
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    ids = pair.tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    with torch.inference_mode():
        out = pair.target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False
        )
    answer = pair.tokenizer.decode(out[0, ids.shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


def test_its_head_drafts_and_changes_no_greedy_text(smollm: Path) -> None:
    pair = load_pair(smollm, ROOT / "simulations" / "smollm_head", dtype="float32")
    asked = [{"role": "user", "content": "Name three colours of the rainbow."}]
    ids = pair.tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt",
                                             return_dict=True)["input_ids"]  # fmt: skip
    options = {"max_new_tokens": 24, "temperature": 0.0}
    plain = generate(pair.target, None, ids, policy="speculative", **options)
    drafted = generate(pair.target, pair.draft, ids, policy="speculative", **options)
    assert torch.equal(plain.output_token_ids, drafted.output_token_ids)
    assert drafted.target_calls < plain.target_calls
