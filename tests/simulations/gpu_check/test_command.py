"""What is timed, in which order, what fails, and the files."""

import importlib
import re

import pytest
import torch

from cactus_theory.decoding import generate
from cactus_theory.decoding.text import left_padded
from simulations.__main__ import main
from simulations.common.inputs import PROMPTS, load_prompts
from simulations.common.results import read_csv
from simulations.gpu_check import command, timings

CPU = torch.device("cpu")
REHEARSAL = ["gpu-check", "--device", "cpu"]


def test_without_a_gpu_one_line_says_so(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["gpu-check", "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_piece_that_fails_or_hangs_does_not_stop_the_next(tmp_path, monkeypatch, capsys):
    pieces = {
        "bad": command.Piece(20, ("-c", "print('FAILED a::b'); raise SystemExit(3)")),
        "long": command.Piece(1, ("-c", "import time; print('a', flush=True); time.sleep(60)")),
        "good": command.Piece(20, ("-c", "print('3 passed')")),
    }
    monkeypatch.setattr(command, "PIECES", pieces)
    assert main([*REHEARSAL, "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    for name, how, last in (
        ("bad", "exit 3", "FAILED a::b"),
        ("long", "stopped after 1 s", "a"),
        ("good", "well", "3 passed"),
    ):
        assert re.search(rf"^{name} +{how}, [\d.]+ s: {last} \(", said, re.M), said
    assert "bad: FAILED a::b" in said.partition("\n\n")[2]  # named again in the summary
    assert main([*REHEARSAL, "good", "--out", str(tmp_path)]) == 0  # a piece by its name alone
    assert "bad" not in capsys.readouterr().out.partition("\n\n")[0]
    monkeypatch.setattr(command, "ALL", 0)
    assert main([*REHEARSAL, "good", "--out", str(tmp_path)]) == 1
    assert "good       not run: 0 s are over" in capsys.readouterr().out


def test_jobs_that_fail_are_named_and_rows_are_kept_as_they_come(tmp_path, monkeypatch, capsys):
    kept = []

    def jobs(bench):
        yield "a", lambda: {"step": "x", "us": 1.0}
        yield "b", lambda: kept.append(len(read_csv(tmp_path / "t.csv")[0])) or 1 // 0
        yield "c", lambda: {"step": "y", "us": None}

    monkeypatch.setattr(command, "PIECES", {"t": command.Piece(9, table="t", jobs=jobs)})
    assert main([*REHEARSAL, "--here", "--out", str(tmp_path)]) == 1
    rows, origin = read_csv(tmp_path / "t.csv")
    assert kept == [1] and [row["step"] for row in rows] == ["x", "y"]
    assert origin["device"] == "cpu (rehearsal)"
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("a: done") and said[1].startswith("b: ZeroDivisionError")


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    out = tmp_path_factory.mktemp("rehearsed")
    for name in ("verify", "decode"):
        assert main([*REHEARSAL, name, "--here", "--seed", "3", "--out", str(out)]) == 0
    return out


def test_every_table_is_made_drawn_and_summed_up(rehearsed):
    verify, decode = (read_csv(rehearsed / f"gpu_{name}.csv")[0] for name in ("verify", "decode"))
    assert {(row["policy"], row["verifier"]) for row in verify} == set(timings.STEPS)
    timed = ("floor_us", "softmax_us", "torch_us")
    assert all(float(row[name]) > 0 for row in verify for name in timed)
    assert {row["kernel_us"] for row in verify} == {""}  # no kernel runs on a CPU
    passes, plain = decode[:2]
    assert passes["loop"] == "passes alone" and float(passes["round_ms"]) > 0
    assert (plain["policy"], plain["over_passes"]) == ("plain", "")
    loops = [row["loop"] for row in decode]
    assert loops[1:] == ["device"] * 6 + ["host"] * 2
    pytest.importorskip("matplotlib")
    fig_gpu = importlib.import_module("paper_figures.fig_gpu")
    assert [axes.axison for axes in fig_gpu.draw(rehearsed).axes] == [True, True]


def test_rows_are_what_the_usual_loop_measures(rehearsed):
    rows, _ = read_csv(rehearsed / "gpu_decode.csv")
    row = next(row for row in rows if (row["policy"], row["verifier"]) == ("cactus", "chain"))
    pair = timings.shipped(CPU)
    prompts = load_prompts(PROMPTS, pair.tokenizer)[: int(row["batch"])]
    ids, mask = left_padded(prompts, pair.target)
    options = {"policy": f"cactus:{row['knob']}", "num_draft_tokens": int(row["num_draft_tokens"])}
    options |= {"max_new_tokens": timings.TINY_NEW_TOKENS, "attention_mask": mask, "seed": 3}
    result = generate(pair.target, pair.draft, ids, **options)
    assert float(row["tokens_per_call"]) == result.reading.tokens_per_call
    assert float(row["accepted_per_call"]) == result.reading.accepted_per_call
    spent = (result.reading.emitted_divergence or 0.0) / result.num_tokens
    assert float(row["emitted_kl_per_token"]) == pytest.approx(spent, rel=1e-4)  # float32 rows


def test_random_numbers_of_a_timed_step_go_on_in_place():
    given = timings.Inputs((2, 3, 17), CPU, seed=0)
    coins, before = given.coins, given.coins.clone()
    given.advance()
    assert given.positions.tolist() == [timings.POSITION + 4] * 2
    assert given.coins is coins and not torch.equal(coins, before)


@pytest.mark.gpu
def test_a_job_that_reads_on_the_host_is_timed_without_a_graph():
    cuda = torch.device("cuda")
    numbers = torch.arange(1000.0, device=cuda)
    works = {"here": lambda: numbers * 2, "host": lambda: float(numbers.sum())}
    found = timings.interleaved(works, cuda)
    assert found["here"].graph and not found["host"].graph and found["host"].us > 0
