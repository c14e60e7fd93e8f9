"""The head in the repository: small, as its report says, and lawful on the shipped target."""

import json

import pytest
import torch

from cactus_theory.cli import main
from cactus_theory.decoding import generate, load_pair
from simulations.__main__ import main as simulations
from simulations.common.inputs import PAIR, ROOT, load_prompts
from simulations.common.results import read_csv
from simulations.train.report import num_parameters
from tests.amounts import amount, thorough
from tests.kits.drafters import assert_drafter_properties

HEAD = PAIR / "head"
PROMPTS = PAIR.parent / "data" / "prompts.jsonl"


@pytest.fixture(scope="module")
def pair():
    return load_pair(PAIR / "target", HEAD)


@pytest.fixture(scope="module")
def prompts(pair):
    return load_prompts(PROMPTS, pair.tokenizer)


def test_it_names_a_target_that_is_there():
    told = json.loads((HEAD / "config.json").read_text())["speculators_config"]["verifier"]
    assert (ROOT / told["name_or_path"]).samefile(PAIR / "target")


def test_it_is_small_and_reported(pair):
    report = json.loads((HEAD / "report.json").read_text())
    assert sum(path.stat().st_size for path in HEAD.iterdir()) <= 2**21
    names = {"config.json", "model.safetensors", "report.json"}
    assert {path.name for path in HEAD.iterdir()} == names
    own = pair.draft.head
    assert report["parameters"] == num_parameters(own) - num_parameters(own.core.model.embed_tokens)
    assert report["training"].keys() == {"first", "all", "overlap"}
    overlaps = report["held_out"]["overlap_by_place"]
    assert overlaps[0] > 0.6 and report["held_out"]["target_mass_of_draft_vocabulary"] > 0.99


@thorough
def test_its_tokens_are_drawn_from_the_rows_that_it_reports(pair):
    options = {"rounds": amount(1, 10), "num_draft_tokens": amount(3, 8)}
    assert assert_drafter_properties(pair.draft, pair.target, **options) > 2


def test_greedy_texts_are_those_of_plain_decoding(pair, prompts):
    options = {"max_new_tokens": 24, "temperature": 0.0}
    for ids in prompts[: amount(2, 16)]:
        plain = generate(pair.target, None, torch.tensor([ids]), **options)
        own = {"policy": "speculative", "num_draft_tokens": 4} | options
        found = generate(pair.target, pair.draft, torch.tensor([ids]), **own)
        assert found.output_token_ids.equal(plain.output_token_ids)
        assert found.num_accepted > 0


def test_generate_takes_a_heads_folder(capsys):
    asked = ["generate", "--target", str(PAIR / "target"), "--policy", "speculative", "--json"]
    asked += ["--prompt", "import os", "--max-new-tokens", "8", "--draft"]
    assert main([*asked, str(HEAD)]) == 0
    assert json.loads(capsys.readouterr().out)["policy"] == "speculative"
    assert main([*asked, str(PAIR)]) == 2
    assert "draft: must be a folder with a config.json" in capsys.readouterr().err
    with pytest.raises(ValueError, match="hidden size must be that of the head, 192; got 128"):
        load_pair(PAIR / "draft", HEAD)


@thorough
def test_throughput_leaves_the_librarys_drafting_out_for_heads(tmp_path):
    asked = ["throughput", "--draft", str(HEAD), "--policy", "speculative"]
    asked += ["--num-prompts", "1", "--max-new-tokens", "4", "--repeats", "1", "--metered", "1"]
    asked += ["--num-draft-tokens", "2", "--batch", "1", "--out", str(tmp_path)]
    assert simulations(asked) == 0
    found, _ = read_csv(tmp_path / "throughput.csv")
    assert [row["method"] for row in found] == ["plain", "hf_plain", "speculative"]
