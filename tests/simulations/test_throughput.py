"""The throughput run: what it keeps through a kill, what it writes, what it says."""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cactus_theory.base.prompts import Prompt
from simulations import throughput as command
from simulations.__main__ import main
from simulations.common.decode import Harness
from simulations.common.grid import Config
from simulations.common.inputs import prompt_ids
from simulations.common.results import read_csv

SMALL = (
    "throughput --policy speculative --policy band:price=1 --policy band:price=0.1 "
    "--policy cactus:delta=0.001 --policy cactus:delta=1 --num-draft-tokens 2 "
    "--batch 1 --num-prompts 2 --max-new-tokens 6 --repeats 1 --metered 1"
).split()
METHODS = ["plain", "hf_plain", "hf_assisted", "speculative", "band", "band", "cactus", "cactus"]
DECODES = len(METHODS) * 2 * 2  # prompts, repeats


def call(out: Path, *more: str) -> list[str]:
    return [*SMALL, "--out", str(out), "--baselines", "plain", "hf_plain", "hf_assisted", *more]


def lines_of(out: Path) -> list[str]:
    return (out / "journal.jsonl").read_text().splitlines()


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Return the folder of a run that died after seven decodes and was taken up, without rich."""
    out, real, made = tmp_path_factory.mktemp("run"), Harness.decode, []

    def dies_after_seven(*arguments, **options):
        if len(made) == 7:
            raise RuntimeError("killed")
        made.append(1)
        return real(*arguments, **options)

    with pytest.MonkeyPatch.context() as deadly:
        deadly.setattr(Harness, "decode", dies_after_seven)
        assert main(call(out)) == 2
    kept = lines_of(out)
    assert main(call(out)) == 0
    return out, kept


def test_a_run_that_dies_is_taken_up_where_it_stopped(resumed: tuple[Path, list[str]]) -> None:
    out, kept = resumed
    assert len(kept) == 1 + 7
    whole = lines_of(out)
    assert whole[:8] == kept
    keys = [json.loads(line)["job"] for line in whole[1:]]
    assert len(keys) == len(set(keys)) == DECODES
    rows, notes = read_csv(out / "throughput.csv")
    assert notes["command"].startswith("python -m simulations throughput --num-prompts 2")
    assert str(out) not in notes["command"] and notes["dtype"] == "float32"  # not auto
    assert [row["method"] for row in rows] == METHODS
    assert all(float(row["tokens_per_second"]) > 0 for row in rows)
    assert abs(float(rows[3]["emitted_kl_per_token"])) < 1e-9
    assert float(rows[5]["emitted_kl_per_token"]) > float(rows[4]["emitted_kl_per_token"]) > 0


@pytest.mark.parametrize(("large", "threads"), [(0, "2 threads"), (1 << 40, "1 thread")])
def test_a_large_target_has_all_cores(tmp_path: Path, monkeypatch, large, threads) -> None:
    monkeypatch.setattr("cactus_theory.commands.models.LARGE", large)
    small = [*SMALL[:1], "--policy", "speculative", *SMALL[11:], "--out", str(tmp_path)]
    torch.set_num_threads(2)
    try:
        assert main([*small, "--baselines", "--max-new-tokens", "2", "--num-prompts", "1"]) == 0
    finally:
        torch.set_num_threads(1)
    assert read_csv(tmp_path / "throughput.csv")[1]["machine"].endswith(f", {threads}")


def test_prompts_may_go_on_a_text_and_another_token_may_end_it(monkeypatch) -> None:
    parser, asked, prompts = argparse.ArgumentParser(), [], [Prompt("ab")]
    command.add_arguments(parser)

    class Tokenizer:
        chat_template = bos_token_id = None

        def __call__(self, text, add_special_tokens):
            asked.append(add_special_tokens)
            return {"input_ids": [len(text)]}

    pair = SimpleNamespace(
        target=SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=0)),
        tokenizer=Tokenizer(),
    )
    assert prompt_ids(parser.parse_args([]), pair, prompts) == [[2]]
    assert pair.target.generation_config.eos_token_id == 0
    args = parser.parse_args(["--no-start", "--eos-token-ids", "1", "7"])
    assert prompt_ids(args, pair, prompts) == [[2]] and asked == [True, False]
    assert pair.target.generation_config.eos_token_id == [1, 7]


def test_a_finished_run_is_judged_again_without_a_model(resumed, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "loaded", None)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(call(resumed[0])) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines()[1:])) <= 80
    assert "batch 1, every method at its fastest K" in said
    assert "band:price=1.0" in said


@pytest.mark.parametrize("flags", [["--no-start"], ["--eos-token-ids", "1"], ["--seed", "9"]])
def test_where_texts_begin_and_end_and_the_seed_decide_a_run(flags) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    lines, prompts = [Config("band:price=2", 2)], [Prompt("text")]
    settings = [command._settings(parser.parse_args(own), lines, prompts) for own in ([], flags)]
    assert settings[0] != settings[1]


def test_a_changed_rule_file_makes_another_run(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    rule, found = tmp_path / "mine.py", []
    for text in ("a = 1", "a = 1", "a = 2"):
        rule.write_text(text)
        lines = [Config(f"{rule}:blend:alpha=0.5", 2), Config("band:price=2", 2)]
        found.append(command._settings(parser.parse_args([]), lines, [Prompt("text")]))
    assert found[0] == found[1] != found[2]
