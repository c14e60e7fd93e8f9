"""Scores of tasks: the columns that they need, and which answers are right."""

import pytest

from cactus_theory.base.prompts import Prompt
from simulations.scores import last_number, score_of


def solution(answer: str) -> Prompt:
    return Prompt("How many?", columns={"answer": answer})


def test_the_last_number_counts() -> None:
    score = score_of("gsm8k")
    assert score and score(solution("…\n#### 1,200"), "First 7, then $1200.") == 1
    assert score(solution("#### 5"), "5 of 6") == score(solution("#### 5"), "five") == 0
    assert last_number("-3.50") == -3.5


def test_a_word_counts_where_it_stands_by_itself() -> None:
    score = score_of("word")
    assert score
    for text, word in (("It is PARIS.", "Paris"), ("1+1=12", "12"), ("New York!", "new york")):
        assert score(solution(f" {word}"), text) == 1
    for text, word in (("Parisian", "Paris"), ("It is 120", "12"), ("312", "12"), ("a b", "a.b")):
        assert score(solution(word), text) == 0


def test_all_instructions_of_a_prompt_count() -> None:
    names = ["punctuation:no_comma", "startend:quotation"]
    asked = Prompt("Write.", columns={"instruction_id_list": names, "kwargs": [{}, {}]})
    score = score_of("ifeval")
    assert score and (score(asked, '"both"'), score(asked, '"one, not both"')) == (1, 0)


def test_a_prompt_without_the_columns_of_a_score_is_refused() -> None:
    score = score_of("gsm8k")
    with pytest.raises(ValueError, match="line 3 must hold 'answer' .* got columns id"):
        assert score and score(Prompt("x", columns={"id": 1}, place="line 3"), "5")
