"""Log and replay as a user does: commands in, tables, CSV and JSON out."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from cactus_theory.cli import main as cactus
from cactus_theory.traces import Cycle, Trace, replay, save_trace
from simulations.__main__ import main
from simulations.common.results import read_csv
from tests.traces.conftest import rows_of

pytest.importorskip("safetensors")
EXAMPLE = Path(__file__).resolve().parents[3] / "simulations" / "data" / "trace"
LOG = "trace --cycles 3 --max-new-tokens 4 --num-draft-tokens 2".split()
POLICIES = ["speculative", "band:price=1.0", "band:price=4.0"]
CHOSEN = [word for policy in POLICIES for word in ("--policy", policy)]


def test_a_trace_is_logged_and_taken_up(tmp_path: Path, capsys) -> None:
    pytest.importorskip("transformers")
    assert main([*LOG, "--out", str(tmp_path / "t")]) == 0
    trace = Trace.open(tmp_path / "t")
    assert len(trace) >= 3 and (trace.header.target, trace.header.draft) == ("target", "draft")
    assert trace.header.eos_token_ids == [0]  # the target's own
    said = capsys.readouterr().out
    assert f"{len(trace)} cycles of {trace.texts} texts, K = 2, V = 2048" in said
    assert f"{32 - trace.texts} of 32 prompts were not reached" in said
    assert str(Path.home()) not in (tmp_path / "t" / "manifest.json").read_text()
    assert main([*LOG, "--out", str(tmp_path / "t")]) == 0
    assert main([*LOG, "--seed", "1", "--out", str(tmp_path / "t")]) == 2
    assert "belongs to a trace with another seed (0, now 1)" in capsys.readouterr().err
    assert main([*LOG, "--seed", "1", "--out", str(tmp_path / "u")]) == 0
    drawn = (Trace.open(tmp_path / name).header.details["prompts_sha256"] for name in "tu")
    assert next(drawn) != next(drawn)  # in another order


def test_replays_are_printed_and_written(tmp_path: Path, capsys) -> None:
    out = tmp_path / "r.csv"
    options = ["--verifier", "chain", "block", "--num-draft-tokens", "2"]
    assert main(["replay", str(EXAMPLE), *CHOSEN, *options, "--out", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    found = [
        replay(EXAMPLE, policy, verifier, num_draft_tokens=2)
        for verifier in ("chain", "block")
        for policy in POLICIES
    ]
    assert [said[name] for name in ("trace", "cycles", "texts")] == ["trace", 68, 11]
    for row, own in zip(said["replays"], found, strict=True):
        assert (row["policy"], row["verifier"]) == (own.policy, own.verifier)
        for name, estimate in (
            ("tokens_per_call", own.tokens_per_call),
            ("kl_per_token", own.divergence_per_token()),
            ("tokens_difference", own.tokens_per_call - found[0].tokens_per_call),
        ):
            assert row[name] == estimate.value
            assert row[f"{name}_se"] == estimate.standard_error
    written, notes = read_csv(out)
    assert [row["policy"] for row in written] == 2 * POLICIES
    assert notes["trace"] == "trace"
    assert notes["command"] == (
        f"python -m simulations replay trace --policy {' '.join(POLICIES)} "
        "--verifier chain block --num-draft-tokens 2"
    )
    assert float(written[1]["tokens_per_call"]) == pytest.approx(found[1].tokens_per_call.value)


def test_a_policy_is_left_out_of_a_verifier_by_name(capsys) -> None:
    both = ["--policy", "typical", "--policy", "speculative", "--verifier", "chain", "block"]
    assert main(["replay", str(EXAMPLE), *both, "--num-draft-tokens", "1", "--json"]) == 0
    printed = capsys.readouterr()
    assert "can only be verified with chain: left out of block" in printed.err
    made = [(own["policy"], own["verifier"]) for own in json.loads(printed.out)["replays"]]
    assert made == [("typical", "chain"), ("speculative", "chain"), ("speculative", "block")]
    # one that no verifier of the table can follow does not end it
    alone = ["replay", str(EXAMPLE), "--num-draft-tokens", "1", "--json", "--verifier", "block"]
    assert main([*alone, "--policy", "typical", "speculative"]) == 0
    printed = capsys.readouterr()
    assert "typical can only be verified with chain" in printed.err
    assert [own["policy"] for own in json.loads(printed.out)["replays"]] == ["speculative"]
    assert main([*alone, "--policy", "typical"]) == 2
    assert "needs a policy with a row of its own" in capsys.readouterr().err


def test_a_trace_is_audited_and_solved_as_its_rows_are(tmp_path: Path, capsys) -> None:
    source = torch.Generator().manual_seed(0)
    cycles = [
        Cycle(0, number, torch.tensor([2, 1]), rows_of(source, 3, 4), rows_of(source, 2, 4))
        for number in range(2)
    ]
    trace = save_trace(tmp_path / "t", [cycles], vocab_size=4, num_draft_tokens=2)
    files = [str(tmp_path / "q.npy"), str(tmp_path / "p.npy")]
    for file, own in zip(files, trace.rows(), strict=True):
        np.save(file, own.numpy())
    for command in (["audit", "--policy", "cactus:delta=0.1"], ["solve", "--price", "1"]):
        said = []
        for given in (files, [str(tmp_path / "t")]):
            assert cactus([command[0], *given, *command[1:], "--json"]) == 0
            said.append(json.loads(capsys.readouterr().out))
        assert said[0] == said[1]
        assert len(said[0]["acceptance"]) == 4
