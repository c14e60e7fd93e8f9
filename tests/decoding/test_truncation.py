"""Rows are cut as the flags say: the target's, and the draft's in their own way."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import TopPLogitsWarper

import cactus_theory as ct
import cactus_theory.decoding
from cactus_theory.base.prompts import Prompt
from cactus_theory.cli import main
from cactus_theory.decoding import generate, load_pair
from cactus_theory.decoding.nucleus import cut_to_nucleus
from cactus_theory.decoding.probabilities import Warp
from cactus_theory.decoding.processors import Processors, _nucleus
from cactus_theory.decoding.text import Texts
from cactus_theory.decoding.truncation import WHOLE, Cuts
from cactus_theory.traces import Trace, expect, log_trace, save_trace
from tests.kits.drafters import assert_drafter_properties
from tests.traces.test_log import OPTIONS, PROMPTS, forward

PAIR = Path(__file__).resolve().parents[2] / "simulations" / "pair"
MODELS = ("--target", str(PAIR / "target"), "--draft", str(PAIR / "draft"))
HEAT = 0.7
BOTH, APART = Cuts(5, 0.8), Cuts(5, 0.8, 0, 1.0)
# rows of a float64 model stored as float32: half an ulp of a log-probability below 32, twice
ROUNDING = 2.0**-19
# of sums of float32 probabilities
NEAR = 1e-5


def cut(row: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Return a row that is cut, by its own words: token by token, the likeliest first."""
    kept, mass = torch.zeros_like(row), 0.0
    order = row.argsort(descending=True)[: top_k or len(row)]
    for token in order:
        if mass < top_p * float(row[order].sum()):
            kept[token] = row[token]
            mass += float(row[token])
    return kept / kept.sum()


def test_rows_of_logits_are_those_of_a_decode(tmp_path: Path, capsys) -> None:
    """One function in Python, and the flags of solve and audit."""
    logits = 3 * torch.randn(2, 4, 30, generator=torch.Generator().manual_seed(5)).double()
    target, draft = logits
    rows = [cut(row, 9, 0.8) for row in (target / 0.7).softmax(-1)]
    found = ct.cut_rows(target.float(), temperature=0.7, top_k=9, top_p=0.8)
    assert found.dtype == torch.float64 and torch.allclose(found, torch.stack(rows), atol=NEAR)
    assert np.allclose(ct.cut_rows(target[0].numpy()), target[0].softmax(-1), atol=1e-15, rtol=0)
    assert ct.cut_rows(target, temperature=0).argmax(-1).equal(target.argmax(-1))
    with pytest.raises(ValueError, match="logits: every row of logits must have a finite maximum"):
        ct.cut_rows([0.0, math.nan])
    for empty in (1.0, np.zeros((0, 4)), np.zeros((2, 0))):
        with pytest.raises(ValueError, match=r"logits: must have shape \(\.\.\., V\)"):
            ct.cut_rows(empty)
    with pytest.raises(ValueError, match="top_p: must lie in"):
        ct.cut_rows(target, top_p=0.0)
    path = str(tmp_path / "rows.npz")
    np.savez(path, target=target, draft=draft)
    for wrong in ("--top-p=1.5", "--draft-top-k=-1", "--temperature=-1"):
        assert main(["solve", path, "--logits", "--delta", "0.1", wrong]) == 2
        assert f"solve: {wrong.partition('=')[0]}: must" in capsys.readouterr().err
    flags = "--temperature 0.7 --top-k 9 --top-p 0.8 --draft-top-p 1 --json".split()
    whole = ct.cut_rows(draft, temperature=0.7, top_k=9)
    best = ct.optimal_acceptance(torch.stack(rows), whole, delta=0.1)
    assert main(["solve", path, "--logits", "--delta", "0.1", *flags]) == 0
    solved = json.loads(capsys.readouterr().out)["acceptance"]
    assert solved == pytest.approx(best.acceptance.tolist(), abs=NEAR)
    assert main(["audit", path, "--logits", "--policy", "speculative", *flags]) == 0
    audited = json.loads(capsys.readouterr().out)["acceptance"]
    seen = ct.audit("speculative", torch.stack(rows), whole).acceptance
    assert audited == pytest.approx(seen.tolist(), abs=NEAR)
    assert main(["solve", path, "--delta", "0.1", "--top-k", "9"]) == 2
    assert "--top-k: must be given with --logits; got 9" in capsys.readouterr().err
    (tmp_path / "qwen.pt").write_bytes(b"x")
    assert main(["solve", str(tmp_path / "qwen.pt"), "--delta", "0.1"]) == 2
    assert "rows are read from .npy, .npz, .json; got" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_nucleus_is_the_librarys_without_its_sort(dtype, monkeypatch) -> None:
    made = torch.Generator().manual_seed(3)
    rows = torch.randn(8, 3000, generator=made, dtype=dtype) * torch.arange(1, 9)[:, None]
    for top_p in (0.05, 0.5, 0.95, 0.999):
        own = TopPLogitsWarper(top_p, filter_value=-64.0)
        stays = _nucleus(own, rows.clone()) == rows
        assert _nucleus(own, rows.clone())[~stays].unique().tolist() in ([-64.0], [])
        probs = rows.double().softmax(-1)
        mass = (probs * stays).sum(-1)
        least = probs.where(stays, 1.0).amin(-1)
        assert (probs.where(~stays, 0.0).amax(-1) <= least).all()
        assert (mass > top_p - NEAR).all() and (mass - least < top_p + NEAR).all()
        few = rows[:, :40]
        assert torch.equal(_nucleus(own, few.clone()), own(None, few))
    even = torch.zeros(2, 10, dtype=dtype)  # of equal ones as many go as under the library
    assert _nucleus(TopPLogitsWarper(0.75), even.clone()).isfinite().sum(-1).tolist() == [8, 8]
    assert _nucleus(TopPLogitsWarper(1e-17), even.clone()).isfinite().sum(-1).tolist() == [1, 1]
    scores, quarter = np.zeros(2), np.array([0.25, 0.75])
    cut_to_nucleus(scores, quarter, 0.25, 9.0)  # at most 0.25 may go, and 0.25 goes
    assert scores.tolist() == [9.0, 0.0]
    even[0, 3], even[1] = math.nan, -math.inf
    assert torch.equal(_nucleus(TopPLogitsWarper(0.5), even.clone()).isnan(), even.isnan())

    def law(**options):
        one, texts = TopPLogitsWarper(0.5, **options), Texts([[1]], 1, [], "cpu")
        return Warp(1.0, Processors([one]))(rows[None].clone(), texts, 0, [7])

    usual, two = law(), law(min_tokens_to_keep=2)
    monkeypatch.setattr(TopPLogitsWarper, "__call__", lambda *given: 1 / 0)
    assert torch.equal(law(), usual) and (two > 0).sum(-1).min() == 2
    with pytest.raises(ZeroDivisionError):
        law(min_tokens_to_keep=2)


@pytest.mark.parametrize("cuts", [BOTH, APART, Cuts(draft_top_k=3), Cuts(top_p=0.6, top_k=0)])
def test_a_trace_has_the_rows_that_both_models_are_cut_to(tiny, tmp_path: Path, cuts: Cuts) -> None:
    trace = log_trace(
        *tiny, PROMPTS, tmp_path / "t", dtype="float32", temperature=HEAT, cuts=cuts, **OPTIONS
    )
    assert trace.header.temperature == HEAT and Cuts.of(trace.header.details) == cuts
    sides = (cuts.top_k, cuts.top_p), (cuts.draft_top_k, cuts.draft_top_p)
    for text, prompt in enumerate(PROMPTS):
        cycle = next(own for own in trace if own.text == text)
        ids = [*prompt, *cycle.draft_token_ids.tolist()]
        for model, rows, side in zip(tiny, (cycle.target_probs, cycle.draft_probs), sides,
                                     strict=True):  # fmt: skip
            for place, row in enumerate(rows):
                law = forward(model, ids[: len(prompt) + place])[-1].log().div(HEAT).softmax(-1)
                torch.testing.assert_close(row, cut(law, *side), rtol=ROUNDING, atol=0)


def test_a_draft_that_is_cut_in_its_own_way_reports_the_rows_it_draws_from(tiny) -> None:
    for cuts in (APART, Cuts(draft_top_k=2, draft_top_p=0.7)):
        drafter = cuts.drafter(tiny[1], HEAT)
        assert assert_drafter_properties(drafter, tiny[0], temperature=HEAT, rounds=6) > 0
    assert type(BOTH.drafter(tiny[1], HEAT)).__name__ == "ModelDrafter"


def test_nothing_is_cut_at_temperature_0(tiny) -> None:
    ids, more = torch.tensor([PROMPTS[0]]), {"policy": "speculative", "max_new_tokens": 12}
    plain = generate(*tiny, ids, temperature=0.0, **more).output_token_ids
    drafter = Cuts(3, 0.5, 2).drafter(tiny[1], 0.0)
    told = generate(tiny[0], drafter, ids, **Cuts(3, 0.5, 2).options(0.0), **more)
    assert told.output_token_ids.tolist() == plain.tolist()


def test_what_a_file_says_is_read_or_refused() -> None:
    assert Cuts.of({}) is None and Cuts.of({"top_k": 0, "top_p": 1}) == WHOLE
    assert str(Cuts.of({"top_k": 3, "top_p": "0.5"})) == "top-k 3, top-p 0.5"
    for bad in ({"top_k": "3"}, {"top_k": True}, {"top_k": 3, "top_p": [1]}, {"top_k": 0}):
        with pytest.raises(ValueError, match="top_[kp]: must be"):
            Cuts.of(bad)


OBSERVED = "--observed 0.7,0.5 --rounds 500 --drafted 1000 --num-draft-tokens 2".split()
SAMPLED = (*MODELS, "--prompts", "x", "--draft-mode", "sampled")


def refused(capsys, *arguments: str) -> str:
    assert main(list(arguments)) == 2
    return capsys.readouterr().err


def test_expect_compares_like_with_like_and_asks(tiny, tmp_path: Path, capsys) -> None:
    logged = log_trace(*tiny, PROMPTS * 2, tmp_path / "t", cuts=APART, **OPTIONS)
    asked = ("expect", "--trace", str(logged.folder), *OBSERVED)
    same = ("--top-k", "5", "--top-p", "0.8", "--draft-top-k", "0", "--draft-top-p", "1")
    for flags in ((), same):
        assert main([*asked, *flags]) == 0
        said = capsys.readouterr().out
        assert "top-k 5, top-p 0.8 (draft: top-k 0, top-p 1)" in said
    for flags in (same[:4], ("--top-k", "50"), ("--top-p", "1")):
        assert "must be those of the trace, top-k 5" in refused(capsys, *asked, *flags)
    texts = [[own for own in logged if own.text == text] for text in range(logged.texts)]
    unknown = save_trace(tmp_path / "u", texts, vocab_size=24, num_draft_tokens=3)
    asked = ("expect", "--trace", str(unknown.folder), *OBSERVED)
    assert "must say what the engine cuts rows to (0 and 1: nothing), as the trace" in refused(
        capsys, *asked
    )
    assert main([*asked, "--top-k", "0"]) == 0 and main([*asked[:3]]) == 0
    known = save_trace(tmp_path / "k", texts, vocab_size=24, num_draft_tokens=3, cuts=APART)
    assert Cuts.of(Trace.open(known.folder).header.details) == APART
    assert expect(known).rounds == expect(logged).rounds


def test_expect_asks_what_the_engine_does_with_rows(capsys, monkeypatch) -> None:
    from cactus_theory.commands import expect as command
    from cactus_theory.commands import models

    def loaded(args):
        pair = load_pair(args.target, args.draft)
        pair.target.generation_config.top_k = own
        return pair

    def log_shown(*args, cuts, **more):
        raise ValueError(f"decodes with {cuts}")

    monkeypatch.setattr(models, "loaded", loaded)
    monkeypatch.setattr(command, "log_shown", log_shown)
    monkeypatch.setattr(models, "given_prompts", lambda _: [Prompt("def f("), Prompt("import os")])
    apart = "--draft-top-k, --draft-top-p: must say what the engine cuts rows to"
    cases: list = [
        (None, ("--top-k", "20"), apart),
        (20, (), "generation_config.json has top_k 20, which vLLM follows"),
        (None, (), "decodes with no cuts"),
        (20, ("--top-k", "0"), "decodes with no cuts"),
        (None, ("--top-k", "20", "--draft-top-k", "0"), "decodes with top-k 20, top-p 1 (draft"),
        (None, ("--top-k", "20", "--temperature", "0"), "decodes with top-k 20"),
        (None, ("--top-k", "20", "--draft-mode", "greedy"), "decodes with top-k 20"),
    ]
    for given, flags, words in cases:
        own = given
        assert words in refused(capsys, "expect", *SAMPLED, *OBSERVED, *flags)
    own, flags = 20, SAMPLED[:-2]  # nothing is compared
    assert "decodes with no cuts" in refused(capsys, "expect", *flags)


def test_tune_and_generate_keep_to_the_cuts_of_the_rows(
    tmp_path: Path, capsys, monkeypatch
) -> None:
    import cactus_theory.tuning.measure as measure

    timed = []

    def decode(target, draft, ids, options):
        timed.append((type(draft).__name__, len(options.logits_processor)))
        return cactus_theory.decoding.decode(target, draft, ids, options)

    monkeypatch.setattr(measure, "decode", decode)
    prompts, out = tmp_path / "prompts.txt", tmp_path / "tuned.json"
    prompts.write_text("def f(x):\nimport os\n")
    small = ("--cycles", "6", "--max-new-tokens", "6", "--threads", "1", "--work", str(tmp_path))
    flags = ("--top-p", "0.8", "--draft-top-p", "1")
    asked = ("tune", "--nats", "0.05", "--policy", "mixture:alpha",
             "--num-draft-tokens", "2", *MODELS, "--prompts", str(prompts), *small)  # fmt: skip
    assert main([*asked, *flags, "--out", str(out), "--json"]) == 0
    found, cuts = json.loads(capsys.readouterr().out), Cuts(top_p=0.8, draft_top_p=1.0)
    assert set(timed) == {("NoneType", 2), ("_Cut", 2)}  # costs are those of the same decodes
    assert Cuts.of(found["source"]) == cuts and "noise_floor" not in found["source"]
    trace = Trace.open(tmp_path / "trace")
    assert Cuts.of(trace.header.details) == cuts
    best = next(own for own in found["table"] if own["family"] == "speculative")
    out.write_text(json.dumps(found | {"recommended": best}))
    tuned = ct.load_tuned(out)
    assert tuned.cuts == cuts and len(tuned.options["logits_processor"]) == 2
    generating = ("generate", *MODELS, "--prompt", "x", "--tuned", str(out), "--max-new-tokens")
    assert main([*generating, "8", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["text"]
    pair, setting = load_pair(PAIR / "target", PAIR / "draft"), tuned.options | {"seed": 0}
    ids = torch.tensor([pair.tokenizer.encode("x")])
    for law, same in ((cuts, True), (WHOLE, False)):
        setting |= law.options(1.0)
        result = generate(pair.target, law.drafter(pair.draft, 1.0), ids, **setting,
                          max_new_tokens=8, eos_token_ids=0)  # fmt: skip
        text = pair.tokenizer.decode(result.output_token_ids[0], skip_special_tokens=True)
        assert (text == told) == same
    assert "must be those of the file, top-k 0, top-p 0.8" in refused(
        capsys, *generating, "8", "--top-p", "0.9"
    )
    alone = f"tune --nats 0.05 --trace {trace.folder} --cost-ratio 0.1".split()
    assert "must be those of the trace" in refused(capsys, *alone, "--top-p", "0.9")
