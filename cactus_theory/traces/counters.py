"""Counters of an engine's drafts: vLLM's Prometheus text, or numbers that somebody printed."""

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from cactus_theory.base import arguments as check

# counters of vLLM, which end in _total in its Prometheus text
DRAFTS, DRAFTED, BY_POSITION = (
    f"vllm:spec_decode_num_{name}" for name in ("drafts", "draft_tokens", "accepted_tokens_per_pos")
)
ANSWERS = "vllm:request_success"
# time at which a process began a counter, which Python's client of Prometheus writes beside it
CREATED = "_created"
LINE = re.compile(
    rf"^({'|'.join((DRAFTS, DRAFTED, BY_POSITION, ANSWERS))})(_total|{CREATED})?(\{{.*\}})?"
    r"[ \t]+(\S+)(?:[ \t]+-?\d+)?[ \t]*$",
    re.MULTILINE,
)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
# labels of the counters of one engine; what differs in another label is another engine
OF_AN_ENGINE = ("position", "finished_reason")
# most rounds: whole numbers are exact in float64 up to here
MOST_ROUNDS = 2.0**53
# least rounds that reach a judged position: the share of fewer is not normal
FEWEST = 10
Column = Float[np.ndarray, "numbers"]
Labels = tuple[tuple[str, str], ...]
Counters = dict[tuple[str, Labels], float]  # of an engine: name and labels to value


@dataclass(frozen=True, eq=False)
class Observation:
    """Acceptance counted by an engine.

    Attributes
    ----------
    accepted : (K,) shares of rounds that reach and accept each position.
    rounds : how many drafted anything.
    rounding : standard deviations of what was rounded away.
    drafted : how many tokens were drafted in all; None where it is not known.
    answers : how many texts the rounds are of; None: as many rounds a text as were logged.
    behind_ends : whether places behind an end of text are in these numbers; None: not known.
    restarted : how many engines did, whose counts before that are left out.
    shares : (K,) share of the rounds going on to a place that draft it, where it is known.
    by_request : (K,) standard errors, over requests, of what is accepted of the rounds that
        accept the place before; None: not known.

    Raises
    ------
    ValueError
        Shares that rise or are none, fewer than FEWEST rounds or too many to count, drafts that
        these rounds cannot have, no answer.
    """

    accepted: Column
    rounds: float
    rounding: Column
    drafted: float | None = None
    answers: float | None = None
    behind_ends: bool | None = None
    restarted: int = 0
    shares: Column | None = None
    by_request: Column | None = None

    def __post_init__(self) -> None:
        steps = np.diff(self.accepted, prepend=1.0, append=0.0)
        if not len(self.accepted) or not (steps <= 0).all():
            raise ValueError(
                "observed: must be shares of all rounds, from 0 to 1, that do not rise with the "
                "position (of those that reached it: multiply them up); "
                f"got {self.accepted}"
            )
        check.number("rounds", self.rounds, FEWEST, MOST_ROUNDS)
        if self.answers is not None:
            check.number("answers", self.answers, 1, self.rounds)
        most = self.rounds * len(self.accepted)
        if self.drafted is not None and not self.rounds <= self.drafted <= most:
            raise ValueError(
                f"drafted: must be how many tokens {self.rounds:g} rounds drafted, 1 to "
                f"{len(self.accepted)} each; got {self.drafted:g}"
            )

    def check_width(self, width: int) -> None:
        """Raise ValueError unless drafts of ``width`` tokens can have been counted so."""
        if len(self.accepted) != width:
            raise ValueError(
                f"observed: must have the {width} positions that are expected (another K is "
                f"another decode: --num-draft-tokens); got {len(self.accepted)}"
            )

    def drafted_share(self) -> tuple[Column, Column]:
        """Return the least and the largest share of rounds going on to a place that draft it.

        Of counters only the sum is known: drafts may have become shorter at any place.
        """
        if self.shares is not None:
            return np.maximum(self.shares, 1e-9), np.maximum(self.shares, 1e-9)
        width = len(self.accepted)
        missing = 0.0 if self.drafted is None else width - self.drafted / self.rounds
        least = np.maximum(1 - missing / np.arange(width, 0, -1), 1e-9)
        return np.where(np.arange(width), least, 1.0), np.ones(width)


def observed_rates(text: str, rounds: float | None, width: int, **known: Any) -> Observation:
    """Read printed numbers: accepted at each position over drafts.

    ``known`` are other fields of the observation. Raises ValueError for numbers that are none, that
    rise, or that drafts of ``width`` tokens cannot have, and without rounds.
    """
    words = [word.strip() for word in text.split(",")]
    rates = np.array([check.number("--observed", word, 0, MOST_ROUNDS) for word in words])
    digits = [17 if "e" in word.lower() else len(word.partition(".")[2]) for word in words]
    rounding = 10.0 ** -np.array(digits) / np.sqrt(12)
    Observation(rates, FEWEST, rounding).check_width(width)  # faults of these come first
    if rounds is None:
        raise ValueError(
            "--rounds: must say over how many rounds (drafts) the observed numbers were counted, "
            "as their error depends on it; got none"
        )
    check.number("--rounds", rounds, FEWEST, MOST_ROUNDS)
    return Observation(rates, rounds, rounding, **known)


def read_metrics(
    path: str | Path, before: str | Path | None = None, *, width: int, **known: Any
) -> Observation:
    """Read the Prometheus text of vLLM; with ``before``, what was counted since that text.

    An engine has restarted if one of its counters fell or was created anew: all then began at 0
    again, and what was counted before the restart is left out. vLLM counts places behind an end of
    text, and how many answers have ended; ``known`` may say otherwise. Raises OSError or ValueError
    for files that cannot be read, that lack these counters or hold one twice, several models, a
    counter of ``before`` that is missing, or numbers that drafts of ``width`` tokens cannot have.
    """
    now = _engines(path)
    earlier = {} if before is None else _engines(before)
    counts, places, restarted = defaultdict[str, float](float), defaultdict[int, float](float), 0
    for engine, since in earlier.items():
        if lost := min(since.keys() - now.get(engine, {}).keys(), default=None):
            raise ValueError(
                f"--metrics: must hold every counter of {before}, or what was counted since cannot "
                f"be told; {path} lacks {lost[0]} of {dict(engine + lost[1])}"
            )
    for engine, counters in now.items():
        since = earlier.get(engine, {})
        if _restarted(counters, since):
            since, restarted = {}, restarted + 1
        for (name, labels), value in counters.items():
            counts[name] += (count := value - since.get((name, labels), 0.0))
            if name == BY_POSITION and (place := dict(labels).get("position", "")).isdecimal():
                places[int(place)] += count
    if DRAFTS not in counts:
        raise ValueError(f"--metrics: must hold {DRAFTS}_total, as vLLM's text does; got {path}")
    if counts[DRAFTS] < FEWEST:
        since = "" if before is None else f" since {before}"
        raise ValueError(
            f"--metrics: must have counted at least {FEWEST} drafts{since} (an engine that has "
            f"just started has counted none); got {counts[DRAFTS]:g} in {path}"
        )
    if not places or sorted(places) != list(range(len(places))):
        raise ValueError(
            "--metrics: must count accepted tokens at positions 0, 1, …; got positions "
            f"{sorted(places)} in {path}"
        )
    accepted = np.array([places[number] for number in range(len(places))])
    told: dict[str, Any] = {"behind_ends": True, "restarted": restarted}
    told |= {"drafted": counts[DRAFTED], "answers": counts[ANSWERS] or None}
    told |= {name: value for name, value in known.items() if value is not None}
    try:
        seen = Observation(accepted / counts[DRAFTS], counts[DRAFTS], np.zeros(len(places)), **told)
    except ValueError as error:
        raise ValueError(f"--metrics: {error} in {path}") from None
    seen.check_width(width)
    return seen


def _restarted(counters: Counters, since: Counters) -> bool:
    """Return whether an engine's counters began at 0 again; ValueError for older ones."""
    created = {key for key in since if key[0].endswith(CREATED)}
    fell = any(counters[key] < since[key] for key in since.keys() - created)
    anew = any(counters[key] != since[key] for key in created)
    if fell and created and not anew:
        raise ValueError("--metrics: must be two texts, before and after; got counters that fell "
                         "in an engine that has not restarted")  # fmt: skip
    return anew or fell


def _engines(path: str | Path) -> dict[Labels, Counters]:
    """Return the counters that are of interest, by engine."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise OSError(f"--metrics: must be a readable text; {error}") from None
    engines = defaultdict[Labels, Counters](dict)
    for name, kind, labels, written in LINE.findall(text):
        pairs, said = sorted(LABEL.findall(labels)), f"{name}{kind}{labels} in {path}"
        engine = tuple(pair for pair in pairs if pair[0] not in OF_AN_ENGINE)
        key = name + kind.replace("_total", ""), tuple(sorted({*pairs} - {*engine}))
        if key in engines[engine]:
            raise ValueError(f"--metrics: must hold every counter once; got two of {said}")
        engines[engine][key] = check.number(f"--metrics: {said}", written, 0, MOST_ROUNDS)
    models = {value for engine in engines for label, value in engine if label == "model_name"}
    if len(models) > 1:
        raise ValueError(f"--metrics: must be of one model; got {', '.join(sorted(models))}")
    return engines
