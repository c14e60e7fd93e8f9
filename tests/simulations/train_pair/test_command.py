"""The whole command at tiny size, and its refusals."""

import argparse
import itertools
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from simulations.train_pair import train
from simulations.train_pair.command import add_arguments, run
from simulations.train_pair.heads import RecurrentHead

TINY = (
    "--vocab-size 300 --target-layers 2 --target-width 32 --target-head-size 32 "
    "--draft-width 32 --steps 6 --draft-steps 4 --distil-steps 4 "
    "--overlap-steps 4 --pool-chunks 2 --pool-rows 4 --batch-size 4 --length 64 --overlap-rows 32"
)


def parse(line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    named = argparse.Namespace(command="train-pair", declare=add_arguments)
    return parser.parse_args(line.split(), named)


def tiny(corpus_folder, work, extra: str = "") -> argparse.Namespace:
    folders = f"--corpus {corpus_folder} --work-dir {work} --out {work / 'out'}"
    return parse(f"{folders} {TINY} {extra}")


@pytest.fixture(scope="module")
def first(corpus_folder, tmp_path_factory):
    work = tmp_path_factory.mktemp("first")
    assert run(tiny(corpus_folder, work)) == 0
    return work


def test_pair_is_complete_and_loads(first):
    for name in ("target", "draft"):
        folder = first / "out" / name
        assert {p.name for p in folder.iterdir()} == {
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        }
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ids = AutoTokenizer.from_pretrained(folder)("def alpha", return_tensors="pt")
        out = model.generate(**ids, max_new_tokens=4, do_sample=False)
        assert out.shape[1] <= ids["input_ids"].shape[1] + 4
    texts = [(first / "out" / m / "tokenizer.json").read_bytes() for m in ("target", "draft")]
    assert texts[0] == texts[1]


def test_report_is_complete_and_names_no_folder(first, corpus_folder):
    text = (first / "out" / "report.json").read_text()
    report = json.loads(text)
    asked = f"--corpus {corpus_folder.name} {TINY}"  # the whole command, of paths names
    assert report["command"].startswith("python -m simulations train-pair --corpus ")
    assert sorted(report["command"].split()[4:]) == sorted(asked.split())
    own = report["corpus"]
    assert own["documents"] == 80 and len(own["sha256"]) == 64
    assert own["source"] == f"--corpus {corpus_folder.name}"  # not the standard library
    assert report["licence"].startswith("Unknown: the weights are made from")
    assert (
        report["trained"] == "target on the corpus; draft on the corpus, then on the target's law"
    )
    assert report["training"]["target"]["tokens"] == 6 * 4 * 64
    assert report["overlap_on_target_samples"]["positions"] == 32 * (64 - 32)
    for folder in (first, corpus_folder):
        assert str(folder) not in text


def test_finished_work_is_published_again_without_training(first, corpus_folder):
    weights = first / "out" / "draft" / "model.safetensors"
    before = weights.read_bytes()
    weights.unlink()
    assert run(tiny(corpus_folder, first)) == 0
    assert weights.read_bytes() == before


def test_work_dir_of_another_run_is_refused(first, corpus_folder):
    with pytest.raises(ValueError, match="journal.jsonl belongs to a run with another steps"):
        run(tiny(corpus_folder, first, "--steps 7"))


def test_a_result_in_its_journal_is_named(first, corpus_folder, tmp_path):
    (tmp_path / "journal.jsonl").write_bytes(
        (first / "journal.jsonl").read_bytes() + b'{"job":"a"}\n'
    )
    with pytest.raises(ValueError, match="journal.jsonl, line 2, column job: must not be there"):
        run(tiny(corpus_folder, tmp_path))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--steps 0", "--steps: must be at least 1; got 0"),
        ("--pool-share 1.5", r"--pool-share: must be in \[0, 1\]; got 1.5"),
        ("--draft-rate nan", r"--draft-rate: must be in \(0, 1\]; got nan"),
        ("--overlap-steps 0", "--overlap-steps: must be at least 1; got 0"),
        ("--seed -1", "--seed: must be at least 0; got -1"),
        ("--vocab-size 20", "vocab_size must be at least 257, got 20"),
        ("--target-width 48", "head size must divide width, got 32 and 48"),
        ("--corpus /no/such/folder", "training document .*; got none in /no/such/folder"),
        ("--price 2", "--price: must not be given with --drafter model; got 2.0"),
        ("--target elsewhere", "--target: must not be given with --drafter model; got elsewhere"),
        ("--drafter recurrent --places 32", "--places: must be below --length 32; got 32"),
        ("--drafter recurrent --price -1", "--price: must be at least 0; got -1.0"),
        ("--drafter recurrent --head-layers 0", "--head-layers: must be at least 1; got 0"),
        ("--drafter recurrent --steps 3000", "--steps: must not be given with --drafter recurrent"),
    ],
)
def test_bad_arguments_are_named(first, corpus_folder, tmp_path, flags, message):
    args = (
        head_of(first, corpus_folder, tmp_path, flags)
        if "recurrent" in flags
        else tiny(corpus_folder, tmp_path, flags)
    )
    with pytest.raises(ValueError, match=message):
        run(args)


HEAD = (
    "--places 3 --head-layers 1 --distil-steps 3 --overlap-steps 2 --pool-chunks 1 "
    "--pool-rows 4 --batch-size 4 --length 32 --overlap-rows 32"
)


def head_of(first, corpus_folder, work, extra: str) -> argparse.Namespace:
    folders = f"--corpus {corpus_folder} --work-dir {work} --out {work / 'out'}"
    return parse(f"{folders} --target {first / 'out' / 'target'} {HEAD} {extra}")


def killed_after(count: int, real):
    """Return a function that a kill meets after so many calls."""
    done = itertools.count()

    def step(*arguments):
        if next(done) == count:
            raise KeyboardInterrupt
        return real(*arguments)

    return step


def test_a_head_is_trained_the_same_however_often_it_is_stopped(
    first, corpus_folder, tmp_path, monkeypatch
):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    args = [head_of(first, corpus_folder, at, "--drafter recurrent") for at in (whole, parts)]
    assert run(args[0]) == 0
    monkeypatch.setattr(train, "EVERY_S", 0.0)
    for step in (2, 1):  # of the second stage once the first is there
        with monkeypatch.context() as patch:
            patch.setattr(train, "_step", killed_after(step, train._step))
            with pytest.raises(KeyboardInterrupt):
                run(args[1])
    assert run(args[1]) == 0
    files = [at / "out" / "model.safetensors" for at in (whole, parts)]
    assert files[0].read_bytes() == files[1].read_bytes()
    report = json.loads((whole / "out" / "report.json").read_text())
    assert len(report["overlap_by_place"]) == 3 and report["parameters"] > 1000
    assert report["training"]["price"]["tokens"] == 2 * 4 * 32
    assert str(tmp_path) not in json.dumps(report)
    assert RecurrentHead.load(whole / "out").shape.places == 3
