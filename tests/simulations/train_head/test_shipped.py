"""The head of SmolLM2 in the repository: small, as its report says, in the format that is read."""

import json

import torch

from cactus_theory.decoding.drafters.eagle3 import Eagle3Head
from simulations.common.inputs import ROOT

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
