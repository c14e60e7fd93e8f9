"""The command as a user meets it, its file, and ``generate`` told by that file."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

import cactus_theory as ct
import cactus_theory.commands.tune
from cactus_theory import commands
from cactus_theory.cli import _parser, main
from cactus_theory.commands.models import decoding
from cactus_theory.decoding import generate, load_pair
from tests.amounts import some, thorough

PAIR = Path(__file__).resolve().parents[2] / "simulations" / "pair"
MODELS = ("--target", str(PAIR / "target"), "--draft", str(PAIR / "draft"))
TUNE = ("tune", "--nats", "0.05", "--policy", "band:price", "--num-draft-tokens")


def run_json(capsys, *arguments: str) -> dict:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def alone(trace) -> tuple[str, ...]:
    return "--trace", str(trace.folder), "--cost-ratio"


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.txt"
    path.write_text("def f(x):\n    return\n\nimport os\nclass A:\n")
    return str(path)


@pytest.mark.parametrize("verifier", some(["block", "chain"], 1))
def test_generate_does_what_the_file_says(tmp_path: Path, capsys, alone, verifier: str) -> None:
    out = tmp_path / "tuned.json"
    found = run_json(capsys, *TUNE, "3", *alone, "0.05", "--out", str(out))
    assert json.loads(out.read_text()) == found
    best = next(own for own in found["table"]
                if own["verifier"] == verifier and own["family"] == "band:price")  # fmt: skip
    out.write_text(json.dumps(found | {"recommended": best}))
    tuned = ct.load_tuned(out)
    assert tuned.policy == ct.policy(best["policy"]) and tuned.verifier == verifier
    asked = ("generate", *MODELS, "--prompt", "def f(", "--max-new-tokens", "12", "--seed", "3")
    told = run_json(capsys, *asked, "--tuned", str(out))
    flags = ("--policy", best["policy"], "--verifier", verifier, "--num-draft-tokens", "3")
    by_flags = run_json(capsys, *asked, *flags)
    for name in ("policy", "verifier", "text", "acceptance_histogram", "emitted_kl_per_token"):
        assert told[name] == by_flags[name]
    pair = load_pair(PAIR / "target", PAIR / "draft")
    tuned.check_pair(pair.target, pair.draft)
    ids = torch.tensor([pair.tokenizer.encode("def f(")])
    result = generate(pair.target, pair.draft, ids, **tuned.options, max_new_tokens=12, seed=3)
    assert list(result.reading.acceptance_histogram) == told["acceptance_histogram"]


def test_a_policy_that_spends_more_at_every_setting_is_named(capsys, alone) -> None:
    """Each policy that was asked for has a line or a sentence."""
    asked = ("tune", "--nats", "0.05", "--num-draft-tokens", "1", *alone, "0.1")
    said = r"No setting of mixture:alpha=0.9 spends at most 0.05 nats of KL per token: the least is"
    assert main([*asked, "--policy", "mixture:alpha=0.9"]) == 1
    assert said in capsys.readouterr().out
    assert main([*asked, "--policy", "mixture:alpha=0.9", "--policy", "cactus"]) == 0
    out = capsys.readouterr().out
    assert said in out and "cactus:delta=" in out
    assert main([*asked, "--policy", "mixture:alpha=0.9", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["over"]["mixture:alpha=0.9"] > 0.05


def test_plain_decoding_is_told_too(tmp_path: Path, capsys, alone) -> None:
    out = tmp_path / "tuned.json"
    assert main([*TUNE, "1", *alone, "9", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "Decode without this draft: plain decoding makes 1.000" in said
    assert f"generate --target DIR --draft DIR --tuned {out} --prompt TEXT\n" in said
    tuned = ct.load_tuned(out)
    assert tuned.plain and tuned.policy is None
    with pytest.raises(ValueError, match="plain decoding was faster"):
        _ = tuned.options
    asked = ("generate", *MODELS, "--prompt", "def f(", "--max-new-tokens", "6")
    told = run_json(capsys, *asked, "--tuned", str(out))
    assert told["policy"] == "plain" and told["draft_calls"] == 0 and told["num_tokens"] <= 6
    assert main([*asked, "--tuned", str(out)]) == 0
    assert f"the fastest in {out}: nothing is drafted" in capsys.readouterr().err
    assert main([*asked, "--tuned", str(out), "--cap", "0.1"]) == 2
    assert f"--cap: {out} is of plain decoding" in capsys.readouterr().err


def test_the_command_that_decodes_reads_models_as_they_were_tuned() -> None:
    words = ["tune", *TUNE[1:], "3", "--target", "my model", "--draft", "ngram", "--prompts", "p",
             "--out", "t.json", "--revision", "a", "b", "--chat", "--system", "Be brief.",
             "--trust-code"]  # fmt: skip
    for kind in ([], ["--dtype", "float32", "--device", "cuda"]):
        said = decoding(_parser().parse_args([*words, *kind]))
        args = _parser().parse_args([*shlex.split(said)[1:], "--prompt", "x"])
        told = _parser().parse_args([*words, *kind])
        for name in ("target", "draft", "revision", "dtype", "device", "chat", "system"):
            assert getattr(args, name) == getattr(told, name)
        assert args.tuned == "t.json" and args.trust_code


def test_models_are_logged_timed_and_tuned_once(
    tmp_path: Path, capsys, prompts: str, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small = ("--cycles", "6", "--max-new-tokens", "6", "--threads", "1")
    asked = (*CHEAP, "1", "3", *MODELS, "--prompts", prompts, "--batch", "2", *small)
    assert main([*asked, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["unit"] == "tokens/s" and first["costs"]["widths"] == [1, 3]
    assert first["costs"]["batch"] == 2 and 0 < first["costs"]["new_tokens"] <= 6
    (work,) = (tmp_path / "build/tune").iterdir()  # kept unasked
    shards = {path: path.stat().st_mtime_ns for path in (work / "trace").iterdir()}
    again = run_json(capsys, *asked)
    assert {path: path.stat().st_mtime_ns for path in (work / "trace").iterdir()} == shards
    specs = [{(own["policy"], own["num_draft_tokens"]) for own in made["table"]}
             for made in (first, again)]  # fmt: skip
    assert specs[0] == specs[1]  # speeds are measured anew
    saved = tmp_path / "tuned.json"
    saved.write_text(json.dumps(again | {"level": 1e-15}))
    floor = again["source"]["noise_floor"]["per_token"]
    assert floor > 1e-15 and ct.load_tuned(saved).noise_floor == floor
    spoken = ("generate", *MODELS, "--prompt", "x", "--max-new-tokens", "1", "--tuned", str(saved))
    assert main(spoken) == 0
    said = f"the budget of 1e-15 nats a token is below the {floor:.3g} by which"
    assert said in capsys.readouterr().err
    saved.write_text(json.dumps(again))
    assert main(spoken) == 0 and "below the" not in capsys.readouterr().err
    weights = {name: first["source"][name] for name in ("target_weights", "draft_weights")}
    swapped = tmp_path / "other.json"
    swapped.write_text(json.dumps(first | {"source": first["source"] | {
        "draft_weights": weights["target_weights"]}}))  # fmt: skip
    generating = ("generate", *MODELS, "--prompt", "x", "--tuned", str(swapped))
    assert main(generating) == 2
    assert "was made for another draft" in capsys.readouterr().err


@thorough
def test_a_head_is_tuned_as_a_draft_is(tmp_path: Path, capsys, prompts: str) -> None:
    head = "--target", MODELS[1], "--draft", str(PAIR / "head")
    out = tmp_path / "tuned.json"
    small = ("--cycles", "6", "--max-new-tokens", "6", "--threads", "1", "--prompts", prompts)
    found = run_json(capsys, *CHEAP, "2", *head, *small, "--out", str(out))
    assert found["source"]["dtype"] == "float32"
    best = next(own for own in found["table"] if own["family"] == "speculative")
    out.write_text(json.dumps(found | {"recommended": best}))
    asked = ("generate", "--prompt", "x", "--max-new-tokens", "4", "--tuned", str(out))
    assert run_json(capsys, *asked, *head)["policy"] == "speculative"
    assert main([*asked, *MODELS]) == 2
    assert "tuned: was made for another draft (Eagle3Drafter" in capsys.readouterr().err


def test_the_table_fits_and_says_what_was_chosen(capsys, alone, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main([*TUNE, "1", "4", *alone, "0.05"]) == 0
    said = capsys.readouterr().out
    lines = said.strip().split("\n")
    chosen = next(number for number, line in enumerate(lines) if line.startswith("Decode"))
    lines, sentence = lines[:chosen], lines[chosen]
    assert max(map(len, lines)) <= 100 and "plain" in said and "speculative" in said
    assert sentence.startswith("Decode with band:price=") and "times plain decoding" in sentence
    # on the half that is reported, which depends on the last digits of the models' logits
    assert re.search(r"it will meter 0\.0[45]\d* nats of KL per token \(± 0\.0\d+\)", sentence)


CHEAP = (
    "tune",
    "--nats",
    "0.05",
    "--policy",
    "mixture:alpha",
    "--num-draft-tokens",
)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "must be a JSON file"),
        ('{"format": "x"}', "got 'x'"),
        ('{"format": "cactus-theory tuned", "version": 3}', "version must be 2; got 3"),
        ('{"format": "cactus-theory tuned", "version": 2}', "must hold what was recommended"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "tuned.json").write_text(content)
    with pytest.raises(ValueError, match=said):
        ct.load_tuned(tmp_path / "tuned.json")


def test_prompts_are_drawn_from_the_whole_of_a_sorted_file(tmp_path: Path, monkeypatch) -> None:
    lengths: list[int] = []

    def stop(pair, ids, *_, **__):
        lengths.extend(map(len, ids))
        raise ValueError("nothing is logged")

    monkeypatch.setattr(commands.tune, "log_shown", stop)
    lines = ["short"] * 12 + ["long " * 12] * 12
    (tmp_path / "p.txt").write_text("\n".join(lines))
    assert main([*TUNE, "1", *MODELS, "--prompts", str(tmp_path / "p.txt")]) == 2
    assert len(lengths) == 24 and len(set(lengths[:10])) == 2
