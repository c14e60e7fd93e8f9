"""The benchmarks at their smallest: every job is there, ratios are those of the times."""

from pathlib import Path

import numpy as np
import pytest

from cactus_theory.decoding import DraftStop
from simulations.__main__ import main
from simulations.bench import decode, draft_stop, stopped_paths, theory, verify
from simulations.common.results import read_csv
from tests.amounts import thorough


def run(what: str, out: Path, *more: str) -> tuple[list[dict[str, str]], dict[str, str]]:
    assert main(["bench", what, "--repeats", "1", *more, "--out", str(out / "x.csv")]) == 0
    return read_csv(out / "x.csv")


def test_every_rule_in_the_list_is_timed_beside_a_softmax(tmp_path, monkeypatch, capsys) -> None:
    for name, value in {"VOCAB": 300, "BATCH": 2, "WIDTH": 3}.items():
        monkeypatch.setattr(verify, name, value)
    rows, notes = run("verify", tmp_path)
    assert notes["command"] == "python -m simulations bench verify --repeats 1"
    jobs = [verify.SOFTMAX, verify.DENSE, *(f"verify_chain, {s}" for s in verify.POLICIES)]
    by_block = [spec.format(values="values.json") for spec in verify.BLOCKS]
    jobs += [f"verify_block, {spec}" for spec in by_block]
    assert [row["job"] for row in rows] == jobs * len(verify.NOISES)
    for row in rows:
        softmax = next(other for other in rows if other["draft"] == row["draft"])
        share = float(row["milliseconds"]) / float(softmax["milliseconds"])
        assert float(row["softmaxes"]) == pytest.approx(share)
        assert (row["accepted"] == "") == (row["job"] in jobs[:2])
        assert (row["times_chain"] != "") == row["job"].startswith("verify_block")
    for spec, rival in zip(by_block, verify.BLOCKS.values(), strict=True):
        pair = {row["job"].partition(", ")[::2]: row for row in rows[: len(jobs)]}
        block, chain = pair["verify_block", spec], pair["verify_chain", rival]
        share = float(block["milliseconds"]) / float(chain["milliseconds"])
        assert float(block["times_chain"]) == pytest.approx(share)
    assert capsys.readouterr().out.count("softmaxes") == len(rows)


@thorough
def test_decodes_are_counted_and_rounds_compared(tmp_path, monkeypatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(decode, "NEW", 4)
    monkeypatch.setattr(decode, "PROMPTS", 2)
    rows, _ = run("decode", tmp_path)
    by_job = {row["job"]: row for row in rows}
    assert list(by_job) == [line.job for line in decode.lines()]
    assert float(by_job["plain"]["tokens_per_call"]) == 1
    assert float(by_job["lossless"]["times_lossless_round"]) == 1
    assert by_job["Hugging Face generate"]["milliseconds_per_round"] == ""
    assert float(by_job["Hugging Face assisted generation"]["times_assisted"]) == 1
    alone, together = by_job["lossless"], by_job["lossless, batch of 8"]
    assert alone["tokens_per_call"] == together["tokens_per_call"]
    for row in rows[2:]:
        rounds = float(row["milliseconds_per_round"])
        assert float(row["times_lossless_round"]) == pytest.approx(
            rounds / float(alone["milliseconds_per_round"])
        )


def test_the_program_is_timed_beside_the_closed_form(tmp_path, monkeypatch) -> None:
    pytest.importorskip("cvxpy")
    for name, value in {"LARGE": 200, "MEDIUM": 100, "PROGRAM_SIZES": (50,), "BATCH": 2}.items():
        monkeypatch.setattr(theory, name, value)
    rows, notes = run("theory", tmp_path, "--programs", "2")
    assert notes["command"].endswith("bench theory --repeats 1 --programs 2")
    assert rows[-1]["job"] == "cvxpy with CLARABEL, V = 50"
    assert "differ by at most" in rows[-1]["note"] and "0 of 2 gave up" in rows[-1]["note"]
    assert sum("2 rows" in row["job"] for row in rows) == 1


def test_the_plain_search_and_the_closed_form_agree() -> None:
    q, p = theory.pair_of_rows(1, 500)
    closed = theory.ct.optimal_acceptance(q[0], p[0], delta=theory.DELTA)
    acceptance = theory.naive_optimum(q[0].numpy(), p[0].numpy())
    assert acceptance == pytest.approx(float(closed.acceptance), abs=1e-3)


def test_stops_are_compared_with_the_best_fixed_width(tmp_path, monkeypatch, capsys) -> None:
    pytest.importorskip("transformers")
    sizes = {"NEW": 6, "PROMPTS": 1, "FIXED": (1, 2), "STOPPED": (3,), "THRESHOLDS": (0.0, 0.5)}
    for name, value in sizes.items():
        monkeypatch.setattr(draft_stop, name, value)
    rows, notes = run("draft-stop", tmp_path)
    assert notes["command"] == "python -m simulations bench draft-stop --repeats 1"
    settings = [(row["policy"], row["num_draft_tokens"], row["threshold"]) for row in rows]
    lines = [("1", ""), ("2", ""), ("3", "0"), ("3", "0.5")]
    assert settings == [(spec, *line) for spec in draft_stop.POLICIES for line in lines]
    for row in rows:
        of_policy = [other for other in rows if other["policy"] == row["policy"]]
        best = max(of_policy[:2], key=lambda other: float(other["tokens_per_second"]))
        assert row["best_fixed"] == best["num_draft_tokens"]
        ratio = float(row["tokens_per_second"]) / float(best["tokens_per_second"])
        assert float(row["times_best_fixed"]) == pytest.approx(ratio)
        steps = float(row["tokens_per_draft_step"]) * float(row["draft_steps_per_call"])
        assert float(row["tokens_per_call"]) == pytest.approx(steps)
    assert capsys.readouterr().out.count("fixed K=") == len(rows)


def test_a_stop_is_judged_on_texts_it_has_not_seen(tmp_path, monkeypatch) -> None:
    pytest.importorskip("transformers")
    sizes = {"NEW": 20, "BATCH": 1, "LONGEST": 4, "COSTS": (0.1,), "POLICIES": ("speculative",)}
    for name, value in sizes.items():
        monkeypatch.setattr(stopped_paths, name, value)
    rows, _ = run("stopped-paths", tmp_path)
    assert [row["acceptance"] for row in rows] == ["fitted", "default"]
    for row in rows:
        cost = [1 + 0.1 * float(row[f"drafted_per_call_{way}"]) for way in ("stopped", "fixed")]
        tokens = [float(row[f"tokens_per_call_{way}"]) for way in ("stopped", "fixed")]
        ratio = tokens[0] / cost[0] / (tokens[1] / cost[1])
        assert float(row["tokens_per_cost_ratio"]) == pytest.approx(ratio)


def test_a_path_is_worth_what_it_says() -> None:
    phi = np.array([[0.5, 0.5, 1.0], [1.0, 0.2, 0.0]])
    paths = stopped_paths.Paths(phi, np.array([[0.9, 0.1, 0.9], [0.9, 0.9, 0.1]]), np.arange(2))
    assert paths.tokens(paths.fixed(3)).tolist() == [2.0, 2.2]
    assert paths.tokens(np.array([1, 2])).tolist() == [1.5, 2.2]
    stop = DraftStop(0.5, ((0.0, 0.0), (1.0, 1.0)))
    assert paths.stopped(stop).tolist() == [2, 3]  # the token that ends a draft is submitted
    assert paths.stopped(DraftStop(0.0)).tolist() == [3, 3]
    assert paths.stopped(DraftStop(1.0)).tolist() == [1, 1]
