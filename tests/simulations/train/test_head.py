"""The whole command on a tiny chat model, however often it is stopped, and its refusals."""

import argparse
import json

import pytest
import torch

import cactus_theory as ct
from cactus_theory.decoding import load_pair
from simulations.train import fit, samples
from simulations.train.head import add_arguments, run
from tests.chat_model import chat_model, chat_tokenizer
from tests.simulations.train.test_pair import killed_after
from tests.threads import one_thread  # noqa: F401

TINY = (
    "--pieces 2 --piece-texts 6 --prompt-tokens 4 --answer-tokens 12 --draft-vocab 90 --places 2 "
    "--first-steps 3 --steps 2 --overlap-steps 2 --batch-size 4 --dtype float32"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    chat_model().save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return folder


def parse(folder, work, extra="") -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    named = argparse.Namespace(command="train-head", declare=add_arguments)
    line = f"--target {folder} --work-dir {work} --out {work / 'out'} {TINY} {extra}"
    return parser.parse_args(line.split(), named)


def test_a_head_is_the_same_however_often_it_is_stopped(folder, tmp_path, monkeypatch, capsys):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(parse(folder, whole)) == 0
    assert "texts: at most 192 tokens, " in capsys.readouterr().err  # 2 × 6 × 16
    monkeypatch.setattr(fit, "EVERY_S", 0.0)
    for module, name, count in ((samples, "written", 1), (fit, "_step", 2), (fit, "_step", 3)):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, killed_after(count, getattr(module, name)))
            with pytest.raises(KeyboardInterrupt):
                run(parse(folder, parts))
    assert run(parse(folder, parts)) == 0
    for name in ("model.safetensors", "config.json"):
        assert (whole / "out" / name).read_bytes() == (parts / "out" / name).read_bytes()
    text = (whole / "out" / "report.json").read_text()
    report = json.loads(text)
    described = json.loads((whole / "out" / "config.json").read_text())
    # what serves a head finds the target by this name, from any folder
    assert described["speculators_config"]["verifier"]["name_or_path"] == str(folder.resolve())
    assert str(tmp_path) not in text and report["draft_vocab_size"] == 90
    assert len(report["held_out"]["overlap_by_place"]) == 2 and report["held_out"]["texts"] > 0
    assert report["training"]["overlap"]["tokens"] > 2 * 4
    assert report["texts"]["source"] == "the target's own"
    pair = load_pair(folder, whole / "out", dtype="float32")
    result = ct.generate(pair.target, pair.draft, torch.tensor([[1, 70]]), policy="speculative",
                         max_new_tokens=6)  # fmt: skip
    assert result.num_tokens == 6
    with pytest.raises(ValueError, match="journal.jsonl belongs to a run with another seed"):
        run(parse(folder, whole, "--seed 1"))


def test_prompts_and_a_head_to_go_on_from(folder, tmp_path):
    (tmp_path / "prompts.txt").write_text("\n".join(f"what is {n}?" for n in range(9)))
    asked = f"--prompts {tmp_path / 'prompts.txt'} --chat --held-out 0.4"
    assert run(parse(folder, tmp_path / "a", asked)) == 0
    again = f"{asked} --init {tmp_path / 'a' / 'out'} --rate 1e-9"
    assert run(parse(folder, tmp_path / "b", again)) == 0
    one, two = (json.loads((tmp_path / name / "out" / "report.json").read_text()) for name in "ab")
    assert one["texts"]["source"] == "prompts.txt"
    assert one["held_out"]["overlap_by_place"] == pytest.approx(
        two["held_out"]["overlap_by_place"], abs=1e-3
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--pieces 0", "--pieces: must be at least 1; got 0"),
        ("--rate 0", r"--rate: must be in \(0, 1\); got 0.0"),
        ("--places 11", "--places: must be at most --answer-tokens − 2; got 11"),
        ("--corpus a --prompts b", "--corpus: must not be given with --prompts; got a"),
        ("--device meta", "--device: must be cpu, where heads are trained; got meta"),
    ],
)
def test_bad_arguments_are_named(folder, tmp_path, flags, message):
    with pytest.raises(ValueError, match=message):
        run(parse(folder, tmp_path, flags))
