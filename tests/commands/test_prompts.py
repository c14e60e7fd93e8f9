"""Prompts as users have them: read by one reader, rendered by the template, answered as text."""

import json
from pathlib import Path

import pytest
import torch

import cactus_theory as ct
from cactus_theory.cli import main
from simulations.__main__ import main as simulate
from tests.amounts import THOROUGH
from tests.decoding.conftest import random_llama

WORDS = ("▁Tom", "▁and", "▁Tim", "▁ran", "▁home")
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.content == 'odd' %}{{ raise_exception('odd') }}"
    "{% endif %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tokenizer(template: str | None):
    """Return a tokenizer as Llama's: a start token is added, blanks are part of a word."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, processors
    from tokenizers import pre_tokenizers as splits
    from transformers import PreTrainedTokenizerFast

    ids = {word: place for place, word in enumerate(["<unk>", "<s>", "</s>", *ROLES, *WORDS])}
    built = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    built.normalizer = normalizers.Replace(Regex("^(?! )| "), "▁")
    built.pre_tokenizer = splits.Split(Regex("(?=▁)"), "isolated")
    built.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    built.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=built, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        additional_special_tokens=list(ROLES), chat_template=template,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """Return folders of one model whose tokenizer has a template, and has none."""
    model, places = random_llama(3 + len(ROLES) + len(WORDS), dtype=torch.float32), {}
    for name, template in (("chat", TEMPLATE), ("plain", None)):
        places[name] = str(tmp_path_factory.mktemp(name))
        model.save_pretrained(places[name])
        tokenizer(template).save_pretrained(places[name])
    return places


def written(folder: Path, *lines: dict | str) -> str:
    path = folder / "asked.jsonl"
    path.write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    )
    return str(path)


def chat(*contents, **more) -> dict:
    roles = ("user", "assistant")
    turns = [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]
    return {"messages": turns} | more


REFUSED = {
    "two prompts": ({"prompt": "x", "text": "y"}, "prompt, text; got ['prompt', 'text']"),
    "no prompt": ({"id": 1, "conversations": []}, "got ['id']"),
    "an array": ('[{"prompt": "Tom"}]', "line 1 of asked.jsonl must begin a JSON object"),
    "a role": ({"messages": [{"role": "tool", "content": "x"}]}, "got 'tool'"),
    "parts": (chat([{"type": "text", "text": "Tom"}]), "a text under 'content'; got [{'type'"),
    "a call": ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "'tool_calls'"),
    "an answer": (chat("Tom", "Tim"), "must end with a message of the user"),
    "no text": (chat(""), "must hold a text under 'content'"),
    "tools": ({"prompt": "Tom", "tools": [{"name": "x"}]}, "a message); got 'tools'"),
    "turns": ({"turns": [{"role": "user"}]}, "a text under 'turns'"),
}  # fmt: skip


def commands(path: str, folder: Path, target: str, draft: str) -> dict[str, list[str]]:
    """Return each command that reads prompts, as small as it goes."""
    models = ["--target", target, "--draft", draft, "--prompts", path]
    small = [*models, "--max-new-tokens", "4", "--out"]
    return {
        "generate": ["generate", *models, "--max-new-tokens", "4"],
        "tune": ["tune", *models, "--nats", "0.1", "--max-new-tokens", "4",
                 "--cycles", "8", "--num-draft-tokens", "1",
                 "--policy", "speculative", "--work", str(folder / "tune")],
        "expect": ["expect", *models, "--max-new-tokens", "4", "--cycles", "8"],
        "trace": ["trace", *small, str(folder / "trace"), "--cycles", "4",
                  "--num-draft-tokens", "1"],
        "throughput": ["throughput", *small, str(folder / "throughput"), "--policy",
                       "speculative", "--num-draft-tokens", "1", "--batch", "1", "--repeats", "1",
                       "--metered", "1", "--baselines", "plain"],
        "answers": ["answers", *small, str(folder / "answers"), "--num-draft-tokens", "1"],
    }  # fmt: skip


def run(command: list[str], *more: str) -> int:
    ours = command[0] in ("generate", "tune", "expect", "trace")
    return (main if ours else simulate)([*command, *more])


NAMES = tuple(commands("", Path(), "", ""))


@pytest.mark.parametrize("line", REFUSED)
def test_a_line_that_is_no_prompt_is_named(tmp_path, capsys, line) -> None:
    content, said = REFUSED[line]
    before = [{"prompt": "Tom"}] if isinstance(content, dict) else []
    path = written(tmp_path, *before, content)
    assert main(["generate", "--target", "no", "--prompts", path]) == 2
    err = capsys.readouterr().err
    assert said in err and f"--prompts: line {1 + len(before)} of asked.jsonl" in err


@pytest.mark.parametrize("name", NAMES)
def test_every_command_reads_prompts_before_models(tmp_path, capsys, name) -> None:
    path = written(tmp_path, chat("Tom", "Tim"))
    assert run(commands(path, tmp_path, "no", "ngram")[name]) == 2
    assert "must end with a message of the user" in capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES if THOROUGH else ("generate", "trace", "throughput"))
def test_every_command_renders_chats_and_drafts_by_name(tmp_path, capsys, folders, name) -> None:
    lines = [
        chat("Tom", kind="a", note=None),
        {"turns": ["Tim", "ran"]},
    ]
    path = written(tmp_path, *lines * 3)
    asked = commands(path, tmp_path, folders["chat"], "ngram")[name]
    # of expect too few texts have a draft
    assert run(asked, "--chat", "--show-prompt") == (3 if name == "expect" else 0)
    err = capsys.readouterr().err
    assert (
        err.count("prompts: the first prompt, 5 tokens: '<s><|user|>Tom<|end|><|assistant|>'") == 1
    )
    assert err.count("3 of 6 prompts have several turns of a user: the first is taken") == 1
    assert err.count("columns beside the prompts, which no model reads: kind") == 1


@pytest.mark.parametrize(
    ("flags", "line", "read"),
    [
        ((), {"text": "<s> Tom"}, "2 tokens: '<s> Tom'"),  # one start token, typed or not
        ((), {"question": "Tom"}, "2 tokens: 'Tom'"),
        (
            ("--chat", "--system", "Tim"),
            {"prompt": "Tom"},
            "8 tokens: '<s><|system|>Tim<|end|><|us",
        ),
        (("--system", "Tim"), chat("Tom", "Tim", "ran"), "14 tokens: '<s><|system|>Tim<|end|><|us"),
    ],
)
def test_a_prompt_is_read_with_one_start_token(
    tmp_path, capsys, folders, flags, line, read
) -> None:
    asked = ["generate", "--target", folders["chat"], "--prompts", written(tmp_path, line)]
    assert main([*asked, *flags, "--max-new-tokens", "1", "--show-prompt"]) == 0
    err = capsys.readouterr().err
    assert f"prompts: the first prompt, {read}" in err
    assert ("chat template is not applied" in err) == (not flags)


def test_chats_need_a_template_that_takes_them(tmp_path, capsys, folders) -> None:
    for folder, content, said in (
        ("plain", "Tom", "line 1 of asked.jsonl needs a chat template; the target's tokenizer has"),
        ("chat", "odd", "line 1 of asked.jsonl must be a chat that the template takes; odd"),
    ):
        path = written(tmp_path, chat(content))
        assert main(["generate", "--target", folders[folder], "--prompts", path]) == 2
        assert said in capsys.readouterr().err


def test_a_file_is_answered_in_json_lines(tmp_path, capsys, folders) -> None:
    path = written(tmp_path, {"prompt": "Tom", "id": 7}, {"prompt": "Tim and"})
    asked = ["generate", "--target", folders["plain"], "--max-new-tokens", "8", "--seed", "3"]
    assert main([*asked, "--draft", "ngram", "--prompts", path]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["prompt"], first["columns"], second["columns"]) == ("Tom", {"id": 7}, {})
    assert first["policy"] == "speculative" and first["num_tokens"] == 8 and first["text"][0] == " "
    again = ["--draft", "ngram", "--prompt", "Tim and", "--json", "--seed", "4"]
    assert main([*asked, *again]) == 0  # prompt i takes the seed plus i
    assert json.loads(capsys.readouterr().out)["text"] == second["text"]
    assert main([*asked, "--prompts", path, "--json"]) == 2
    assert "must be given with --prompt" in capsys.readouterr().err


def test_a_text_keeps_its_blank(capsys, folders) -> None:
    asked = ["generate", "--target", folders["plain"], "--prompt", "Tom", "--max-new-tokens", "9"]
    texts = []
    for more in ((), ("--draft", "none"), ("--json",)):
        assert main([*asked, *more]) == 0
        texts.append(capsys.readouterr().out.rstrip("\n"))
    assert texts[0] == texts[1] and texts[0].startswith("Tom ")
    answer = json.loads(texts[2])
    assert "Tom" + answer["text"] == texts[0] and answer["policy"] == "plain"  # no draft


def test_python_takes_drafts_by_name_and_one_table_of_defaults() -> None:
    from inspect import signature

    from cactus_theory.decoding import EarlyExit, NGram, speculative_generate

    model, ids = random_llama(), torch.tensor([[5, 6, 7, 5, 6]])
    for name, drafter in (("ngram:longest=2", NGram(2)), ("exit:1", EarlyExit(1))):
        outputs = [ct.generate(model, draft, ids, max_new_tokens=9) for draft in (name, drafter)]
        assert outputs[0].output_token_ids.tolist() == outputs[1].output_token_ids.tolist()
        assert outputs[0].draft_calls == outputs[1].draft_calls
    with pytest.raises(ValueError, match="ngram, ngram:longest=4, exit:20 .*; got 'ngrm'"):
        ct.generate(model, "ngrm", ids, max_new_tokens=9)
    usual = [signature(door).parameters for door in (ct.generate, speculative_generate)]
    assert usual[0]["num_draft_tokens"].default == usual[1]["num_draft_tokens"].default == 4


def test_a_text_ends_where_its_model_says_unless_told_otherwise() -> None:
    model, ids = random_llama(), torch.tensor([[5, 6, 7]])
    whole = ct.generate(model, None, ids, max_new_tokens=20).output_token_ids[0].tolist()
    model.generation_config.eos_token_id = [1, whole[4]]
    ended = ct.generate(model, None, ids, max_new_tokens=20)
    assert ended.output_token_ids[0].tolist() == whole[: whole.index(whole[4]) + 1]
    for ends, expected in (((), whole), (whole[0], whole[:1])):
        other = ct.generate(model, None, ids, max_new_tokens=20, eos_token_ids=ends)
        assert other.output_token_ids[0].tolist() == expected
