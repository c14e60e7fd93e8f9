"""The pair in the repository is small, whole and as good as its report says."""

import json
import re

import pytest
import torch
from transformers import AutoTokenizer

from cactus_theory.decoding.drafters import holds_head
from cactus_theory.decoding.drafters.eagle3_head import Eagle3Head
from cactus_theory.decoding.load import load_model
from simulations.common.inputs import PAIR, ROOT
from simulations.train.corpus import END_OF_TEXT_ID
from simulations.train.report import num_parameters, overlap
from tests.amounts import thorough

PROMPTS = PAIR.parent / "data" / "prompts.jsonl"


@pytest.fixture(scope="module")
def report():
    return json.loads((PAIR / "report.json").read_text())


@pytest.fixture(scope="module")
def prompts():
    return [json.loads(line) for line in PROMPTS.read_text().splitlines()]


@pytest.fixture(scope="module")
def encode():
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    return lambda text: tokenizer(text)["input_ids"]


def test_size_and_parameters(report):
    heads = {own.name for own in PAIR.iterdir() if holds_head(own)}
    own = [p for p in PAIR.rglob("*") if p.is_file() and p.parent.name not in heads]
    assert sum(p.stat().st_size for p in own) < 12e6
    for name in ("target", "draft"):
        assert num_parameters(load_model(PAIR / name)) == report["parameters"][name]


def test_reported_quality(report):
    assert report["overlap_on_target_samples"]["mean"] >= 0.5
    assert (
        report["held_out"]["target"]["bits_per_byte"] < report["held_out"]["draft"]["bits_per_byte"]
    )


@thorough
def test_overlap_on_our_prompts_is_near_the_reported_one(report, prompts, encode):
    """Other prefixes than the report's, so within 0.06 only."""
    ids = [encode(prompt["prompt"])[:20] for prompt in prompts]
    begun = [[END_OF_TEXT_ID, *row] for row in ids]
    target, draft = load_model(PAIR / "target"), load_model(PAIR / "draft")
    got = overlap(target, draft, begun, rows=32, length=80, seed=0)
    assert got["mean"] == pytest.approx(report["overlap_on_target_samples"]["mean"], abs=0.06)


def test_no_folder_of_a_machine_is_shipped():
    for path in PAIR.rglob("*.json"):
        if path.name != "tokenizer.json":
            assert not re.search(r'"(/|[A-Z]:\\)[a-z]+/', path.read_text()), path


HEAD = ROOT / "simulations" / "smollm_head"


def test_it_is_small_and_reported():
    report, head = json.loads((HEAD / "report.json").read_text()), Eagle3Head.load(HEAD)
    assert (HEAD / "model.safetensors").stat().st_size <= 20e6
    assert {path.name for path in HEAD.iterdir()} == {
        "config.json", "model.safetensors", "report.json",
    }  # fmt: skip
    own = sum(p.numel() for name, p in head.named_parameters() if "embed_tokens" not in name)
    assert report["parameters"] == own and report["draft_vocab_size"] == len(head.ids) == 8192
    assert (head.vocab, head.hidden, head.reads) == (49_152, 576, [2, 15, 27])
    assert all(torch.isfinite(weight).all() for weight in head.parameters())
    for overlaps in report["held_out"]["overlap_by_place"].values():
        assert overlaps[0] > 0.4 and overlaps == sorted(overlaps, reverse=True)
