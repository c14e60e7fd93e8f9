"""Scores of answers for ``answers --score``: of words, GSM8K, IFEval, and users' functions.

A function takes a prompt and its completion, and may take the prompt's columns.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from decimal import Decimal
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np

from cactus_theory.base.prompts import Prompt
from cactus_theory.base.specs import Registry

from .ifeval import follows_all

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
SCORES: Registry[FunctionType] = Registry(
    "score",
    FunctionType,
    "a function of prompt, completion and perhaps columns that returns a number",
    "--score",
)
Score = Callable[[Prompt, str], float]


class Task(NamedTuple):
    """A task: the columns that its prompts must have, and a test of whether an answer is right."""

    columns: tuple[str, ...]
    right: Callable[[Mapping[str, Any], str], bool]

    def score(self, prompt: Prompt, completion: str) -> float:
        """Return 1 for a right answer, else 0; raise ValueError if a column is missing."""
        for name in self.columns:
            if name not in prompt.columns:
                got = ", ".join(prompt.columns) or "none"
                raise ValueError(
                    f"{prompt.place} must hold {name!r} for this score; got columns {got}"
                )
        return float(self.right(prompt.columns, completion))


def last_number(text: str) -> Decimal | None:
    """Return the last number of a text, read without thousands separators, or None."""
    found = NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def right_number(columns: Mapping[str, Any], answer: str) -> bool:
    """Return whether the answer's last number is the number behind #### in the solution."""
    return last_number(answer) == last_number(columns["answer"].rpartition("####")[2])


def holds(text: str, word: str) -> bool:
    """Return whether a text contains one or several given words as whole words, in any case."""
    return bool(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


TASKS = {
    "word": Task(("answer",), lambda columns, text: holds(text, str(columns["answer"]).strip())),
    "gsm8k": Task(("answer",), right_number),
    "ifeval": Task(("instruction_id_list", "kwargs"), follows_all),
}


def score_of(source: str | None) -> Score | None:
    """Return a score by its name, or from ``FILE.py:NAME`` with a check of its numbers.

    None gives None.
    """
    if source is None:
        return None
    if (task := TASKS.get(source)) is not None:
        return task.score
    score, named = SCORES.read(source)
    signature, takes = inspect.signature(score), 0
    for count in (2, 3):
        with suppress(TypeError):
            signature.bind(*range(count))
            takes = count
    if not takes:
        rule = "must take a prompt and its completion, and may take its columns"
        raise TypeError(f"--score: {rule}; got {score.__name__}{signature}")

    def checked(prompt: Prompt, completion: str) -> float:
        given = prompt.text, completion, dict(prompt.columns)
        try:
            value = float(score(*given[:takes]))
        except Exception as error:  # the user's function may raise anything
            raise ValueError(f"--score: {named} raised {type(error).__name__}: {error}") from error
        if not np.isfinite(value):
            raise ValueError(f"--score: {named} must return finite numbers; got {value}")
        return value

    return checked
