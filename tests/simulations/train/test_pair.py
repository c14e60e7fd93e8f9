"""The whole command at tiny size, and its refusals."""

import argparse
import itertools
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from simulations.train import fit, samples
from simulations.train.pair import add_arguments, run

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
    assert report["overlap_on_target_samples"]["positions"] == 32 * 64
    for folder in (first, corpus_folder):
        assert str(folder) not in text


def test_work_dir_of_another_run_is_refused(first, corpus_folder):
    with pytest.raises(ValueError, match="journal.jsonl belongs to a run with another steps"):
        run(tiny(corpus_folder, first, "--steps 7"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--steps 0", "--steps: must be at least 1; got 0"),
        ("--held-out nan", r"--held-out: must be in \(0, 1\); got nan"),
        ("--overlap-steps 0", "--overlap-steps: must be at least 1; got 0"),
        ("--seed -1", "--seed: must be at least 0; got -1"),
        ("--vocab-size 20", "vocab_size must be at least 257, got 20"),
        ("--target-width 48", "head size must divide width, got 32 and 48"),
        ("--held-out 1", r"--held-out: must be in \(0, 1\); got 1.0"),
        ("--corpus /no/such/folder", "must hold at least one training text; got 0 texts"),
    ],
)
def test_bad_arguments_are_named(corpus_folder, tmp_path, flags, message):
    with pytest.raises(ValueError, match=message):
        run(tiny(corpus_folder, tmp_path, flags))


def killed_after(count: int, real):
    """Return a function that a kill meets after so many calls."""
    done = itertools.count()

    def step(*arguments):
        if next(done) == count:
            raise KeyboardInterrupt
        return real(*arguments)

    return step


def test_a_pair_is_the_same_however_often_it_is_stopped(
    first, corpus_folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(fit, "EVERY_S", 0.0)
    for module, name, count in ((fit, "_step", 8), (samples, "written", 1), (fit, "_step", 5)):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, killed_after(count, getattr(module, name)))
            with pytest.raises(KeyboardInterrupt):
                run(tiny(corpus_folder, tmp_path))
    assert run(tiny(corpus_folder, tmp_path)) == 0
    for name in ("target", "draft"):
        one, two = (at / "out" / name / "model.safetensors" for at in (first, tmp_path))
        assert one.read_bytes() == two.read_bytes()
