"""Decode the same prompts by several drafters; numbers a call and a second, with errors by text."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cactus_theory.decoding import Pair
from cactus_theory.traces.estimate import Estimate, ratio_of_sums

from ..common.decode import Harness
from ..common.grid import PLAIN, Config, Grid, Job, Record
from ..common.journal import Journal
from ..common.statistics import hermite, monotone_curve

UNITS = {  # what a point is measured by: (above, below, whether of timed decodes)
    "tokens_per_call": ("tokens", "row_calls", False),
    "tokens_per_second": ("tokens", "seconds", True),
    "seconds_per_call": ("seconds", "row_calls", True),
    "draft_seconds_per_call": ("draft", "row_calls", True),
}


@dataclass(frozen=True)
class Line:
    """A drafter by its name, how it is verified, and the temperature of both models."""

    drafter: str
    config: Config
    temperature: float = 1.0

    @property
    def key(self) -> str:
        """Return the name under which results are kept."""
        return f"{self.drafter}|T={self.temperature:g}|{self.config.key}"

    @property
    def batch(self) -> int:
        """Return how many texts are decoded at once."""
        return self.config.batch


@dataclass(frozen=True)
class Decodes:
    """A grid of :class:`Line` and its records, one a prompt: lines are of batch 1."""

    grid: Grid
    records: Mapping[str, Record]

    def estimate(self, line: Line, name: str) -> Estimate:
        """Return one of UNITS, or ``kl_per_token`` of metered decodes."""
        if name == "kl_per_token":
            return self._ratio(line, range(self.grid.metered), "kl", "tokens")
        above, below, timed = UNITS[name]
        first = self.grid.metered if timed and self.grid.repeats else 0
        every = range(first, self.grid.metered + self.grid.repeats)
        return self._ratio(line, every, above, below)

    def at_level(self, lines: Sequence[Line], name: str, level: float) -> Estimate:
        """Return one of UNITS where ``lines``, which differ in price, emit ``level`` nats a token.

        NaN where the level is not between theirs.
        """
        spent = [self.estimate(line, "kl_per_token") for line in lines]
        found = [self.estimate(line, name) for line in lines]
        texts = range(len(spent[0].left_out))
        whole = _read(level, [own.value for own in spent], [own.value for own in found])
        left = [
            _read(level, [own.left_out[t] for own in spent], [own.left_out[t] for own in found])
            for t in texts
        ]
        return Estimate(whole, np.array(left), found[0].source)

    def _ratio(self, line: Line, repeats: Sequence[int], above: str, below: str) -> Estimate:
        jobs = [
            [Job(line, repeat, text) for repeat in repeats] for text in range(self.grid.prompts)
        ]
        sums = [
            np.array([float(sum(self.records[job.key][name] for job in own)) for own in jobs])
            for name in (above, below)
        ]
        return ratio_of_sums(*sums, "prompts")


def cells(numbers: Mapping[str, Estimate]) -> dict[str, float | None]:
    """Return every number and its error as cells of a table, None where there is none."""
    found = {}
    for name, own in numbers.items():
        found |= {name: own.value, f"{name}_error": own.standard_error}
    return {name: value if np.isfinite(value) else None for name, value in found.items()}


def _read(level: float, spent: Sequence[float], found: Sequence[float]) -> float:
    with np.errstate(divide="ignore"):
        curve = monotone_curve(np.log(spent), np.array(found))
    own = hermite(float(np.log(level)), *curve)
    return float("nan") if own is None else own


def decodes(
    grid: Grid,
    pair: Pair,
    drafters: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    journal: Journal | None = None,
) -> Decodes:
    """Make every decode of the grid that the journal lacks; drafters go by the names of lines.

    Lines of one prompt are interleaved, in an order drawn anew; metered decodes are not timed.
    Seconds are the processor's, which others on the machine hardly change.
    """
    harness = Harness(pair, prompts, max_new_tokens, grid.seed)

    def by(line: Line) -> Harness:
        draft = None if line.config.method == PLAIN else drafters[line.drafter]
        return replace(harness, pair=replace(pair, draft=draft), temperature=line.temperature)

    def decoded(job: Job) -> Record:
        own: Line = job.config
        metered = job.repeat < grid.metered and own.config.method != PLAIN
        begun = time.process_time()
        made = by(own).decode(own.config, job.group, again=job.repeat, meter=metered).record
        seconds, parts = time.process_time() - begun, made["parts"]
        drafting = seconds * parts[0] / sum(parts)
        return {"kl": 0.0} | made | {"seconds": seconds, "draft": drafting}

    for line in grid.cold({} if journal is None else journal.results):
        by(line).decode(line.config, 0)
    return Decodes(grid, grid.fill(decoded, journal))
