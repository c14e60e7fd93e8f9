"""Score answers to the prompts of GSM8K and IFEval, by the columns beside each prompt."""

import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from cactus_theory.base.significance import mcnemar
from cactus_theory.lm_eval.ifeval import follows_all

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class Task(NamedTuple):
    """A score: the columns that it needs, and a test of whether an answer is right."""

    columns: tuple[str, ...]
    right: Callable[[Mapping[str, Any], str], bool]

    def checked(self, columns: Mapping[str, Any], place: str) -> Mapping[str, Any]:
        """Return the columns; raise ValueError, which names their place, if a column is missing."""
        for name in self.columns:
            if name not in columns:
                got = ", ".join(columns) or "none"
                raise ValueError(f"{place} must hold {name!r} for this score; got columns {got}")
        return columns


def last_number(text: str) -> Decimal | None:
    """Return the last number of a text, read without thousands separators, or None."""
    found = NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def right_number(columns: Mapping[str, Any], answer: str) -> bool:
    r"""Return whether the answer's last number is the number behind #### in the solution."""
    return last_number(answer) == last_number(columns["answer"].rpartition("####")[2])


TASKS = {
    "gsm8k": Task(("answer",), right_number),
    "ifeval": Task(("instruction_id_list", "kwargs"), follows_all),
}


def floor(score: Callable[[Any, str], float], items: Sequence[Any], answers: Sequence[str]) -> str:
    """Return a sentence with the score of answers that are matched to the wrong items.

    A model that scores no more on the right items shows nothing by this score.
    """
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
