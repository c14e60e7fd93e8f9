"""Scores of answers for ``compare --score``: (prompt, completion) in, a number out."""

import inspect
from collections.abc import Callable
from types import FunctionType

import numpy as np

from cactus_theory.base.prompts import Prompt
from cactus_theory.base.specs import Registry
from cactus_theory.lm_eval.tasks import TASKS

SCORES: Registry[FunctionType] = Registry(
    "score", FunctionType, "a function of prompt and completion that returns a number", "--score"
)


Score = Callable[[Prompt, str], float]


def score_of(source: str | None) -> Score | None:
    """Return a score by its name, or the function that ``FILE.py:NAME`` names, its numbers checked.

    None for None.
    """
    if source is None:
        return None
    if (task := TASKS.get(source)) is not None:
        return lambda prompt, text: float(
            task.right(task.checked(prompt.columns, prompt.place), text)
        )
    score, named = SCORES.read(source)
    takes = [count for count in (3, 2) if _binds(score, count)]
    if not takes:
        own = f"{score.__name__}{inspect.signature(score)}"
        rule = "must take a prompt and its completion, or the columns of its line, too"
        raise TypeError(f"--score: {rule}; got {own}")

    def checked(prompt: Prompt, completion: str) -> float:
        given = prompt.text, completion, dict(prompt.columns)
        try:
            value = float(score(*given[: takes[0]]))
        except Exception as error:  # the file is not ours
            raise ValueError(f"--score: {named} raised {type(error).__name__}: {error}") from error
        if not np.isfinite(value):
            raise ValueError(f"--score: {named} must return finite numbers; got {value}")
        return value

    return checked


def _binds(function: FunctionType, count: int) -> bool:
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    return True
