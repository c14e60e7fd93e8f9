"""Scores of answers to GSM8K's questions, from the column beside each prompt."""

import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from cactus_theory.base.significance import mcnemar

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def solution(columns: Mapping[str, Any], place: str) -> str:
    """Return the column ``answer`` of an item; ValueError by its place where it is missing."""
    if "answer" not in columns:
        got = ", ".join(columns) or "none"
        raise ValueError(f"{place} must hold 'answer' for this score; got columns {got}")
    return columns["answer"]


def last_number(text: str) -> Decimal | None:
    """Return the last number of a text, its thousands joined; None without one."""
    found = NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def right_number(solved: str, answer: str) -> bool:
    r"""Return whether an answer ends in the number of the solution, which stands behind ####."""
    return last_number(answer) == last_number(solved.rpartition("####")[2])


def floor(score: Callable[[Any, str], float], items: Sequence[Any], answers: Sequence[str]) -> str:
    """Say what answers to other items score: a model that scores no more shows nothing."""
    own, others = ([float(score(item, text)) for item, text in zip(items, texts, strict=True)]
                   for texts in (answers, [*answers[1:], *answers[:1]]))  # fmt: skip
    pairs = list(zip(own, others, strict=True))
    p = mcnemar(sum(a > b for a, b in pairs), sum(a < b for a, b in pairs))
    count = len(items)
    said = (
        f"Floor: lossless answers to other items score {sum(others) / count:.3f}, those to their "
        f"own {sum(own) / count:.3f} (p = {p:.2g})"
    )
    return said + (": at its floor a model shows nothing by this score." if p > 0.05 else ".")
