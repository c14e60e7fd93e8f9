"""Log as a user does, and read what was logged: commands in, tables and JSON out."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from cactus_theory.cli import main as cactus
from cactus_theory.traces import Cycle, Trace, save_trace
from simulations.common.inputs import PAIR, PROMPTS
from tests.traces.conftest import rows_of

pytest.importorskip("safetensors")
LOG = (f"trace --target {PAIR}/target --draft {PAIR}/draft --prompts {PROMPTS} --cycles 3 "
       "--max-new-tokens 4 --num-draft-tokens 2").split()  # fmt: skip


def test_a_trace_is_logged_and_taken_up(tmp_path: Path, capsys) -> None:
    pytest.importorskip("transformers")
    assert cactus([*LOG, "--out", str(tmp_path / "t")]) == 0
    trace = Trace.open(tmp_path / "t")
    assert len(trace) >= 3 and (trace.header.target, trace.header.draft) == ("target", "draft")
    assert trace.header.eos_token_ids == [0]  # the target's own
    said = capsys.readouterr().out
    assert f"{len(trace)} cycles of {trace.texts} texts, K = 2, V = 2048" in said
    assert f"{32 - trace.texts} of 32 prompts were not reached" in said
    assert str(Path.home()) not in (tmp_path / "t" / "manifest.json").read_text()
    assert cactus([*LOG, "--out", str(tmp_path / "t")]) == 0
    assert cactus([*LOG, "--seed", "1", "--out", str(tmp_path / "t")]) == 2
    assert "belongs to a trace with another seed (0, now 1)" in capsys.readouterr().err
    assert cactus([*LOG, "--seed", "1", "--out", str(tmp_path / "u")]) == 0
    drawn = (Trace.open(tmp_path / name).header.details["prompts_sha256"] for name in "tu")
    assert next(drawn) != next(drawn)  # in another order


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
