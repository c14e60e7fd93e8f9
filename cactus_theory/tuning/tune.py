"""Find the fastest policy, knob, verifier and K within a divergence per emitted token, on a trace.

For every family and K, the knob is solved so that the metered divergence over all texts is the
level. The fastest setting is chosen by its predicted speed on a random half of the texts; all
reported numbers are from the second half. The best of many noisy numbers is too high on average,
but numbers from texts that had no part in the choice are not. The fastest setting is recommended if
it is faster than decoding without a draft on both halves.
"""

import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from cactus_theory.base.arguments import finite, whole_number
from cactus_theory.decoding.setting import Setting
from cactus_theory.decoding.truncation import WHOLE
from cactus_theory.divergences import Divergence
from cactus_theory.divergences.regret import REGRET
from cactus_theory.policies.tilt import tilt_of
from cactus_theory.traces.ends import end_ratio, has_end_ratio
from cactus_theory.traces.estimate import Estimate, Replay, check_texts
from cactus_theory.traces.replays import draft_width
from cactus_theory.traces.trace import Trace
from cactus_theory.tuning.costs import Costs, plain_speed, speed
from cactus_theory.tuning.families import Family, families
from cactus_theory.tuning.knobs import (
    CLOSE_SURPRISE,
    TOLERANCE,
    Knobs,
    charged_in,
    checked_level,
    surprise_of,
    trace_knobs,
    within_surprise,
)
from cactus_theory.tuning.measure import Kind

# K that are tried; small K are closer together, because there one token changes the speed more
TUNED_WIDTHS = (1, 2, 3, 4, 6, 8, 12)
# number of K at which costs are measured: the smallest, one in the middle, the largest
TIMED_WIDTHS = 3
# fields of the trace that a result's file holds, where they are known
WEIGHTS = "target_weights", "draft_weights"
OF_TRACE = ("max_new_tokens", "target", "draft", "temperature", *WEIGHTS, *vars(WHOLE))
Measure = Callable[[Sequence[Kind]], Costs]
OnStep = Callable[[str, int, int], None]


class Halves(NamedTuple):
    """Indices of the texts by which settings are chosen, and of the texts that are reported."""

    chosen_by: list[int]
    reported: list[int]

    @classmethod
    def of(cls, texts: int, seed: int = 0) -> "Halves":
        """Divide ``texts`` texts into random halves; return their indices."""
        order = random.Random(seed).sample(range(texts), texts)
        return cls(sorted(order[::2]), sorted(order[1::2]))


@dataclass(frozen=True, eq=False)
class Choice:
    """A setting to decode with, its predicted speed and its metered divergence.

    Attributes
    ----------
    family : the family, whose name stands in tables without the knob's value.
    replay : the setting, replayed on all texts, on which the knob is solved.
    reported : the replay on the half of the texts by which settings are not chosen; all reported
        numbers are from these texts.
    chosen_by : tokens per unit of time on the half of the texts by which settings are chosen.
    speed : tokens per unit of time on the reported half.
    """

    family: Family
    replay: Replay
    reported: Replay
    chosen_by: Estimate
    speed: Estimate


@dataclass(frozen=True, eq=False)
class Tuned:
    """The result of tuning: all settings within the level, by predicted speed.

    Attributes
    ----------
    level, divergence : most divergence per emitted token (nats for KL), and the divergence's spec.
    costs : time of a target call by its parts.
    plain : tokens per unit of time without a draft.
    choices : every family and K within the level, fastest (by ``chosen_by``) first.
    halves : the indices of the texts in each half.
    over : for each policy without a setting within the level, the least divergence per token that
        was reached.
    surprise : most surprise per token, in nats; None if not limited.
    surprised : for each policy without a setting within ``surprise``, its least surprise per token.
    source : the trace's cycles, texts and models, and the families and K that were tried.
    ends : how likely an end of text is under the best setting, relative to the target; None without
        a lossy best setting, or if the trace has no ends or is not of a lossless decode.
    """

    level: float
    divergence: str
    costs: Costs
    plain: float
    choices: tuple[Choice, ...]
    halves: Halves
    over: dict[str, float] = field(default_factory=dict)
    surprise: float | None = None
    surprised: dict[str, float] = field(default_factory=dict)
    source: dict[str, object] = field(default_factory=dict)
    ends: Estimate | None = None

    @property
    def best(self) -> Choice | None:
        """Return the fastest setting; None unless it beats plain decoding on both halves."""
        return self._ahead(self.choices[0])

    @property
    def lossless(self) -> Choice | None:
        """Return the fastest lossless setting if faster than ``plain`` on each half, else None."""
        first = next((choice for choice in self.choices if choice.family.lossless), None)
        return None if first is None else self._ahead(first)

    def _ahead(self, choice: Choice) -> Choice | None:
        """Return the setting if it beats plain decoding on both halves of the texts, else None."""
        return choice if min(choice.chosen_by.value, choice.speed.value) > self.plain else None

    def of_families(self) -> list[Choice]:
        """Return every family under each verifier at its fastest K, fastest first."""
        best: dict[str, Choice] = {}
        for choice in self.choices:
            best.setdefault(choice.family.key, choice)
        return list(best.values())


def tune(
    trace: Trace,
    costs: Costs | Measure,
    level: float,
    *,
    divergence: str | Divergence = "kl",
    widths: Sequence[int] | None = None,
    policies: Sequence[str] | None = None,
    undrafted: str = "policy",
    surprise: float | None = None,
    seed: int = 0,
    on_step: OnStep | None = None,
) -> Tuned:
    """Find the fastest settings that spend at most a given divergence per token on a trace.

    Parameters
    ----------
    trace : logged rows.
    costs : costs of a target call, or a function that measures them for given settings.
    level : most metered divergence per emitted token, in the divergence's unit (nats for KL; on a
        trace of temperature 0 nats of regret, whatever ``divergence`` is).
    divergence : the divergence that the meter adds up.
    widths : K to try; None for 1, 2, 3, 4, 6, 8 and 12, up to the K that was logged.
    policies : policies to try, as ``specs`` of :func:`cactus_theory.tuning.families.families`.
    undrafted : as for :func:`cactus_theory.traces.replay`.
    surprise : most surprise per emitted token, as for :func:`cactus_theory.compare`; None: any.
    seed : seed of the random halves of the texts.
    on_step : called with the name of the present work, its finished steps, and all its steps.

    Raises
    ------
    ValueError
        A level that is not above 0, more drafted tokens than were logged, an unknown divergence or
        policy; CannotSay, a ValueError, for fewer texts than standard errors need.

    Examples
    --------
    >>> from cactus_theory.traces import Trace
    >>> trace = Trace.open("simulations/data/trace")
    >>> few = {"policies": ["mixture:alpha"], "widths": [1]}
    >>> best = tune(trace, Costs.ratios(0.1), level=0.05, **few).best
    >>> best.replay.verifier, best.replay.num_draft_tokens
    ('chain', 1)
    >>> round(best.replay.divergence_per_token().value, 3)
    0.05
    """
    kind = charged_in(trace, divergence)
    level = checked_level(level, "regret" if kind == REGRET else "nats")
    if surprise is not None and kind == REGRET:
        raise ValueError(f"surprise: must not be given at temperature 0; got {surprise:g}")
    check_texts(sum(entry.cycles > 0 for entry in trace.manifest.shards))
    on_step = on_step or (lambda what, done, total: None)
    widths = _widths(trace, widths)
    candidates = families(kind, policies, trace.ends)
    halves = Halves.of(trace.texts, whole_number("seed", seed, 0))
    limits = level, None if surprise is None else finite("surprise", surprise, -math.inf)
    metered = kind, undrafted
    solved, over, surprised = _solved(trace, candidates, widths, limits, metered, on_step)
    costs = costs if isinstance(costs, Costs) else costs(_settings(solved))
    choices = []
    for family, replay in solved:
        chosen_by, reported = (replay.part(half) for half in halves)
        by_half = (speed(part, costs, family.key) for part in (chosen_by, reported))
        choices.append(Choice(family, replay, reported, *by_half))
    choices.sort(key=lambda choice: -choice.chosen_by.value)
    tried = {"families": [family.key for family in candidates], "widths": widths}
    about = _about(trace) | {"tried": tried, "halves": {"seed": seed}, "undrafted": undrafted}
    speeds = costs, plain_speed(costs), tuple(choices)
    tuned = Tuned(level, kind.spec, *speeds, halves, over, surprise, surprised, source=about)
    if (best := tuned.best) is None or best.family.lossless or not has_end_ratio(trace):
        return tuned
    return replace(tuned, ends=end_ratio(trace, best.replay.policy))


def _widths(trace: Trace, widths: Sequence[int] | None) -> list[int]:
    """Return the K to try, rising; ValueError for more drafted tokens than were logged."""
    if widths is None:
        widths = [min(width, trace.num_draft_tokens) for width in TUNED_WIDTHS]
    if not widths:
        raise ValueError("num_draft_tokens: must hold at least one K; got none")
    return sorted({draft_width(trace, width) for width in widths})


def _solved(
    trace: Trace,
    candidates: Sequence[Family],
    widths: Sequence[int],
    limits: tuple[float, float | None],
    metered: tuple[Divergence, str],
    on_step: OnStep,
) -> tuple[list[tuple[Family, Replay]], dict[str, float], dict[str, float]]:
    """Return each family at each K, with its knob solved, if divergence and surprise allow it.

    ``limits`` are those on divergence and on surprise. Also returned, by policy: the least
    divergence of a policy whose divergence is above the budget at every K, and the least surprise
    of a policy that has settings within the budget, but none within the limit on surprise.
    """
    level, most_surprise = limits
    solved, total = [], len(candidates) * len(widths)
    spent, surprised = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for number, family in enumerate(candidates):
        step = partial(on_step, f"solving knobs, {family.key}")
        search = _Search(trace, family, widths, metered, most_surprise)
        for place, width in enumerate(widths):
            search.on_pass = partial(step, number * len(widths) + place, total)
            tilted, replay = search.within(width, level)
            spent[family.name] += search.spent
            if replay is None:
                continue
            if most_surprise is not None and surprise_of(replay) > most_surprise + CLOSE_SURPRISE:
                surprised[family.name].append(surprise_of(replay))
            else:
                solved.append((tilted, replay))
    on_step("solving knobs", total, total)
    within = {family.name for family, _ in solved}
    beyond = {name: min(found) for name, found in surprised.items() if name not in within}
    over = {name: min(found) for name, found in spent.items() if name not in within | {*beyond}}
    return solved, over, beyond


class _Search:
    """Solver of a family at rising K; the search at a K starts at the tilt of the last K."""

    def __init__(
        self, trace: Trace, family: Family, widths: Sequence[int], metered: tuple[Divergence, str],
        most_surprise: float | None,
    ) -> None:  # fmt: skip
        self.given, self.family, self.most = (trace, widths, metered), family, most_surprise
        self.known: dict[float, Knobs] = {}
        self.tilt, self.on_pass, self.spent = 0.0, lambda: None, list[float]()

    def within(self, width: int, level: float) -> tuple[Family, Replay | None]:
        """Return the family, at the least tilt within the limit on surprise, and its replay."""
        tilted, knobs = self.family, self.knobs(self.family)
        if self.most is not None and tilted.varied:
            tilted, knobs = within_surprise(
                self.family, self.knobs, width, level, self.most, start=self.tilt
            )
            self.tilt = tilt_of(tilted.base)
        replay = knobs.within(width, level)
        self.spent = [*knobs.spent[width].values()]  # at all values of the knob that were tried
        return tilted, replay

    def knobs(self, family: Family) -> Knobs:
        """Return the solver of the family's knob at the family's tilt; it is kept for further K."""
        tilt, (trace, widths, metered) = tilt_of(family.base), self.given
        if tilt not in self.known:
            signed = () if self.most is None else ("surprise",)
            self.known[tilt] = trace_knobs(trace, family, widths, *metered, signed)
        self.known[tilt].on_pass = self.on_pass
        return self.known[tilt]


def _settings(solved: Sequence[tuple[Family, Replay]]) -> list[Kind]:
    """Return the settings to time: each family at a few K, at the knob solved for the nearest K."""
    widths = sorted({replay.num_draft_tokens for _, replay in solved})
    steps = [round(i * (len(widths) - 1) / (TIMED_WIDTHS - 1)) for i in range(TIMED_WIDTHS)]
    timed = sorted({widths[step] for step in steps})
    by_width: dict[str, dict[int, Replay]] = {}
    for family, replay in solved:
        by_width.setdefault(family.key, {})[replay.num_draft_tokens] = replay
    settings = []
    for key, replays in by_width.items():
        for width in timed:
            nearest = replays[min(replays, key=lambda other: abs(other - width))]  # noqa: B023
            law = nearest.temperature, nearest.cuts
            settings.append((key, Setting(nearest.policy, width, nearest.verifier, *law)))
    return settings


def _about(trace: Trace) -> dict[str, object]:
    """Return the sizes, models and settings of the trace, for the file of a result."""
    details = trace.header.details | vars(trace.header)
    return {
        "cycles": len(trace),
        "texts": trace.texts,
        "fingerprint": trace.fingerprint,
        "knob_tolerance": TOLERANCE,
        "drafts": "sampled" if trace.manifest.total("draft_rows") else "deterministic",
        **{name: details[name] for name in OF_TRACE if name in details},
    }
