"""Every bad argument is refused before the first forward pass, by name, rule and value."""

import json
import shutil

import pytest
import torch

from cactus_theory.cli import main
from cactus_theory.decoding import generate, load_pair

PROMPT = torch.tensor([[1, 5, 9]])


class Words:
    def __init__(self, *tokens):
        self.map = {token: index for index, token in enumerate(tokens)}

    def get_vocab(self):
        return self.map


@pytest.mark.parametrize("generator", [5, [5], "x"])
def test_a_generator_is_one_of_torchs(tiny, generator):
    with pytest.raises(TypeError, match="generator: must be a torch.Generator or several; got"):
        generate(*tiny, PROMPT, policy="speculative", max_new_tokens=4, generator=generator)


@pytest.mark.parametrize("command", ["generate", "tune", "expect"])
@pytest.mark.parametrize("count", ["99999999", "0", "1025"])
def test_threads_are_bounded(capsys, monkeypatch, command, count):
    """Millions of them would end the process without a word."""
    monkeypatch.setattr(torch, "set_num_threads", lambda count: pytest.fail(f"{count} threads"))
    known = {"tune": "--trace t --cost-ratio 1 --divergence-per-token 1", "expect": "--trace t"}
    pair = "--target t --draft d --prompt x --policy speculative"
    assert main([command, *known.get(command, pair).split(), "--threads", count]) == 2
    assert "threads: must be " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ids", "kind", "message"),
    [
        ([[1, 2]], TypeError, "input_ids: must be an int64 tensor; got list"),
        (torch.ones(1, 3), TypeError, "got torch.float32"),
        (torch.ones(3, dtype=torch.int64), ValueError, r"shape must be \(B, T\) .* got \(3,\)"),
        (torch.ones(1, 0, dtype=torch.int64), ValueError, r"at least one token; got \(1, 0\)"),
        (torch.tensor([[3, 24]]), ValueError, r"ids must lie in \[0, 24\); got 24"),
        (torch.tensor([[-1, 3]]), ValueError, r"ids must lie in \[0, 24\); got -1"),
    ],
)
def test_refuses_bad_prompts(tiny, ids, kind, message):
    with pytest.raises(kind, match=message):
        generate(*tiny, ids, policy="speculative", max_new_tokens=4)
    with pytest.raises(kind, match=message):
        generate(tiny[0], None, ids, max_new_tokens=4)


def test_respects_the_positions_of_the_target(tiny, make_model):
    short = make_model(positions=16)
    whole = generate(tiny[0], short, PROMPT, policy="speculative", max_new_tokens=13)
    assert whole.num_tokens == 13
    with pytest.raises(ValueError, match=r"the 16 positions of target_model; got 3 \+ 14 = 17"):
        generate(short, tiny[0], PROMPT, policy="speculative", max_new_tokens=14)


def test_refuses_models_that_do_not_belong_together(tiny, make_model):
    with pytest.raises(ValueError, match=r"draft_model: vocabulary .*\(24 tokens\), .*; got 12"):
        generate(tiny[0], make_model(vocab=12), PROMPT, policy="speculative", max_new_tokens=4)
    training = make_model().train()
    with pytest.raises(ValueError, match="draft_model: must be in evaluation mode"):
        generate(tiny[0], training, PROMPT, policy="speculative", max_new_tokens=4)


def save(model, folder, words):
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    model.save_pretrained(folder)
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(words.get_vocab(), unk_token="a"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=raw).save_pretrained(folder)
    return folder


@pytest.fixture
def folders(tmp_path, make_model, make_draft):
    target = make_model(vocab=4, pad_token_id=None, bos_token_id=1, eos_token_id=2)
    words = Words("a", "b", "c", "d")
    return (
        save(target, tmp_path / "target", words),
        save(make_draft(target), tmp_path / "draft", words),
    )


def test_loads_a_pair_quietly(folders, capfd):
    pair = load_pair(*folders, dtype=torch.float64)
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""
    assert pair.target.dtype == torch.float64
    assert not pair.target.training
    result = generate(pair.target, pair.draft, PROMPT % 4, eos_token_ids=(), max_new_tokens=5)
    assert result.num_tokens == 5


def test_says_which_folder_cannot_be_read(folders, tmp_path):
    target, draft = folders
    with pytest.raises(ValueError, match="draft: must be a folder with a config.json, or an id"):
        load_pair(target, tmp_path / "nowhere")
    (draft / "model.safetensors").write_bytes(b"not a tensor")
    with pytest.raises(ValueError, match="draft: files must be readable by transformers"):
        load_pair(target, draft)
    (target / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="target: files must be readable by transformers"):
        load_pair(target, draft)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("acbd", "token 'b' is id 1 in the target and id 2 in the draft"),
        ("abc", "token 'd' is id 3 in the target and missing in the draft"),
        ("abcde", "token 'e' is missing in the target and id 4 in the draft"),
    ],
)
def test_refuses_other_words(folders, tmp_path, make_model, words, said):
    model = make_model(vocab=len(words), pad_token_id=None, bos_token_id=1, eos_token_id=2)
    other = save(model, tmp_path / "other", Words(*words))
    with pytest.raises(ValueError, match=said):
        load_pair(folders[0], other)


def test_refuses_weights_that_leave_holes(folders, tmp_path):
    deeper = shutil.copytree(folders[1], tmp_path / "deeper")
    config = json.loads((deeper / "config.json").read_text())
    (deeper / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ValueError, match="draft: every weight must be present; 'model.lay"):
        load_pair(folders[0], deeper)
