"""The throughput run: what it covers, what it keeps through a kill, what its table says."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from simulations.__main__ import main
from simulations.results import read_csv
from simulations.throughput import command, table
from simulations.rows import prompts_of
from simulations.throughput.grid import Config, configs, jobs
from simulations.throughput.journal import Journal
from simulations.throughput.quality import parses_so_far

SMALL = (
    "throughput --policies speculative band:price=0.5 --baselines plain hf_plain hf_assisted "
    "--num-draft-tokens 2 --batch 1 --num-prompts 2 --max-new-tokens 6 --repeats 1"
).split()
DECODES = 5 * 2 * 2  # methods, prompts, repeats


def lines_of(out: Path) -> list[str]:
    return (out / "journal.jsonl").read_text().splitlines()


def test_grid_gives_k_to_what_drafts_and_batches_to_what_takes_them() -> None:
    found = configs(["plain", "hf_assisted"], ["speculative"], [2, 4], [1, 8])
    assert found == [
        Config("plain", 0, 1),
        *(Config("hf_assisted", k, 1) for k in (2, 4)),
        *(Config("speculative", k, 1) for k in (2, 4)),
        Config("plain", 0, 8),
        *(Config("speculative", k, 8) for k in (2, 4)),
    ]


def test_jobs_are_interleaved_and_cover_every_prompt_once_a_repeat() -> None:
    lines = [Config("plain", 0, 1), Config("plain", 0, 4)]
    todo = list(jobs(lines, prompts=6, repeats=2))
    assert len({job.key for job in todo}) == len(todo) == 3 * (6 + 2)
    assert [job.repeat for job in todo] == sorted(job.repeat for job in todo)
    first = [job.config for job in todo[:2]]
    assert first == lines


def test_a_run_that_dies_is_taken_up_where_it_stopped(tmp_path: Path, monkeypatch) -> None:
    out, made = tmp_path / "run", []
    real = command.decode

    def dies_after_seven(*arguments, metered: bool):
        if len(made) == 5 + 7:  # five untimed warm-ups come first
            raise RuntimeError("killed")
        made.append(1)
        return real(*arguments, metered=metered)

    monkeypatch.setattr(command, "decode", dies_after_seven)
    assert main([*SMALL, "--out", str(out)]) == 2
    kept = lines_of(out)
    assert len(kept) == 1 + 7
    monkeypatch.setattr(command, "decode", real)
    assert main([*SMALL, "--out", str(out)]) == 0
    whole = lines_of(out)
    assert whole[:8] == kept
    keys = [json.loads(line)["job"] for line in whole[1:]]
    assert len(keys) == len(set(keys)) == DECODES
    rows, _ = read_csv(out / "throughput.csv")
    assert [row["method"] for row in rows] == [
        "plain", "hf_plain", "hf_assisted", "speculative", "band",
    ]  # fmt: skip
    assert all(float(row["tokens_per_second"]) > 0 for row in rows)
    assert abs(float(rows[3]["emitted_kl_per_token"])) < 1e-9
    assert float(rows[4]["emitted_kl_per_token"]) > 0


def test_a_killed_process_leaves_a_journal_that_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    call = [sys.executable, "-m", "simulations", *SMALL, "--out", str(out)]
    process = subprocess.Popen(call, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    journal = out / "journal.jsonl"
    patience = time.monotonic() + 120
    while time.monotonic() < patience and process.poll() is None:
        if journal.exists() and journal.read_bytes().count(b"\n") > 3:
            os.kill(process.pid, signal.SIGKILL)
            break
        time.sleep(0.005)
    process.wait()
    with journal.open("ab") as file:
        file.write(b'{"job":"half')
    kept = [line for line in lines_of(out) if not line.endswith("half")]
    assert main([*SMALL, "--out", str(out)]) == 0
    whole = lines_of(out)
    assert whole[: len(kept)] == kept
    assert len(whole) == len({json.loads(line).get("job") for line in whole}) == 1 + DECODES


def test_another_run_is_not_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path, {"seed": 0, "room": 5}) as journal:
        journal.add("a", {"seconds": 1.5})
    with Journal(path, {"room": 5, "seed": 0}) as journal:
        assert journal.results == {"a": {"seconds": 1.5}}
    with pytest.raises(ValueError, match="another seed"):
        Journal(path, {"seed": 1, "room": 5})


def test_ratios_are_medians_of_runs_made_side_by_side() -> None:
    lines = [Config("plain", 0, 1), Config("speculative", 4, 1)]
    seconds = {"plain": [9.0, 1.0, 2.0, 4.0], "speculative": [9.0, 0.5, 1.0, 4.0]}
    results = {
        job.key: {"seconds": seconds[job.config.method][job.repeat], "tokens": 8}
        | {"log_likelihood": [-2.0], "lengths": [8], "parses": [job.group == 0]}
        for job in jobs(lines, prompts=1, repeats=3)
    }
    plain, drafted = table.rows(lines, {1: 1}, 3, results)
    assert plain["speedup_over_plain"] == 1
    assert drafted["speedup_over_plain"] == 2
    assert plain["tokens_per_second"] == 4 and plain["tokens_per_second_max"] == 8
    assert drafted["target_nats_per_token"] == 2 and drafted["parses"] == 1


@pytest.mark.parametrize(
    ("prompt", "completion", "verdict"),
    [
        ("def f(x):\n", "    return x\n", True),
        ("def f(x):\n", "    return x\n    retu", True),
        ("def f(x):\n", "return x\n", False),
        ("def f(x):\n", "    return x +\n", False),
        ('def f(x):\n    """Do', "uble x.\n\n", True),
        ("x = (1,\n", "2, 3\n", True),
        ("def f(x):", " pass", None),
        ("def f(:\n", "a\n", None),
    ],
)
def test_completions_are_judged_by_the_python_compiler(prompt, completion, verdict) -> None:
    assert parses_so_far(prompt, completion) is verdict


@pytest.mark.parametrize(
    ("line", "said"),
    [("{", "line 2 of p.jsonl must be JSON"), ('{"a": 1}', "must hold a text"), ("3", "must hold")],
)
def test_prompts_that_cannot_be_read_are_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"turns": ["Hello", "again"]}\n' + line + "\n")
    with pytest.raises(ValueError, match=said):
        prompts_of(path)
    path.write_text('{"turns": ["Hello", "again"]}\n{"question": "Why?"}\n')
    assert prompts_of(path) == ["Hello", "Why?"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--baselines", "vllm"], "--baselines: must be among"),
        (["--baselines", "hf_mixture"], "needs a weight"),
        (["--policies", "cactuss"], "cactuss"),
        (["--batch", "0"], "--batch: must be at least 1"),
        (["--num-draft-tokens", "0"], "--num-draft-tokens: must be at least 1"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, capsys, arguments: list[str], said: str) -> None:
    assert main(["throughput", "--out", str(tmp_path), *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.strip().splitlines()) == 1
