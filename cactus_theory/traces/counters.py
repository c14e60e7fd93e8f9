"""Compare the acceptance that an engine counted with the acceptance expected from a trace.

``cactus-theory expect`` uses this module to read vLLM's Prometheus text or printed numbers. The
expectation has standard errors over texts. The counts have errors from the coins, and from their
texts, which may be fewer and longer than the logged texts. Drafted positions behind a token that
ends the text are counted on both sides or on neither.
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
from cactus_theory.traces.expected_acceptance import Expectation, critical

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
    behind_ends : whether the numbers include positions behind a drafted token that ends the text;
        None if unknown.
    restarted : number of engines that restarted; counts before the restart are left out.
    shares : (K,) rounds that draft a position over rounds that go on to it; None if unknown.
    by_request : (K,) standard error over requests of the accepted share, among rounds that accept
        the position before; None if unknown.

    Raises
    ------
    ValueError
        Shares that rise with the position or are not in [0, 1], too few or too many rounds, more or
        fewer drafted tokens than the rounds can have, no answer.
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
        """Return a lower and an upper bound on the share of rounds that draft each position.

        The bounds are (K,), and the share is among the rounds that go on to the position.
        Counters give only the sum of drafted tokens, and drafts may have ended early anywhere.
        """
        if self.shares is not None:
            return np.maximum(self.shares, 1e-9), np.maximum(self.shares, 1e-9)
        width = len(self.accepted)
        missing = 0.0 if self.drafted is None else width - self.drafted / self.rounds
        # a draft without a token at position i (from 0) lacks K − i tokens or more; none lacks all
        least = np.maximum(1 - missing / np.arange(width, 0, -1), 1e-9)
        return np.where(np.arange(width), least, 1.0), np.ones(width)


def observed_rates(text: str, rounds: float | None, width: int, **known: Any) -> Observation:
    """Read printed acceptance: a comma-separated share of all rounds for each position.

    ``known`` holds further fields of the :class:`Observation`. Raises ValueError for words that are
    not numbers, for shares that rise, if there are not ``width`` shares, and if ``rounds`` is None.
    """
    words = [word.strip() for word in text.split(",")]
    rates = np.array([check.number("--observed", word, 0, MOST_ROUNDS) for word in words])
    # a number with an exponent counts as exact: its decimals do not show the last digit's place
    digits = [17 if "e" in word.lower() else len(word.partition(".")[2]) for word in words]
    rounding = 10.0 ** -np.array(digits) / np.sqrt(12)  # of an error uniform over the last digit
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
    began at 0 again, and counts from before the restart are left out. vLLM's numbers include
    positions behind an end of text, and the number of answers that have ended; fields in ``known``
    replace these. Raises OSError or ValueError for unreadable files, missing or repeated counters,
    several models, a counter of ``before`` that is missing, and if there are not ``width``
    positions.
    """
    now = _engines(path)
    earlier = {} if before is None else _engines(before)
    counts, accepted_at = defaultdict[str, float](float), defaultdict[int, float](float)
    restarted = 0
    for engine, counters in earlier.items():
        missing = counters.keys() - now.get(engine, {}).keys()
        if missing:
            name, labels = min(missing)
            raise ValueError(
                f"--metrics: must hold every counter of {before}, or what was counted since cannot "
                f"be told; {path} lacks {name} of {dict(engine + labels)}"
            )
    for engine, counters in now.items():
        at_start = earlier.get(engine, {})
        if _restarted(counters, at_start):
            at_start, restarted = {}, restarted + 1
        for (name, labels), value in counters.items():
            count = value - at_start.get((name, labels), 0.0)
            counts[name] += count
            position = dict(labels).get("position", "")
            if name == BY_POSITION and position.isdecimal():
                accepted_at[int(position)] += count
    if DRAFTS not in counts:
        raise ValueError(f"--metrics: must hold {DRAFTS}_total, as vLLM's text does; got {path}")
    if counts[DRAFTS] < FEWEST:
        since = "" if before is None else f" since {before}"
        raise ValueError(
            f"--metrics: must have counted at least {FEWEST} drafts{since} (an engine that has "
            f"just started has counted none); got {counts[DRAFTS]:g} in {path}"
        )
    positions = len(accepted_at)
    if not positions or sorted(accepted_at) != list(range(positions)):
        raise ValueError(
            "--metrics: must count accepted tokens at positions 0, 1, …; got positions "
            f"{sorted(accepted_at)} in {path}"
        )
    rounds = counts[DRAFTS]
    rates = np.array([accepted_at[position] for position in range(positions)]) / rounds
    further: dict[str, Any] = {"behind_ends": True, "restarted": restarted}
    further |= {"drafted": counts[DRAFTED], "answers": counts[ANSWERS] or None}
    further |= {name: value for name, value in known.items() if value is not None}
    try:
        observation = Observation(rates, rounds, rounding=np.zeros(positions), **further)
    except ValueError as error:
        raise ValueError(f"--metrics: {error} in {path}") from None
    observation.check_width(width)
    return observation


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
    for name, suffix, labels, written in LINE.findall(text):
        pairs, place = sorted(LABEL.findall(labels)), f"{name}{suffix}{labels} in {path}"
        engine = tuple(pair for pair in pairs if pair[0] not in OF_AN_ENGINE)
        counter = name + suffix.replace("_total", ""), tuple(sorted({*pairs} - {*engine}))
        if counter in engines[engine]:
            raise ValueError(f"--metrics: must hold every counter once; got two of {place}")
        engines[engine][counter] = check.number(f"--metrics: {place}", written, 0, MOST_ROUNDS)
    models = {value for engine in engines for label, value in engine if label == "model_name"}
    if len(models) > 1:
        raise ValueError(f"--metrics: must be of one model; got {', '.join(sorted(models))}")
    return engines


@dataclass(frozen=True, eq=False)
class Compared:
    """Result of comparing an observation with an expectation.

    ``gaps`` has a dictionary for each position that enough rounds reached: ``position``; expected
    and observed acceptance with their standard errors; ``errors``, the difference in standard
    errors; and ``off``, whether the difference is too large.
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
    early position lowers all later counts; ``gaps`` shows the share that is accepted of the rounds
    that reach the position. False alarms: over all positions together, a correct engine raises an
    alarm with a probability of at most about 2 %. If the observation does not say whether positions
    behind ends are counted, or whether drafts are cut at ends, all cases are tried.

    Raises
    ------
    ValueError
        The numbers of positions differ; the cases that are tried give different verdicts; CannotSay
        for too few texts.
    """
    check_texts(healthy.texts)
    seen.check_width(len(healthy.accepted))
    # values of the constructor's options of Expectation with which the engine may have counted
    record, options = healthy.record, {"behind_ends": (seen.behind_ends,), "short_ends": (False,)}
    if seen.behind_ends is None:  # if no drafted token ends a text, both values count alike
        options["behind_ends"] = (False,) if record.going.all() else (False, True)
    if seen.drafted is None and seen.shares is None and (record.left < record.lengths).any():
        options["short_ends"] = (False, True)
    results: dict[tuple[Any, ...], Compared] = {}
    for values in product(*options.values()):
        counted = healthy.counted(**dict(zip(options, values, strict=True)))
        results[values] = _compared(counted, seen)
    for one, other in combinations(results, 2):
        # only ways that differ in one option show which flag the verdict depends on
        if results[one].alarm != results[other].alarm and sum(map(ne, one, other)) == 1:
            asked = ASKED["behind_ends" if one[0] != other[0] else "short_ends"]
            raise ValueError(f"{asked}; the verdict depends on it; got none")
    return next(iter(results.values()))


def _compared(healthy: Expectation, observation: Observation) -> Compared:
    """Return the comparison with an expectation that counts as the engine does."""
    found = _Gaps(healthy, observation)
    limit = critical(len(found.places), healthy.freedom, QUIET)
    gaps: list[dict[str, Any]] = []
    for place, *numbers, errors in zip(*(column.tolist() for column in found.columns), strict=True):
        values = int(place), *numbers, errors, abs(errors) > limit
        gaps.append(dict(zip(GAP, values, strict=True)))
    return Compared(gaps, any(gap["off"] for gap in gaps))


class _Gaps:
    """Expected and observed shares with standard errors, at each position that enough rounds reach.

    A share is the number of rounds that accept a position, divided by the number of rounds that
    accept the position before; in ``columns``, by the number of rounds that reach the position.
    ``texts_ratio`` is the trace's number of texts over the engine's.
    """

    def __init__(self, expectation: Expectation, observation: Observation) -> None:
        self.expectation = expectation
        # by position, the engine's share, and its number, of rounds that accept the position before
        share_before = np.concatenate([[1.0], observation.accepted[:-1]])
        counted = share_before * observation.rounds
        # the trace's number of these rounds, of those that go on, and of those that then draft it
        before, go_on, reach = expectation.mass
        places = np.flatnonzero(np.minimum(counted, before[: len(counted)]) >= FEWEST)
        if not len(places):
            raise CannotSay(f"cannot say: at least {FEWEST} rounds must be expected and counted")
        self.places = places
        means = [expectation.if_accepted[place] for place in places]
        self.expected = np.nan_to_num([mean.value for mean in means])
        # NaN where one text has all rounds that accept the position before; then 0
        self.expected_error = np.nan_to_num([expectation.error(mean) for mean in means])
        self.share_reaching = (reach / np.maximum(before, 1e-300))[places]
        # the squared error over texts grows with this ratio
        of_answers = expectation.texts / observation.answers if observation.answers else 0.0
        self.texts_ratio = max(expectation.rounds / observation.rounds, of_answers)
        if observation.by_request is not None:  # these errors include differences between texts
            self.texts_ratio = 0.0
        low = high = observation.accepted[places] / share_before[places]
        if observation.drafted is not None or observation.shares is not None:
            # as if the engine had drafted the position as often as the trace: the largest share
            # that it may have drafted gives the smallest rate
            drafted_in_trace = (reach / np.maximum(go_on, 1e-300))[places]
            least, most = observation.drafted_share()
            low, high = (low * drafted_in_trace / share[places] for share in (most, least))
        # of the rates that the counts allow, the one nearest to the expectation
        self.observed: Column = np.clip(self.expected, low, high)
        self._errors(observation, share_before[places])

    def _errors(self, observation: Observation, before: Column) -> None:
        """Set the standard errors of the counts, and each difference as a multiple of its error."""
        count, places = before * observation.rounds, self.places
        # observed = accepted / before, and both were rounded
        rounding_before = np.concatenate([[0.0], observation.rounding[:-1]])[places]
        rounding = np.hypot(observation.rounding[places], self.observed * rounding_before) / before
        coins = np.array([self.expectation.coins(int(place)) for place in places]) / count
        # in all at least the binomial variance: the terms above are too small for rates near 0 or 1
        rate = (count * np.clip(self.expected, 0, 1) + 0.5) / (count + 1)
        binomial = rate * (1 - rate) / count
        texts = self.expected_error**2 * self.texts_ratio
        requests = 0.0 if observation.by_request is None else observation.by_request[places] ** 2
        within_texts = np.maximum(np.maximum(coins, binomial - texts), requests)
        self.observed_error = np.sqrt(texts + within_texts + rounding**2)
        gap = self.observed - self.expected
        size = np.maximum(np.abs(gap) - 0.5 / count, 0.0)  # half a count: counts are whole numbers
        error = np.hypot(self.observed_error, self.expected_error)
        self.errors: Column = np.sign(gap) * size / np.maximum(error, 1e-300)

    @property
    def columns(self) -> tuple[Column, ...]:
        """Return the positions, then expected and observed shares with errors, then ``errors``."""
        numbers = self.expected, self.expected_error, self.observed, self.observed_error
        shares = (number / self.share_reaching for number in numbers)
        return self.places + 1.0, *shares, self.errors
