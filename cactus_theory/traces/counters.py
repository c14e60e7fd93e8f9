"""Compare the acceptance that an engine counted with the acceptance expected from a trace.

``cactus-theory expect`` uses this module to read vLLM's Prometheus text or printed numbers. The
expectation has standard errors over texts. The counts have errors from the coins, and from their
texts, which may be fewer and longer than the logged texts. Places behind an end of text are counted
on both sides or on neither.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product
from operator import ne
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from cactus_theory.base import arguments as check
from cactus_theory.base.significance import QUIET
from cactus_theory.traces.estimate import CannotSay, check_texts
from cactus_theory.traces.expect import Expectation, critical

# names of vLLM's counters; its Prometheus text adds _total
DRAFTS, DRAFTED, BY_POSITION = (
    f"vllm:spec_decode_num_{name}" for name in ("drafts", "draft_tokens", "accepted_tokens_per_pos")
)
ANSWERS = "vllm:request_success"
# suffix of the time at which a counter was created, written by Python's client of Prometheus
CREATED = "_created"
LINE = re.compile(
    rf"^({'|'.join((DRAFTS, DRAFTED, BY_POSITION, ANSWERS))})(_total|{CREATED})?(\{{.*\}})?"
    r"[ \t]+(\S+)(?:[ \t]+-?\d+)?[ \t]*$",
    re.MULTILINE,
)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
# labels that tell apart counters of one engine; all further labels tell engines apart
OF_AN_ENGINE = ("position", "finished_reason")
# most rounds: float64 holds integers exactly up to here
MOST_ROUNDS = 2.0**53
# least rounds that reach a judged position: the share of fewer rounds is not nearly normal
FEWEST = 10
GAP = "position", "expected", "expected_error", "observed", "observed_error", "errors", "off"
ASKED = {
    "behind_ends": "--behind-ends: must say whether the engine's numbers have places behind an end "
    "of text in them (in, as vLLM's; out)",
    "short_ends": "--drafted: must say how many tokens were drafted in these rounds, as engines "
    "draft less where a text ends",
}
Column = Float[np.ndarray, "numbers"]
Labels = tuple[tuple[str, str], ...]
Counters = dict[tuple[str, Labels], float]  # of one engine, by name and labels


@dataclass(frozen=True, eq=False)
class Observation:
    """Acceptance that an engine counted, by position in the draft.

    Attributes
    ----------
    accepted : (K,) share of all rounds that reach and accept each position.
    rounds : number of rounds that drafted a token.
    rounding : (K,) standard deviation of the rounding error of ``accepted``.
    drafted : number of drafted tokens in all rounds; None if unknown.
    answers : number of answers that the rounds belong to; None to assume as many rounds an answer
        as in the trace.
    behind_ends : whether the numbers include places behind an end of text; None if unknown.
    restarted : number of engines that restarted; counts before the restart are left out.
    shares : (K,) of the rounds that go on to a position, the share that drafts it; None if unknown.
    by_request : (K,) standard error over requests of the accepted share, among rounds that accept
        the position before; None if unknown.

    Raises
    ------
    ValueError
        Shares that rise with the position or are not in [0, 1], fewer than FEWEST rounds or more
        than MOST_ROUNDS, more or fewer drafted tokens than the rounds can have, no answer.
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
        """Raise ValueError unless the numbers are of ``width`` positions."""
        if len(self.accepted) != width:
            raise ValueError(
                f"observed: must have the {width} positions that are expected (another K is "
                f"another decode: --num-draft-tokens); got {len(self.accepted)}"
            )

    def drafted_share(self) -> tuple[Column, Column]:
        """Return two bounds (K,) on the share that drafts a position, of rounds that go on to it.

        Counters give only the sum of drafted tokens, and drafts may have ended early anywhere.
        """
        if self.shares is not None:
            return np.maximum(self.shares, 1e-9), np.maximum(self.shares, 1e-9)
        width = len(self.accepted)
        missing = 0.0 if self.drafted is None else width - self.drafted / self.rounds
        least = np.maximum(1 - missing / np.arange(width, 0, -1), 1e-9)
        return np.where(np.arange(width), least, 1.0), np.ones(width)


def observed_rates(text: str, rounds: float | None, width: int, **known: Any) -> Observation:
    """Read printed acceptance: a comma-separated share of all rounds for each position.

    ``known`` holds further fields of the :class:`Observation`. Raises ValueError for words that are
    not numbers, for shares that rise, if there are not ``width`` shares, and if ``rounds`` is None.
    """
    words = [word.strip() for word in text.split(",")]
    rates = np.array([check.number("--observed", word, 0, MOST_ROUNDS) for word in words])
    digits = [17 if "e" in word.lower() else len(word.partition(".")[2]) for word in words]
    rounding = 10.0 ** -np.array(digits) / np.sqrt(12)
    Observation(rates, FEWEST, rounding).check_width(width)  # report wrong shares first
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
    """Read vLLM's Prometheus text; if ``before`` is given, count only what was added since.

    An engine has restarted if one of its counters fell or was created again. All its counters then
    began at 0 again, and counts from before the restart are left out. vLLM's numbers include places
    behind an end of text, and the number of answers that have ended; fields in ``known`` replace
    these. Raises OSError or ValueError for unreadable files, missing or repeated counters, several
    models, a counter of ``before`` that is missing, and if there are not ``width`` positions.
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
    """Return whether an engine restarted; ValueError if the texts seem to be in the wrong order."""
    created = {key for key in since if key[0].endswith(CREATED)}
    fell = any(counters[key] < since[key] for key in since.keys() - created)
    anew = any(counters[key] != since[key] for key in created)
    if fell and created and not anew:
        got = "counters that fell in an engine that has not restarted"
        raise ValueError(f"--metrics: must be two texts, before and after; got {got}")
    return anew or fell


def _engines(path: str | Path) -> dict[Labels, Counters]:
    """Return vLLM's counters of drafts and answers in a file, by engine."""
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


@dataclass(frozen=True, eq=False)
class Compared:
    """Result of comparing an observation with an expectation.

    ``gaps`` has a dictionary, with the keys of GAP, for each position that enough rounds reached.
    Its entry ``errors`` is the difference in standard errors, its entry ``off`` whether this
    difference is too large.
    """

    gaps: Sequence[dict[str, Any]]
    alarm: bool  # whether any position is off

    @property
    def sentence(self) -> str:
        """Return the verdict as a sentence, without a cause: counts do not show the cause."""
        if not self.alarm:
            return "as expected: every position is inside"
        off = ", ".join(str(gap["position"]) for gap in self.gaps if gap["off"])
        return f"not as expected: off at position {off}"


def compare_observed(healthy: Expectation, seen: Observation) -> Compared:
    """Compare counted acceptance with the expectation, position by position.

    Each position is tested among the rounds that accept the position before, because a fault at an
    early position lowers all later counts; shares in ``gaps`` are of the rounds that reach the
    position. False alarms: over all positions together, a correct engine raises an alarm with a
    probability of at most about 1 − QUIET (2 %). If the observation leaves open whether places
    behind ends are counted, or whether drafts are cut at ends, both cases are tried.

    Raises
    ------
    ValueError
        The numbers of positions differ; the two cases above give different verdicts; CannotSay
        for too few texts.
    """
    check_texts(healthy.texts)
    seen.check_width(len(healthy.accepted))
    record, unlike = healthy.record, {"behind_ends": (seen.behind_ends,), "short_ends": (False,)}
    if seen.behind_ends is None:
        unlike["behind_ends"] = (False,) if record.going.all() else (False, True)
    if seen.drafted is seen.shares is None and (record.left < record.lengths).any():
        unlike["short_ends"] = (False, True)
    found = {}
    for way in product(*unlike.values()):
        found[way] = _compared(healthy.counted(**dict(zip(unlike, way, strict=True))), seen)
    for one, other in combinations(found, 2):
        if found[one].alarm != found[other].alarm and sum(map(ne, one, other)) == 1:
            asked = ASKED["behind_ends" if one[0] != other[0] else "short_ends"]
            raise ValueError(f"{asked}; the verdict depends on it; got none")
    return next(iter(found.values()))


def _compared(healthy: Expectation, seen: Observation) -> Compared:
    """Return the comparison with an expectation that counts as the engine does."""
    base = _Gaps(healthy, seen)
    limit = critical(len(base.places), healthy.freedom, QUIET)
    gaps: list[dict[str, Any]] = [
        dict(zip(GAP, (int(place), *numbers, abs(numbers[-1]) > limit), strict=True))
        for place, *numbers in zip(*(column.tolist() for column in base.columns), strict=True)
    ]
    return Compared(gaps, any(gap["off"] for gap in gaps))


class _Gaps:
    """Expected and observed shares with standard errors, at each position that enough rounds reach.

    Shares are of the rounds that accept the position before; ``columns`` has shares of the rounds
    that reach the position.
    """

    def __init__(self, expectation: Expectation, seen: Observation) -> None:
        self.expectation = expectation
        before = np.concatenate([[1.0], seen.accepted[:-1]])
        mass, on, reached = expectation.mass
        places = np.flatnonzero(np.minimum(before * seen.rounds, mass[: len(before)]) >= FEWEST)
        if not len(places):
            raise CannotSay(f"cannot say: at least {FEWEST} rounds must be expected and counted")
        self.places = places
        means = [expectation.if_accepted[place] for place in places]
        self.expected = np.nan_to_num([mean.value for mean in means])
        self.expected_error = np.nan_to_num([expectation.error(mean) for mean in means])
        self.shown = (reached / np.maximum(mass, 1e-300))[places]
        # the trace's number of texts over the engine's; the squared error over texts grows with it
        of_texts = expectation.texts / seen.answers if seen.answers else 0.0
        self.fewer = max(expectation.rounds / seen.rounds, of_texts)
        if seen.by_request is not None:  # errors over requests include differences between texts
            self.fewer = 0.0
        low = high = seen.accepted[places] / before[places]
        if seen.drafted is not None or seen.shares is not None:
            own = (reached / np.maximum(on, 1e-300))[places]
            low, high = (low * own / share[places] for share in reversed(seen.drafted_share()))
        self.observed: Column = np.clip(self.expected, low, high)
        self._errors(seen, before[places])

    def _errors(self, seen: Observation, before: Column) -> None:
        """Set the standard errors of the counts, and the differences in standard errors."""
        count, places = before * seen.rounds, self.places
        earlier = np.concatenate([[0.0], seen.rounding[:-1]])[places]
        rounding = np.hypot(seen.rounding[places], self.observed * earlier) / before
        coins = np.array([self.expectation.coins(int(place)) for place in places]) / count
        # in all at least the binomial variance: the terms above are too small for rates near 0 or 1
        rate = (count * np.clip(self.expected, 0, 1) + 0.5) / (count + 1)
        binomial = rate * (1 - rate) / count
        texts = self.expected_error**2 * self.fewer
        requests = 0.0 if seen.by_request is None else seen.by_request[places] ** 2
        own = np.maximum(np.maximum(coins, binomial - texts), requests)
        self.observed_error = np.sqrt(texts + own + rounding**2)
        gap = self.observed - self.expected
        size = np.maximum(np.abs(gap) - 0.5 / count, 0.0)
        error = np.hypot(self.observed_error, self.expected_error)
        self.errors: Column = np.sign(gap) * size / np.maximum(error, 1e-300)

    @property
    def columns(self) -> tuple[Column, ...]:
        """Return the columns of GAP except ``off``."""
        numbers = self.expected, self.expected_error, self.observed, self.observed_error
        return self.places + 1.0, *(own / self.shown for own in numbers), self.errors
