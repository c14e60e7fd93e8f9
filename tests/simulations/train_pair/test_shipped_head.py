"""The head in the repository: small, as its report says, and lawful on the shipped target."""

import json

import pytest
import torch

from cactus_theory.cli import main
from cactus_theory.decoding import generate, load_pair
from simulations.common.inputs import PAIR, load_prompts
from simulations.train_pair.train import num_parameters
from tests.amounts import amount, thorough
from tests.decoding.test_whole_texts import FALSE_ALARM, p_value
from tests.kits.drafters import assert_drafter_properties

transformers = pytest.importorskip("transformers")

HEAD = PAIR / "recurrent"
PROMPTS = PAIR.parent / "data" / "prompts.jsonl"
TOP = 3


@pytest.fixture(scope="module")
def pair():
    return load_pair(PAIR / "target", HEAD)


@pytest.fixture(scope="module")
def prompts(pair):
    return load_prompts(PROMPTS, pair.tokenizer)


def test_it_is_small_and_reported(pair):
    report = json.loads((HEAD / "report.json").read_text())
    assert sum(path.stat().st_size for path in HEAD.iterdir()) <= 2e6
    names = {"head.json", "model.safetensors", "report.json"}
    assert {path.name for path in HEAD.iterdir()} == names
    assert report["parameters"] == num_parameters(pair.draft.head)
    assert report["training"].keys() == {"kl", "price"} and report["overlap_by_place"][0] > 0.6


@thorough
def test_its_tokens_are_drawn_from_the_rows_that_it_reports(pair):
    options = {"rounds": amount(1, 10), "num_draft_tokens": amount(3, 8)}
    assert assert_drafter_properties(pair.draft, pair.target, **options) > 2


def test_lossless_texts_have_the_targets_law(pair, prompts):
    """The joint law of two tokens after the first, which is plain, among the likeliest of each."""
    first = [transformers.TopKLogitsWarper(TOP)]
    ids = torch.tensor([prompts[0]])
    options = {"policy": "speculative", "num_draft_tokens": 3, "max_new_tokens": 3, "seed": 1}
    texts = ids.expand(amount(120, 4000), -1)
    found = generate(pair.target, pair.draft, texts, meter=False, logits_processor=first, **options)
    laws, seen = {}, found.output_token_ids.tolist()

    def law(*tokens):
        text = torch.cat([ids, torch.tensor([tokens], dtype=torch.int64)], 1)
        with torch.inference_mode():
            scores = pair.target(text, use_cache=False).logits[0, -1].double()
        best, places = scores.topk(TOP)
        return dict(zip(places.tolist(), best.softmax(-1).tolist(), strict=True))

    for x, share in law().items():
        for y, second in law(x).items():
            laws |= {(x, y, z): share * second * third for z, third in law(x, y).items()}
    counts = torch.tensor([seen.count(list(own)) for own in laws]).double()
    assert 0.1 < found.num_accepted / found.num_tokens < 1 and counts.sum() == len(texts)
    assert p_value(counts, torch.tensor(list(laws.values()), dtype=torch.float64)) > FALSE_ALARM


def test_greedy_texts_are_those_of_plain_decoding(pair, prompts):
    options = {"max_new_tokens": 24, "temperature": 0.0}
    for ids in prompts[: amount(2, 16)]:
        plain = generate(pair.target, None, torch.tensor([ids]), **options)
        own = {"policy": "speculative", "num_draft_tokens": 4} | options
        found = generate(pair.target, pair.draft, torch.tensor([ids]), **own)
        assert found.output_token_ids.equal(plain.output_token_ids)
        assert found.num_accepted > 0


def test_a_text_of_a_batch_is_the_one_it_is_alone(pair, prompts):
    longest = max(map(len, prompts[:3]))
    rows = [[0] * (longest - len(ids)) + list(ids) for ids in prompts[:3]]
    mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts[:3]]
    options = {"policy": "band:price=1", "max_new_tokens": 8, "num_draft_tokens": 4}
    batch = generate(pair.target, pair.draft, torch.tensor(rows),
                     attention_mask=torch.tensor(mask), seed=7, **options)  # fmt: skip
    for row, ids in enumerate(prompts[:3]):
        alone = generate(pair.target, pair.draft, torch.tensor([ids]), seed=7 + row, **options)
        assert batch.output_token_ids[row].equal(alone.output_token_ids[0])


def test_half_precision_is_warned_about(pair, prompts, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {})
    target = load_pair(PAIR / "target", PAIR / "target", dtype=torch.bfloat16).target
    options = {"policy": "speculative", "num_draft_tokens": 2, "max_new_tokens": 4, "seed": 0}
    with pytest.warns(UserWarning, match="target_model: .* runs in bfloat16 on a CPU"):
        generate(target, pair.draft, torch.tensor([prompts[0]]), **options)


def test_generate_takes_a_heads_folder(capsys):
    asked = ["generate", "--target", str(PAIR / "target"), "--policy", "speculative", "--json"]
    asked += ["--prompt", "import os", "--max-new-tokens", "8", "--draft"]
    assert main([*asked, str(HEAD)]) == 0
    assert json.loads(capsys.readouterr().out)["policy"] == "speculative"
    assert main([*asked, str(HEAD), "--draft-stop", "0.2"]) == 2
    assert "--draft-stop: RecurrentDrafter has none" in capsys.readouterr().err
    assert main([*asked, str(PAIR)]) == 2
    assert "draft: must be a folder with a config.json" in capsys.readouterr().err
    with pytest.raises(ValueError, match="hidden size must be that of the head, 192; got 128"):
        load_pair(PAIR / "draft", HEAD)
