"""Faults that were found by trying: each was red before its mend."""

import hashlib
import json

import pytest
import torch

import cactus_theory as ct
from cactus_theory.cli import main
from cactus_theory.traces import Cycle, Trace, save_trace
from cactus_theory.traces.ends import end_ratio, warning_of_longer_answers
from tests.traces.conftest import VOCAB

tensor_files = pytest.importorskip("safetensors.torch")
TUNE = ("tune", "--cost-ratio", "0.01", "--nats", "0.05")
BAND = ("--policy", "band:price=1")


def texts(count=6, rounds=4, rare=False):
    source, made = torch.Generator().manual_seed(0), []
    for text in range(count):
        q = torch.randn(rounds, 2, VOCAB, generator=source, dtype=torch.float64)
        p = q[:, :1] + 0.5 * torch.randn(rounds, 1, VOCAB, generator=source, dtype=torch.float64)
        if rare:
            p[..., 3] = -torch.inf
        p = p.softmax(-1)
        ids = torch.multinomial(p[:, 0], 1, generator=source)
        cycles = zip(ids, q.softmax(-1), p, strict=True)
        made.append([Cycle(text, 2 * place, *rows) for place, rows in enumerate(cycles)])
    return made


def saved(folder, made, ends=(3,), **options):
    shape = {"vocab_size": VOCAB, "num_draft_tokens": 1, "eos_token_ids": ends}
    return save_trace(folder / "trace", made, **shape | options)


@pytest.mark.parametrize("value", [1 - 2e-16, 1 - 1e-9, 0.996])
def test_rounding_foretells_nothing(value):
    assert warning_of_longer_answers(value, 0.0) == ""


@pytest.mark.parametrize(("count", "said"), [(2, 0), (6, 1)])
def test_two_texts_foretell_nothing(tmp_path, capsys, count, said):
    trace = saved(tmp_path, texts(count, rare=True))
    assert main(["audit", str(trace.folder), *BAND]) == 0
    assert capsys.readouterr().out.count("answers will") == said


def test_ends_beyond_the_vocabulary_and_twice(tmp_path, capsys):
    trace, other = (
        saved(tmp_path / "a", texts(), [2, 3, 3, VOCAB]),
        saved(tmp_path / "b", texts(), [2, 3]),
    )
    assert end_ratio(trace, "band:price=1").value == end_ratio(other, "band:price=1").value
    assert main(["audit", str(trace.folder), "--policy", "band:price=1,hold=eos"]) == 0
    assert main([*TUNE, "--trace", str(trace.folder), "--policy", "band:price"]) == 0
    none = saved(tmp_path / "c", texts(), [VOCAB])
    assert main(["audit", str(none.folder), *BAND]) == 0


def test_one_policy_knows_the_ends_of_a_trace(tmp_path, capsys):
    trace = saved(tmp_path, texts())
    assert main(["audit", str(trace.folder), "--policy", "band:price=1,hold=eos"]) == 0
    assert "hold=3" in capsys.readouterr().out


def test_texts_without_rounds(tmp_path, capsys, recwarn):
    none = saved(tmp_path / "a", [[]] * 6)
    assert main([*TUNE, "--trace", str(none.folder)]) == 3
    some = saved(tmp_path / "b", [*texts(9), []])
    assert main([*TUNE, "--trace", str(some.folder), "--policy", "band:price"]) == 0
    assert "nan" not in capsys.readouterr().out and not recwarn.list


def changed(trace, change, **manifest):
    content = json.loads((trace.folder / "manifest.json").read_text()) | manifest
    for entry in content["shards"]:
        path = trace.folder / entry["file"]
        held = tensor_files.load(path.read_bytes())
        path.write_bytes(own := tensor_files.save(held | change(held)))
        entry |= {"bytes": len(own), "sha256": hashlib.sha256(own).hexdigest()}
    (trace.folder / "manifest.json").write_text(json.dumps(content))
    return Trace.open(trace.folder)


@pytest.mark.parametrize(
    ("vocab", "dtype", "said"),
    [(2**31 - 1, torch.float32, "rows of 2147483647 tokens"), (VOCAB, torch.int32, "torch.int32"),
     (2**70, torch.float32, "vocab_size: must lie in")],
)  # fmt: skip
def test_a_manifest_asks_for_no_memory(tmp_path, vocab, dtype, said):
    def change(held):
        rows = torch.zeros(len(held["draft_log_probs"]), 1, dtype=dtype)
        return {"draft_columns": torch.tensor([0], dtype=torch.int32), "draft_log_probs": rows}

    with pytest.raises(ValueError, match=said):
        list(changed(saved(tmp_path, texts()), change, vocab_size=vocab))


def test_more_draft_rows_than_the_targets_are_not_spread(tmp_path, monkeypatch):
    def change(held):
        rows = torch.zeros(
            len(held["target_log_probs"]) + 1, 1, dtype=held["draft_log_probs"].dtype
        )
        return {"draft_columns": torch.tensor([0], dtype=torch.int32), "draft_log_probs": rows}

    trace = changed(saved(tmp_path, texts()), change)
    monkeypatch.setattr("cactus_theory.traces.shard._spread", lambda *_: pytest.fail("spread"))
    with pytest.raises(ValueError, match="draft_log_probs"):
        list(trace)


@pytest.mark.parametrize("longest", ["y", 10**30, 1.5, -5])
def test_the_length_of_texts_is_a_whole_number(tmp_path, capsys, longest):
    trace = saved(tmp_path, texts())
    with pytest.raises(ValueError, match="max_new_tokens: must be"):
        changed(trace, dict, details={"max_new_tokens": longest})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"eos_token_ids": [-1]}, "^eos_token_ids"), ({"num_draft_tokens": 5000}, "^num_draft_tokens"),
     ({"temperature": float("nan")}, "^temperature")],
)  # fmt: skip
def test_a_header_is_checked_before_anything_is_written(tmp_path, wrong, said):
    with pytest.raises(ValueError, match=said):
        saved(tmp_path, texts(), **wrong)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_cuts_that_are_told_are_in_the_file(tmp_path, capsys):
    trace, out = saved(tmp_path, texts()), tmp_path / "tuned.json"
    told = ["--trace", str(trace.folder), "--policy", "band:price", "--top-p", "0.9"]
    assert main([*TUNE, *told, "--out", str(out)]) == 0
    assert ct.load_tuned(out).cuts.top_p == 0.9


@pytest.mark.parametrize(
    "flags",
    [("expect", "--cycles", "7"), ("expect", "--seed", "9"), (*TUNE, "--timings", "9")],
)
def test_flags_that_do_nothing_are_refused(tmp_path, capsys, flags):
    trace = saved(tmp_path, texts())
    assert main([*flags, "--trace", str(trace.folder)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


RULES = """
import math, sys
import cactus_theory as ct

@ct.rule
def lossless(q, p, n):
    return min(1, q[n] / p[n])

@ct.rule
def keyless(q, p, n):
    raise KeyError("no such token")

@ct.rule
def negative(q, p, n):
    return math.log(q[n] - 1)

@ct.rule
def leaves(q, p, n):
    sys.exit()
"""


def test_a_rule_without_knobs_can_be_tuned(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(RULES)
    trace = saved(tmp_path, texts())
    assert (
        main([*TUNE, "--trace", str(trace.folder), "--policy", f"{tmp_path}/mine.py:lossless"]) == 0
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("keyless", 'keyless: mine.py, line 11 (raise KeyError("no such token")): KeyError'),
        ("negative", "negative: mine.py, line 15 (return math.log(q[n] - 1)): ValueError: math"),
        ("leaves", "SystemExit"),
    ],
)
def test_a_rule_that_raises_is_told_in_a_line(tmp_path, capsys, name, said):
    (tmp_path / "mine.py").write_text(RULES)
    trace = saved(tmp_path, texts())
    asked = ["audit", str(trace.folder), "--policy", f"{tmp_path}/mine.py:{name}"]
    assert main(asked) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and said in err


def test_a_greedy_trace_has_no_temperature(tmp_path, capsys):
    trace = saved(tmp_path, texts(), temperature=0.0)
    assert (
        main(["promise", "--per-token", "0.05", "--tokens", "9", "--trace", str(trace.folder)]) == 2
    )


@pytest.mark.parametrize("answer", ["7.0", "-1.0"])
def test_an_acceptance_that_is_no_probability_is_refused(tmp_path, capsys, answer):
    (tmp_path / "mine.py").write_text(RULES.replace("min(1, q[n] / p[n])", answer))
    trace = saved(tmp_path, texts())
    asked = ["audit", str(trace.folder), "--policy", f"{tmp_path}/mine.py:lossless"]
    assert main(asked) == 2 and "must accept with a probability" in capsys.readouterr().err


@pytest.mark.parametrize(
    "ids", [torch.tensor([2**33]), torch.tensor([1.5]), torch.tensor([True]), [1]]
)
def test_ids_are_not_changed_as_they_are_written(tmp_path, ids):
    rows = torch.full((2, VOCAB), 1 / VOCAB, dtype=torch.float64)
    with pytest.raises((TypeError, ValueError), match="draft_token_ids"):
        saved(tmp_path, [[Cycle(0, 0, ids, rows, rows[:1])]])


def test_texts_of_a_lossy_decode_are_not_the_targets_own(tmp_path, capsys):
    trace = saved(tmp_path, texts(6, rare=True))
    changed(trace, dict, details={"policy": "band:price=0.01"})
    assert main(["audit", str(trace.folder), *BAND]) == 0
    assert "answers will" not in capsys.readouterr().out


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rows_of_every_precision_are_saved(tmp_path, dtype):
    made = [
        [
            Cycle(0, 0, one.draft_token_ids, one.target_probs.to(dtype), one.draft_probs.to(dtype))
            for one in text
        ]
        for text in texts()
    ]
    assert len(saved(tmp_path, made)) == 24
