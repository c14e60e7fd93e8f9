"""Blocks compared as a user does it: files, refusals."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("safetensors")

from cactus_theory.traces import Trace, replay, save_trace  # noqa: E402
from cactus_theory.traces.estimate import tokens_at  # noqa: E402
from simulations import blocks  # noqa: E402
from simulations.__main__ import main  # noqa: E402
from simulations.blocks import REFERENCE, Family, deterministic_families, families  # noqa: E402
from simulations.common.results import read_csv  # noqa: E402
from tests.amounts import THOROUGH  # noqa: E402

EXAMPLE = Path(__file__).resolve().parents[2] / "simulations" / "data" / "trace"
TABLE = ("table", "blocks")
LEVEL = 0.03
BLOCKS = f"--num-draft-tokens 2 --levels {LEVEL}".split()


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let families have two knob values on either side of the level; fewer of them if in haste."""
    monkeypatch.setattr(blocks, "DELTAS", (1e-4, 0.03))
    monkeypatch.setattr(blocks, "BUDGETS", (0.005, 0.4))
    monkeypatch.setattr(blocks, "PRICES", (8.0, 0.45))
    monkeypatch.setattr(blocks, "PRICES_AHEAD", (20.0, 1.0, 0.45))
    monkeypatch.setattr(blocks, "families", taken)


def taken() -> list[Family]:
    """Return all families, or those without a budget."""
    return [family for family in families() if THOROUGH or "delta" not in family.name]


def test_blocks_are_compared(few, tmp_path, capsys) -> None:
    arguments = [*TABLE, str(EXAMPLE), *BLOCKS]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    assert REFERENCE in capsys.readouterr().out
    written, notes = read_csv(tmp_path / "blocks.csv")
    assert notes["command"] == (
        f"python -m simulations table blocks trace --num-draft-tokens 2 --levels {LEVEL}"
    )
    assert (notes["trace"], notes["cycles"], notes["texts"]) == ("trace", "68", "11")
    known = taken()
    names = {level: [r["family"] for r in written if float(r["kl_per_token"]) == level]
             for level in (0.0, LEVEL)}  # fmt: skip
    assert names[0.0] == [family.name for family in known if family.lossless]
    assert names[LEVEL] == [family.name for family in known if not family.lossless]
    check_numbers(written, known)


def check_numbers(written: list[dict], known: list) -> None:
    """Hold some cells to replays made here."""
    for name in (REFERENCE, "band:price, block"):
        family = next(own for own in known if own.name == name)
        row = next(own for own in written if own["family"] == name)
        own = [
            replay(EXAMPLE, policy, family.verifier, num_draft_tokens=2)
            for policy in family.policies
        ]
        assert float(row["tokens_per_call"]) == pytest.approx(tokens_at(own, LEVEL).value)
        assert (float(row["ratio"]) == 1) == (name == REFERENCE)
        assert (float(row["ratio_se"]) == 0) == (name == REFERENCE)


@pytest.fixture(scope="module")
def deterministic(tmp_path_factory) -> Path:
    """Return the example as if its drafter had been deterministic."""
    example = Trace.open(EXAMPLE)
    texts: dict[int, list] = {}
    for cycle in example:
        texts.setdefault(cycle.text, []).append(replace(cycle, draft_probs=None))
    folder = tmp_path_factory.mktemp("deterministic") / "trace"
    save_trace(folder, texts.values(), vocab_size=example.header.vocab_size, num_draft_tokens=4)
    return folder


def test_looking_ahead_along_deterministic_drafts_is_worth_tokens(
    deterministic, few, tmp_path, capsys
) -> None:
    level = "0.05"
    arguments = [*TABLE, str(deterministic), "--num-draft-tokens", "4", "--levels", level]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    written, notes = read_csv(tmp_path / "blocks.csv")
    tokens = {row["family"]: float(row["tokens_per_call"]) for row in written}
    assert list(tokens) == [knobs.name for knobs in deterministic_families()]
    ahead, alone = (tokens[f"band:price{knobs}, block"] for knobs in ("", ",per_row=True"))
    # a deterministic draft ends at its first refusal under either verifier
    assert alone == pytest.approx(tokens[REFERENCE])
    assert ahead > alone
    assert json.loads(notes["trace_made"])["num_draft_tokens"] == 4
