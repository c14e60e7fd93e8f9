"""Which texts of a trace serve for what, and values that are learned from some of them."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from cactus_theory._files import write_whole
from cactus_theory.policies._values import ValueTable
from cactus_theory.traces.trace import Trace
from cactus_theory.traces.values import PRICES, learn_values

# fewer cycles are all needed for choosing and reporting
ENOUGH_CYCLES = 200
# one text of so many is learned from
EVERY = 4


@dataclass(frozen=True)
class Shares:
    """Numbers of texts.

    Attributes
    ----------
    judged, learned : of the source: what knobs and speeds are from, and what values are from.
    halves : among the judged ones: what is chosen by, and what is reported.
    """

    judged: list[int]
    learned: list[int]
    halves: tuple[list[int], list[int]]


def shares(texts: int, learning: bool) -> Shares:
    """Return a fair share of early and late texts for everything.

    Raises
    ------
    ValueError
        Too few texts.
    """
    learned = list(range(EVERY - 1, texts, EVERY)) if learning else []
    judged = [text for text in range(texts) if text not in learned]
    if len(judged) < 2:
        raise ValueError(
            f"trace: must hold two texts, one to choose by and one to report; got {len(judged)}"
        )
    count = range(len(judged))
    return Shares(judged, learned, (list(count[::2]), list(count[1::2])))


def learn_for(trace: Trace, width: int, file: Path) -> ValueTable:
    """Write what an accepted token is worth in drafts of K tokens; return the table."""
    table = learn_values(trace, num_draft_tokens=width, prices=PRICES[::2])
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, (json.dumps(table.as_json()) + "\n").encode())
    return replace(table, file=str(file))
