"""Scores of answers for ``answers --score``: functions of (prompt, completion[, columns])."""

import inspect
from collections.abc import Callable
from contextlib import suppress
from types import FunctionType

import numpy as np

from cactus_theory.base.prompts import Prompt
from cactus_theory.base.specs import Registry
from cactus_theory.lm_eval.tasks import TASKS

SCORES: Registry[FunctionType] = Registry(
    "score",
    FunctionType,
    "a function of prompt, completion and perhaps columns that returns a number",
    "--score",
)


Score = Callable[[Prompt, str], float]


def score_of(source: str | None) -> Score | None:
    """Return a score by its name, or from ``FILE.py:NAME`` with a check of its numbers.

    None gives None.
    """
    if source is None:
        return None
    if (task := TASKS.get(source)) is not None:
        return lambda prompt, text: float(
            task.right(task.checked(prompt.columns, prompt.place), text)
        )
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
