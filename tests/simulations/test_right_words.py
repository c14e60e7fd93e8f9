"""Right words in short answers: a killed run goes on, a word counts as a word, coins are common."""

import json

import numpy as np
import pytest

from simulations.__main__ import main
from simulations.common.results import read_csv
from simulations.right_words import _table, holds

SMALL = ["--num-facts", "3", "--answers", "2", "--max-new-tokens", "4", "--batch", "4"]


def asked(tmp_path, *more):
    return main(["right-words", *SMALL, "--out", str(tmp_path), *more])


def test_a_killed_run_goes_on_to_the_same_table(tmp_path) -> None:
    assert asked(tmp_path) == 0
    whole, _ = read_csv(tmp_path / "right_words.csv")
    journal = tmp_path / "journal.jsonl"
    lines = journal.read_text(encoding="utf-8").splitlines(keepends=True)
    assert len(lines) == 1 + 2 * 2 and len(json.loads(lines[1])["right"]) == 4
    journal.write_text("".join(lines[:3]) + lines[3][:20], encoding="utf-8")
    assert asked(tmp_path) == 0
    assert read_csv(tmp_path / "right_words.csv")[0] == whole
    assert asked(tmp_path, "--num-facts", "2") == 2  # of other prompts


def test_a_policy_that_is_lossless_has_the_same_answers(tmp_path) -> None:
    assert asked(tmp_path, "--policy", "band:price=inf") == 0
    lines = (tmp_path / "journal.jsonl").read_text(encoding="utf-8").splitlines()[1:]
    results = [json.loads(line) for line in lines]
    assert [own["sums"][:2] for own in results[:2]] == [own["sums"][:2] for own in results[2:]]


def test_a_word_counts_where_it_stands_by_itself() -> None:
    for text, word in (("It is PARIS.", "Paris"), ("1+1=12", "12"), ("New York!", "new york")):
        assert holds(text, word)
    for text, word in (("Parisian", "Paris"), ("It is 120", "12"), ("312", "12"), ("a b", "a.b")):
        assert not holds(text, word)


def test_differences_are_paired_by_question() -> None:
    right = np.array([[1, 0, 1, 1], [1, 0, 0, 1]], bool)  # 4 questions, 2 answers each in all
    lossless = [{"right": [*map(bool, right.ravel())], "sums": [8, 4, 0.0]}]
    lossy = [{"right": [True, False, True, False] * 2, "sums": [8, 2, 0.8]}]
    first, other = _table(["speculative", "x"], [lossless, lossy], 4)
    assert first["right"] == 5 / 8 and first["difference"] == first["difference_se"] == 0
    by_question = np.array([0, 0, 0.5, -1])
    assert other["difference"] == by_question.mean() and other["nats"] == 0.1
    error = by_question.std(ddof=1) / 2
    assert other["difference_se"] == pytest.approx(error)
    assert other["shown_by_80_percent"] == pytest.approx(2.8 * error)
    assert other["tokens_per_call"] == 4
