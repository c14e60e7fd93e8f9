"""Acceptance records of engines, written after their documentation (2026-11-29).

vLLM: docs/features/speculative_decoding/acceptance_metrics.md (its own numbers). SGLang:
meta_info of its tokenizer manager. AIPerf: docs/reference/spec-decode-acceptance.md, and its
profile_export.jsonl.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from cactus_theory.cli import main
from cactus_theory.traces.records import read_records

pytest.importorskip("safetensors")

VLLM = {
    "mean_acceptance_length": 1.2325581395348837,
    "draft_acceptance_rate": 0.07751937984496124,
    "acceptance_histogram": [39, 1, 0, 3],
    "num_spec_steps": 43,
    "num_accepted_draft_tokens": 10,
    "num_draft_tokens": 129,
    "num_spec_tokens": 3,
}
DETAILED = {
    "acceptance_histogram": [1, 2, 1],
    "num_spec_steps": 4,
    "num_accepted_draft_tokens": 4,
    "num_draft_tokens": 6,
    "per_step_accepted": [1, 0, 2, 1],
    "per_step_drafted": [1, 1, 2, 2],
}
SGLANG = {"spec_accept_length": 2.0, "spec_verify_ct": 12, "spec_accept_histogram": [3, 6, 3]}
AIPERF = {"engine": "trtllm", "acceptance_histogram": {"0": 4, "2": 8}, "num_spec_steps": 12}


def of_vllm(record: dict) -> dict:
    return {"choices": [], "metrics": {"speculative_decoding": record}}


def read(tmp_path: Path, *items: dict, width: int = 3, **known):
    (tmp_path / "r").write_text("\n".join(map(json.dumps, items)))
    return read_records(tmp_path / "r", width=width, **known)


def test_a_summary_of_vllm(tmp_path: Path) -> None:
    seen = read(tmp_path, of_vllm(VLLM))
    assert seen.rounds == 43 and seen.drafted == 129 and seen.answers == 1
    assert seen.accepted.tolist() == [4 / 43, 3 / 43, 3 / 43]
    assert seen.behind_ends is True and seen.shares is None and seen.by_request is None
    told = read(tmp_path, of_vllm(VLLM), behind_ends=False, answers=9.0)
    assert told.behind_ends is False and told.answers == 9


def test_drafts_of_any_length(tmp_path: Path) -> None:
    """Of steps (drafted, accepted) 1,1 1,0 2,2 2,1 place 1 is always drafted, place 2 by 2 of 3."""
    items = [of_vllm(DETAILED)] * 3
    seen = read(tmp_path, *items)
    assert seen.shares is not None and seen.shares.tolist() == [1, 2 / 3, 0]
    by_length = {"1": [1, 1], "2": [0, 1, 1]}
    other = {k: v for k, v in DETAILED.items() if not k.startswith("per_step")}
    other["acceptance_histogram_by_draft_length"] = by_length
    assert np.array_equal(read(tmp_path, *[of_vllm(other)] * 3).shares, seen.shares)  # type: ignore[arg-type]
    assert read(tmp_path, *items[:2], of_vllm(VLLM)).shares is None  # one does not tell


def test_errors_are_by_request(tmp_path: Path) -> None:
    """Requests that are all alike have none; else they are the ratio's."""
    alike = [{"meta_info": SGLANG}] * 6
    assert np.array_equal(read(tmp_path, *alike).by_request, [0, 0, 0])  # type: ignore[arg-type]
    histograms = np.array([[9, 1], [5, 5], [1, 9], [10, 0], [6, 2], [3, 3]])
    items = [{"meta_info": {"spec_accept_histogram": own.tolist()}} for own in histograms]
    seen = read(tmp_path, *items, width=1)
    rounds, accepted = histograms.sum(1), histograms[:, 1]
    rate = accepted.sum() / rounds.sum()
    spread = ((accepted - rate * rounds) ** 2).sum() * 6 / 5
    assert seen.by_request == pytest.approx([np.sqrt(spread) / rounds.sum()])
    assert seen.behind_ends is None and seen.drafted is None and seen.answers == 6


def test_records_of_aiperf_without_the_warm_up(tmp_path: Path) -> None:
    line = {"metadata": {"benchmark_phase": "profiling"}, "spec_decode_acceptance": AIPERF}
    warm = line | {"metadata": {"benchmark_phase": "warmup"}}
    seen = read(tmp_path, line, warm, {"metadata": {}, "metrics": {}})
    assert seen.rounds == 12 and seen.accepted.tolist() == [8 / 12, 8 / 12, 0]
    (tmp_path / "list").write_text(json.dumps([line, line]))
    assert read_records(tmp_path / "list", width=2).rounds == 24


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ({}, "must hold a record of vLLM, SGLang or AIPerf"),
        ([1], "must hold a record"),
        (of_vllm(VLLM | {"num_spec_steps": 44}), "num_spec_steps must be 43; got 44"),
        (of_vllm(VLLM | {"num_accepted_draft_tokens": 9}), "must be 10; got 9"),
        (of_vllm(VLLM | {"acceptance_histogram": [39, -1]}), "whole numbers from 0"),
        (of_vllm(VLLM | {"acceptance_histogram": "39"}), "whole numbers from 0"),
        (of_vllm(VLLM | {"acceptance_histogram": {"9" * 30: 1}}), "must be"),
        (of_vllm({"acceptance_histogram": [0] * 4 + [20]}), "at most the 3 tokens"),
        (of_vllm({"acceptance_histogram": [3, 1]}), "rounds: must lie in"),
        (of_vllm(DETAILED | {"per_step_accepted": [1, 0, 2, 2]}), "must add up"),
        (of_vllm(DETAILED | {"per_step_drafted": [1, 1, 1, 2]}), "accept at most what was"),
        ({"meta_info": SGLANG | {"spec_verify_ct": 13}}, "spec_verify_ct must be 12; got 13"),
    ],
)
def test_records_that_make_no_sense(tmp_path: Path, item, said: str) -> None:
    with pytest.raises(ValueError, match=f"^--records: .*{said}"):
        read(tmp_path, item)


def test_what_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "r").write_text("{")
    with pytest.raises(ValueError, match="must be JSON"):
        read_records(tmp_path / "r", width=1)
    with pytest.raises(OSError, match="must be a readable text"):
        read_records(tmp_path, width=1)


@pytest.mark.parametrize(("factor", "said"), [(1.0, "as expected: every"), (0.6, "not as exp")])
def test_the_command_compares_adaptive_drafts(tmp_path: Path, capsys, factor, said) -> None:
    """An engine that drafts 2 or 4 tokens, whatever its draft says, against the shipped trace."""
    noise, items = np.random.default_rng(3), []
    accept = np.array([0.737, 0.686, 0.704, 0.664]) * factor
    for _ in range(40):
        table = {"2": [0] * 3, "4": [0] * 5}
        for _ in range(20):
            k = int(noise.choice([2, 4]))
            table[str(k)][int(np.cumprod(noise.random(k) < accept[:k]).sum())] += 1
        histogram = [a + b for a, b in zip(table["4"], [*table["2"], 0, 0], strict=True)]
        items.append({"acceptance_histogram": histogram} | {
            "acceptance_histogram_by_draft_length": table})  # fmt: skip
    (tmp_path / "r").write_text("\n".join(json.dumps(of_vllm(own)) for own in items))
    options = ["--behind-ends", "out", "--records", str(tmp_path / "r")]
    assert main(["expect", "--trace", "simulations/data/trace", *options]) == 0
    assert said in capsys.readouterr().out
    assert main(["expect", "--trace", "simulations/data/trace", *options, "--rounds", "9"]) == 2
    assert "must not be given with --metrics or --records" in capsys.readouterr().err
