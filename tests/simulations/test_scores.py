"""Scores of files are checked; those by name read columns."""

import pytest

from cactus_theory.base.prompts import Prompt
from simulations.scores import score_of


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def score(prompt, text): return float('nan')", "must return finite numbers; got nan"),
        ("def score(prompt, text): return text + 1", "score raised TypeError"),
        ("def score(text): return 1", r"must take a prompt and its completion; got score\(text\)"),
        ("score = 3", "must be a function"),
        ("def other(text): return 1", "it defines other"),
    ],
)
def test_a_score_that_is_none_is_named(tmp_path, body, said) -> None:
    (tmp_path / "mine.py").write_text(body)
    with pytest.raises((ValueError, TypeError), match=said):
        score_of(f"{tmp_path}/mine.py:score")(Prompt("prompt"), "text")


def test_a_score_reads_prompt_and_completion(tmp_path) -> None:
    (tmp_path / "mine.py").write_text("def score(prompt, text):\n    return len(text)")
    score = score_of(f"{tmp_path}/mine.py:score")
    assert score is not None and score(Prompt("prompt"), "abc") == 3 and score_of(None) is None


def test_a_score_by_name_reads_the_columns_of_its_prompt() -> None:
    score = score_of("gsm8k")
    assert score is not None and score(Prompt("2 + 3?", columns={"answer": "#### 5"}), "It is 5.")
