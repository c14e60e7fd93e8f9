"""Drafters beside each other: what is summed, what is read off prices, what is refused."""

import pytest

pytest.importorskip("transformers")

from simulations.__main__ import main
from simulations.common.grid import Config, Grid
from simulations.common.inputs import PAIR
from simulations.common.results import read_csv
from simulations.drafters import lines, rows
from simulations.figures.page_tables import drafters as page
from tests.amounts import thorough


def made(name: str, tokens: float, seconds: float, kl: float = 0.0):
    return {"tokens": tokens, "row_calls": 10, "seconds": seconds, "draft": 0.1, "kl": kl}


def test_levels_are_read_off_prices_and_errors_are_those_of_texts():
    every = [Config(own, 2, 1) for own in ("speculative", "band:price=2", "band:price=1")]
    grid = Grid(lines(["a", "b"], every), 2, 1, 1)
    numbers = {"plain": (10, 1.0, 0.0), "speculative": (20, 1.0, 0.0),
               "band:price=2": (24, 1.0, 0.24), "band:price=1": (30, 1.0, 3.0)}  # fmt: skip
    records = {}
    for job in grid.jobs.values():
        tokens, seconds, kl = numbers[job.config.method]
        slower = 2 if job.config.drafter == "b" else 1
        uneven = 1 + 0.1 * (job.group if job.config.drafter == "a" else 0)
        records[job.key] = made("", tokens * uneven, seconds * slower, kl * uneven)
    table = {(row["drafter"], row["policy"]): row for row in rows(grid, records, 0.01)}
    strict, relaxed = table["a", "speculative"], table["a", "band:price"]
    assert strict["tokens_per_call"] == pytest.approx(2.1) and strict["nats"] == 0
    assert strict["tokens_per_call_error"] == pytest.approx(0.1)  # of 2.0 and 2.2
    assert strict["over_plain"] == pytest.approx(2.1)
    assert table["b", "speculative"]["over_first"] == pytest.approx(1 / 2.1)
    assert relaxed["nats"] == 0.01 and relaxed["tokens_per_call"] == pytest.approx(2.4 * 1.05)
    assert table["b", "band:price"]["over_first"] == pytest.approx(1 / 2.1)
    beyond = rows(grid, records, 0.5)
    assert [row["tokens_per_call"] for row in beyond if row["nats"]] == [None, None]


@thorough
def test_the_command_compares_a_model_a_head_and_text(tmp_path, capsys):
    asked = ["table", "drafters", "--num-prompts", "2", "--num-draft-tokens", "2"]
    asked += ["--temperature", "0.6", "--policies", "speculative", "--max-new-tokens", "6"]
    asked += ["--repeats", "1", "--out", str(tmp_path)]
    assert main(asked) == 0
    table, notes = read_csv(tmp_path / "drafters.csv")
    assert [row["drafter"] for row in table] == ["plain", "draft", "recurrent", "ngram"]
    assert "--temperature 0.6" in notes["command"] and float(table[2]["seconds_per_call"]) > 0
    kept = (tmp_path / "journal.jsonl").read_text()
    assert main(asked) == 0 and (tmp_path / "journal.jsonl").read_text() == kept
    assert page(tmp_path).count("\n|") == 2  # nothing at temperature 1
    assert main([*asked, "--drafters", str(tmp_path), "--out", str(tmp_path / "other")]) == 2
    assert "draft: must be a folder with a config.json" in capsys.readouterr().err


@thorough
def test_throughput_leaves_the_librarys_drafting_out_for_heads(tmp_path):
    asked = ["throughput", "--draft", str(PAIR / "recurrent"), "--policies", "speculative"]
    asked += ["--num-prompts", "1", "--max-new-tokens", "4", "--repeats", "1", "--metered", "1"]
    asked += ["--num-draft-tokens", "2", "--batch", "1", "--out", str(tmp_path)]
    assert main(asked) == 0
    found, _ = read_csv(tmp_path / "throughput.csv")
    assert [row["method"] for row in found] == ["plain", "hf_plain", "speculative"]
