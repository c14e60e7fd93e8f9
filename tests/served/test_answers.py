"""Rows along answers against whole passes and decodes; lines of every kind; the command."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.cli import main
from tests.amounts import thorough

pytest.importorskip("transformers")
from cactus_theory.decoding import load_pair
from cactus_theory.decoding.drafters import drafter_by
from cactus_theory.served import answers as rooms
from cactus_theory.served.alternatives import Claim, Rows, alternatives, log_factors
from cactus_theory.served.answers import Answer, Reader

ROOT = Path(__file__).resolve().parents[2]
TARGET, DRAFT = (str(ROOT / "simulations/pair" / name) for name in ("target", "draft"))
ANSWERS = ROOT / "simulations/data/answers.jsonl"
LINES = ANSWERS.read_text().splitlines(keepends=True)
# logits of another pass over the same text
KERNELS = 1e-3


@pytest.fixture(scope="module")
def pair():
    return load_pair(TARGET, DRAFT)


def answer_of(line: int = 0, claim: Claim | None = None) -> Answer:
    record = json.loads(ANSWERS.read_text().splitlines()[line])
    return Answer(line + 1, record["prompt_token_ids"], record["token_ids"], claim or Claim())


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_rows_are_those_of_whole_passes_however_they_are_parted(pair, size, monkeypatch) -> None:
    """Penalties, the row before and the draft's rows, too, across parts."""
    monkeypatch.setattr(rooms, "ENTRIES", size * 2048)
    own, table = answer_of(), alternatives(drafted=True)
    reader = Reader(pair, False, table)
    factors, growth, beyond = reader.factors(own)
    ids = torch.tensor([own.prompt + own.token_ids])
    with torch.inference_mode():
        q, p = (
            model(ids).logits[0, len(own.prompt) - 1 : -1] for model in (pair.target, pair.draft)
        )
    rows = Rows(q, own.claim, ids[0, : len(own.prompt)], ids[0, len(own.prompt) : -1], p)
    whole, sums, _ = log_factors(rows, ids[0, len(own.prompt) :, None], table)
    assert factors == pytest.approx(whole[:, 0].numpy(), abs=KERNELS)
    assert growth == pytest.approx(sums.numpy(), rel=0.6, abs=1.0) and not beyond.any()


def test_rows_of_a_head_are_those_that_a_decode_drafts_from(pair, tmp_path) -> None:
    from transformers import LlamaConfig

    from cactus_theory.decoding.drafters import Eagle3Drafter
    from cactus_theory.decoding.drafters.eagle3_head import Eagle3Head

    sizes: Any = {"vocab_size": 2048, "hidden_size": 192, "intermediate_size": 64}
    torch.manual_seed(0)
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=6, **sizes)
    head = Eagle3Drafter(Eagle3Head(config, {"draft_vocab_size": 2048}, shares=True).eval())
    prompt = answer_of().prompt
    options = {"policy": "speculative", "num_draft_tokens": 1, "record_rows": True}
    out = ct.generate(pair.target, head, torch.tensor([prompt]), max_new_tokens=8, **options)
    own = Answer(1, prompt, out.output_token_ids[0].tolist(), Claim())
    reader = Reader(type(pair)(pair.target, head, pair.tokenizer), False, alternatives(True))
    for size in (1, 3, 100):
        parts = list(_chunked(reader, own, size))
        p = torch.cat([draft for _, _, draft in parts if draft is not None]).softmax(-1)
        drafted = [node.p for node in out.rows]
        assert len(drafted) >= 3
        for row in drafted:
            nearest = (p - torch.as_tensor(row)).abs().sum(-1).min()
            assert float(nearest) < KERNELS


def _chunked(reader: Reader, own: Answer, size: int):
    before, rooms.ENTRIES = rooms.ENTRIES, size * 2048
    try:
        with torch.inference_mode():
            yield from reader._chunks(torch.tensor(own.prompt + own.token_ids), len(own.prompt))
    finally:
        rooms.ENTRIES = before


def test_drafts_that_the_text_does_not_decide_are_refused(pair) -> None:
    with pytest.raises(ValueError, match="--draft: must be a model, a part .* got NGram"):
        Reader(type(pair)(pair.target, drafter_by("greedy", "ngram"), None), False, ())


@pytest.fixture(scope="module")
def few(tmp_path_factory) -> Path:
    """Return a file of six answers."""
    file = tmp_path_factory.mktemp("few") / "few.jsonl"
    file.write_text("".join(LINES[:6]))
    return file


def served(capsys, *arguments, code: int | None = 0):
    status = main(["served", *map(str, arguments), "--target", TARGET, "--json"])
    out, err = capsys.readouterr()
    assert code is None or status == code, err
    return json.loads(out) if status != 2 else err


def test_the_target_s_own_answers_are_as_claimed_and_wrong_claims_are_not(capsys, few) -> None:
    healthy = served(capsys, ANSWERS)
    assert healthy["verdict"] == "as claimed" and healthy["tokens"] == 1536
    assert healthy["largest_log_evidence"] < healthy["limit"] and healthy["impossible"] is None
    for claim, likeliest in (
        (("--temperature", 0.7), ("temperature x 1.5", "temperature 1", "temperature x 1.25")),
        (("--top-p", 0.8), ("no top-p",)),
        (("--top-k", 10, "--temperature", 1), ("no top-k",)),
    ):
        found = served(capsys, few, *claim, code=1)
        assert found["verdict"] == "off" and found["alternatives"][0]["alternative"] in likeliest
        assert (found["impossible"] is not None) == ("--top" in claim[0])
        assert found["off"]["tokens"] < 300
    assert served(capsys, few, "--temperature", 0, code=1)["impossible"]["beyond"] > 1


@thorough
def test_a_band_is_caught_as_lossless_and_not_as_a_band(capsys, pair, tmp_path) -> None:
    file = tmp_path / "band.jsonl"
    prompts = [json.loads(line)["prompt_token_ids"] for line in ANSWERS.read_text().splitlines()]
    options = {"policy": "band:price=0.5", "num_draft_tokens": 4, "max_new_tokens": 96}
    with file.open("w") as out:
        for seed, prompt in enumerate(prompts[:16]):
            ids = torch.tensor([prompt])
            new = ct.generate(pair.target, pair.draft, ids, seed=seed, **options).output_token_ids
            line = {"prompt_token_ids": prompt, "token_ids": new[0].tolist()}
            out.write(json.dumps(line | {"policy": None}) + "\n")
    draft = ("--draft", DRAFT)
    found = served(capsys, file, *draft, code=1)
    assert found["off"] and found["nats_at_least"] >= 0
    told = served(capsys, file, *draft, "--policy", "band:price=0.5", "--draft-mode", "sampled",
                  code=None)  # fmt: skip
    assert told["verdict"] != "off"


BAD = [
    ("{", "must be JSON"),
    ("[1]", "must be a JSON object"),
    ('{"token_ids": [1]}', "must hold prompt_token_ids"),
    ('{"prompt_token_ids": [1]}', "must hold token_ids"),
    ('{"prompt_token_ids": [1], "token_ids": [5000]}', "ids below 2048"),
    ('{"prompt_token_ids": [1], "token_ids": [-1]}', "ids below 2048"),
    ('{"prompt_token_ids": [1], "token_ids": [1.5]}', "must be a list of token ids"),
    ('{"prompt_token_ids": [1], "token_ids": [true]}', "must be a list of token ids"),
    ('{"prompt_token_ids": [1], "token_ids": []}', "its answer is empty"),
    ('{"prompt_token_ids": [], "token_ids": [1]}', "must hold a token"),
    ('{"prompt_token_ids": [1], "token_ids": [1], "min_p": 0.1}', "min_p 0.1 changes the law"),
    ('{"prompt_token_ids": [1], "token_ids": [1], "temperature": -1}', "temperature: must"),
    ('{"prompt_token_ids": [1], "token_ids": [1], "top_p": 0}', "top_p: must"),
    ('{"prompt_token_ids": [1], "token_ids": [1], "policy": "bandd"}', "bandd"),
    ('{"prompt_token_ids": [1], "token_ids": [1], "policy": "band:price=1"}', "needs --draft"),
    (json.dumps({"prompt_token_ids": [1], "token_ids": [1] * 5000}), "positions"),
]


def test_damaged_lines_are_named_and_the_rest_counts(capsys, tmp_path) -> None:
    good, file = ANSWERS.read_text().splitlines()[:4], tmp_path / "a.jsonl"
    bad = [own.encode() for own, _ in BAD]
    whole = [good[0].encode(), b"", b"\xff\xfe", *bad, *(own.encode() for own in good[1:])]
    file.write_bytes(b"\n".join(whole) + b'\n{"prompt_tok')
    found = served(capsys, file, code=None)
    assert found["answers"] == 4 and found["tokens"] == 256 and found["unfinished"]
    assert found["skipped"] == len(BAD) + 1 and found["empty"] == 1
    assert [line for line, _ in found["left_out"]] == list(range(3, 4 + len(BAD)))
    for (_, said), (_, reason) in zip(BAD, found["left_out"][1:], strict=True):
        assert said in reason
    short = {"prompt_token_ids": [1, 2], "token_ids": [3, 4], "min_p": 0, "top_k": -1}
    (tmp_path / "few.jsonl").write_text(json.dumps(short))
    assert served(capsys, tmp_path / "few.jsonl", code=3)["answers"] == 1
    (tmp_path / "none.jsonl").write_text("")
    assert served(capsys, tmp_path / "none.jsonl", code=3)["tokens"] == 0


def test_texts_are_encoded_and_the_loss_is_said(capsys, pair, tmp_path) -> None:
    own, file = answer_of(), tmp_path / "t.jsonl"
    text = pair.tokenizer.decode(own.token_ids, clean_up_tokenization_spaces=False)
    file.write_text(json.dumps({"prompt": "def f(x):", "text": text}) + "\n")
    assert served(capsys, file, code=None)["encoded"] == 1
    main(["served", str(file), "--target", TARGET])
    assert "this evidence is no guarantee" in capsys.readouterr().out


def test_appended_lines_go_on_to_the_same_numbers(capsys, tmp_path) -> None:
    lines = LINES
    file, state = tmp_path / "a.jsonl", tmp_path / "s.json"
    for count in (2, 2, 4, 5):
        file.write_text("".join(lines[:count]) + lines[count][:40] * (count < 5))
        found = served(capsys, file, "--state", state, code=None)
    whole = served(capsys, file)
    assert found == whole and found["answers"] == 5
    for flags, said in (
        (("--temperature", 0.9), "must be of the same claim"),
        (("--alpha", 0.05), "must be of the same alpha"),
        (("--draft", DRAFT), "must be of the same draft"),
        (("--control", file), "--state: must not be given with --control"),
    ):
        assert said in served(capsys, file, "--state", state, *flags, code=2)
    file.write_text("".join(lines[1:8]))
    assert "they have changed" in served(capsys, file, "--state", state, code=2)
    whole = json.loads(state.read_text())
    for name, value in (("own", [1, 2]), ("tokens", -5), ("off", {"line": 1}), ("nats", {})):
        state.write_text(json.dumps(whole | {"evidence": whole["evidence"] | {name: value}}))
        assert "--state: must be whole" in served(capsys, file, "--state", state, code=2)
    state.write_text(json.dumps(whole).replace('"own"', '"owned"'))
    assert "--state: must be whole" in served(capsys, file, "--state", state, code=2)


def test_a_killed_run_goes_on_to_the_same_numbers(capsys, tmp_path, few) -> None:
    """Killed at any time: what was written is whole, and the rest is read again."""
    state, code = tmp_path / "s.json", (
        "import sys; from cactus_theory.served import answers; answers.SECONDS = 0.0; "
        "from cactus_theory.cli import main; main(sys.argv[1:])"
    )  # fmt: skip
    command = [sys.executable, "-c", code, "served", str(few), "--target", TARGET]
    run = subprocess.Popen([*command, "--state", str(state)], cwd=ROOT,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and run.poll() is None:
        if state.exists() and json.loads(state.read_text())["lines"] >= 2:
            break
        time.sleep(0.02)
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    assert 2 <= json.loads(state.read_text())["lines"]
    assert served(capsys, few, "--state", state, code=None) == served(capsys, few, code=None)


def test_a_control_arm_needs_no_right_reference(capsys, tmp_path) -> None:
    """Answers held against the draft as the target: both arms are off it, and alike."""
    lines = [json.loads(line) for line in ANSWERS.read_text().splitlines()]
    for name in ("ours", "same"):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(own) + "\n" for own in lines[:3] * 2))
    found = served(capsys, tmp_path / "ours.jsonl", "--control", tmp_path / "same.jsonl", code=None)
    assert found["control"]["pairs"] == 6 and not found["control"]["off"]
    assert found["control"]["log_evidence"] == pytest.approx(0, abs=1e-9)
    (tmp_path / "other.jsonl").write_text('{"prompt_token_ids": [3], "token_ids": [4]}\n')
    said = served(capsys, tmp_path / "ours.jsonl", "--control", tmp_path / "other.jsonl", code=2)
    assert "--control: must answer prompts" in said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--policy", "band:price=1"), "--draft: must be given with --policy"),
        (("--policy", "band:price=1", "--draft", DRAFT), "--draft-mode: must be given"),
        (("--policy", "regret:price=20", "--draft", DRAFT), "policy: must be one of temperatures"),
        (("--draft-mode", "greedy"), "--draft-mode: must be given with --draft"),
        (("--alpha", "0"), "--alpha: must lie in"),
        (("--slack", "-1"), "--slack: must lie in"),
        (("--edge", "0"), "--edge: must lie in"),
        (("--temperature", "-1"), "--temperature: must"),
        (("--plot", "x.gif"), "--plot: must end in"),
    ],
)
def test_flags_are_checked_before_work(capsys, flags, said) -> None:
    assert said in served(capsys, ANSWERS, *flags, code=2)
    assert "no such file" in served(capsys, "missing.jsonl", code=2)


def test_the_picture_and_the_words(capsys, tmp_path, few) -> None:
    picture = tmp_path / "p.svg"
    pytest.importorskip("matplotlib")
    told = ["served", str(few), "--target", TARGET, "--plot", str(picture)]
    assert main([*told, "--temperature", "0.6"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("OFF: 384 tokens of 6 answers") and "it passed 100 in line" in said
    assert "nats a token off the claim on average (99 %" in said and "<svg" in picture.read_text()
    assert main([*told, "--alpha", "0.5"]) in (0, 3)
    said = " ".join(capsys.readouterr().out.split())
    assert "tokens of 6 answers" in said and "not yet (more tokens): uniform for 0.2%" in said


def test_every_number_is_finite(capsys, few) -> None:
    found = served(capsys, few, "--top-k", 1, code=1)
    assert all(math.isfinite(own["log_evidence"]) for own in found["alternatives"])
    assert np.isfinite(found["nats_at_least"])


def test_lines_run_no_code_and_odd_settings_are_named(capsys, tmp_path) -> None:
    """A line's policy names no file, unless --trust-code; a line that cannot be is left out."""
    code, ran = tmp_path / "mine.py", tmp_path / "ran"
    code.write_text(
        f"open({str(ran)!r}, 'w').close()\nimport cactus_theory as ct\n"
        "@ct.rule(strict=0.0)\ndef rule(q, p, *, delta=0.1):\n    return q\n"
    )
    line = json.loads(LINES[0])
    policies = f"{code}:rule", 5, f"band:price=1,divergence={code}:rule"
    odd = [{"policy": own} for own in policies]
    odd += [{"temperature": "a"}, {"temperature": 1e-300}, {"top_k": "x"}, {"top_p": [1]},
            {"top_k": 10**30}]  # fmt: skip
    file = tmp_path / "odd.jsonl"
    file.write_text("".join(json.dumps(line | own) + "\n" for own in [*odd, {"temperature": "1"}]))
    drafted = "--draft", DRAFT, "--draft-mode", "sampled"
    found = served(capsys, file, *drafted, code=None)
    assert found["answers"] == 1 and [number for number, _ in found["left_out"]] == [*range(1, 9)]
    assert not ran.exists()
    assert served(capsys, file, *drafted, "--trust-code", code=None)["answers"] == 2
    assert ran.exists()
