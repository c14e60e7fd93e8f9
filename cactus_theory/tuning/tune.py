"""Which policy, knob, verifier and K are fastest for a divergence per emitted token, on a trace.

For every family and K the knob is solved so that the meter reads the level over all texts but
those that values are learned from. The fastest setting is chosen by the predicted speed on one
half of these texts, and every speed that is reported is from the other half: the best of many
noisy numbers is too good, a number that was not chosen by is not. The chosen setting is recommended
if it is faster than decoding without a draft on both halves. Siblings are tried only when asked
for, and recommended only where they are faster than the fastest setting without, by more than
BEYOND standard errors of the paired ratio on both halves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cactus_theory.decoding._checks import whole_number
from cactus_theory.divergences import Divergence
from cactus_theory.divergences import divergence as find_divergence
from cactus_theory.policies import policy as find_policy
from cactus_theory.policies._values import ValueTable
from cactus_theory.traces.estimate import Estimate, Replay
from cactus_theory.traces.replays import Source
from cactus_theory.traces.trace import Trace
from cactus_theory.tuning.answers import Answers, answers_of
from cactus_theory.tuning.costs import Costs
from cactus_theory.tuning.families import Family, checked_level, families
from cactus_theory.tuning.knobs import TOLERANCE, Knobs
from cactus_theory.tuning.learned import ENOUGH_CYCLES, learn_for, shares
from cactus_theory.tuning.measure import Setting, verification_times
from cactus_theory.tuning.speed import plain_speed, speed

WIDTHS = (1, 2, 3, 4, 6, 8, 12)
# at so many K, the least, a middle and the largest one, costs are measured
TIMED_WIDTHS = 3
BEYOND = 2.0
Measure = Callable[[Sequence[Setting]], Costs]
OnStep = Callable[[str, int, int], None]


@dataclass(frozen=True, eq=False)
class Choice:
    """A setting, what it is predicted to do, and what it will meter.

    Attributes
    ----------
    family : as tables show it, without the knob's value.
    policy, verifier, num_draft_tokens : what to decode with.
    replay : over all texts that knobs are solved on.
    chosen_by, speed : tokens per unit of time on the half that is chosen by, and on the other.
    values : file of a table of values that the policy reads, which ``policy`` leaves out.

    Examples
    --------
    >>> from cactus_theory.traces import SavedRows
    >>> q, p = np.array([[0.2, 0.8], [0.5, 0.5]]), np.array([[0.9, 0.1], [0.6, 0.4]])
    >>> best = tune(SavedRows.of(q, p), Costs.ratios(0.1), 0.05).choices[0]
    >>> best.verifier, best.num_draft_tokens
    ('chain', 1)
    """

    family: Family
    policy: str
    verifier: str
    num_draft_tokens: int
    replay: Replay
    chosen_by: Estimate
    speed: Estimate
    values: Path | None = None


@dataclass(frozen=True, eq=False)
class Tuned:
    """What tuning found.

    Attributes
    ----------
    level, divergence : what may be metered per emitted token.
    costs : of calls.
    plain : tokens per unit of time without a draft.
    choices : every family and K within the level, the fastest (by ``chosen_by``) first.
    halves : numbers of the texts of ``replay`` that are chosen by, and that are reported.
    source : the trace's cycles, texts and models, and what was tried.
    answers : how the level falls on single texts, and what a cap on each would cost, if asked for.

    Examples
    --------
    >>> from cactus_theory.traces import SavedRows
    >>> q, p = np.array([[0.2, 0.8], [0.5, 0.5]]), np.array([[0.9, 0.1], [0.6, 0.4]])
    >>> found = tune(SavedRows.of(q, p), Costs.ratios(0.1), 0.05)
    >>> found.lossless.policy, round(found.plain, 2)
    ('speculative', 1.0)
    >>> slow_draft = found.at_costs(Costs.ratios(2.0))
    >>> print(slow_draft.best)
    None
    """

    level: float
    divergence: str
    costs: Costs
    plain: float
    choices: tuple[Choice, ...]
    halves: tuple[Sequence[int], Sequence[int]]
    source: dict[str, object] = field(default_factory=dict)
    answers: Answers | None = None

    @property
    def best(self) -> Choice | None:
        """Return the fastest setting; None if it beats plain decoding on one half or none.

        With siblings only if these pay.
        """
        return self._ahead(self.choices)

    @property
    def lossless(self) -> Choice | None:
        """Return the fastest lossless setting; None as for ``best``."""
        return self._ahead([own for own in self.choices if own.family.lossless])

    def _ahead(self, choices: Sequence[Choice]) -> Choice | None:
        path, tree = (fastest(choices, siblings) for siblings in (False, True))
        first = tree if path is None or (tree is not None and _pays(tree, path)) else path
        if first is None or min(first.chosen_by.value, first.speed.value) <= self.plain:
            return None
        return first

    @property
    def trees(self) -> "Trees | None":
        """Return what siblings do at best, None where none were tried or fit."""
        path, tree = (fastest(self.choices, siblings) for siblings in (False, True))
        if path is None or tree is None:
            return None
        width, costs = tree.num_draft_tokens, self.costs
        beside, family = costs.beside(tree.family.siblings), tree.family
        call = beside.call(width, family.costs, family.times)
        over, alone = (own.part("target", width) for own in (beside, costs))
        texts = 1.0 if costs.new_tokens is None else costs.new_tokens
        start = 0.0 if costs.new_tokens is None else beside.start
        may = []
        for own, other in ((tree.chosen_by, path.chosen_by), (tree.speed, path.speed)):
            allowed = texts / max(other.value, self.plain) - start
            may.append(call * allowed / (texts / own.value - start))
        ratio = tree.speed / path.speed
        return Trees(tree, path, ratio, over / alone, (over - call + min(may)) / alone)

    def at_costs(self, costs: Costs) -> "Tuned":
        """Return the same settings at other costs: of another batch or machine.

        Raises
        ------
        ValueError
            A family whose verification was not measured.
        """
        again = [_priced(own, costs, self.halves) for own in self.choices]
        again.sort(key=lambda own: -own.chosen_by.value)
        return replace(self, costs=costs, plain=plain_speed(costs), choices=tuple(again))

    def of_families(self) -> list[Choice]:
        """Return the fastest K of every family and verifier, fastest first."""
        best: dict[str, Choice] = {}
        for own in self.choices:
            best.setdefault(own.family.key, own)
        return list(best.values())


def fastest(choices: Sequence[Choice], siblings: bool = False) -> Choice | None:
    """Return the fastest setting without siblings, or with some, on the half to choose by."""
    own = [choice for choice in choices if (choice.family.siblings > 0) == siblings]
    return max(own, key=lambda choice: choice.chosen_by.value, default=None)


@dataclass(frozen=True)
class Trees:
    """The fastest setting with siblings beside the fastest one without.

    Attributes
    ----------
    tree, path : the settings.
    ratio : tokens per unit of time of the tree over those of the path.
    pass_ratio : the target's pass over the tree's tokens over that of a path of as many places.
    pays_below : the ratio of passes from which the tree is the faster one on both halves, and
        faster than plain decoding.
    """

    tree: Choice
    path: Choice
    ratio: Estimate
    pass_ratio: float
    pays_below: float

    @property
    def nodes(self) -> int:
        """Return the tokens of the tree's pass."""
        return self.tree.num_draft_tokens * (self.tree.family.siblings + 1) + 1


def _pays(tree: Choice, path: Choice) -> bool:
    """Return whether a tree is faster on both halves, beyond its interval; one text has none."""
    ratios = tree.chosen_by / path.chosen_by, tree.speed / path.speed
    return all(own.value - BEYOND * own.standard_error > 1 for own in ratios)


def tune(
    source: Source,
    costs: Costs | Measure,
    level: float,
    *,
    divergence: str | Divergence = "kl",
    widths: Sequence[int] | None = None,
    policies: Sequence[str] | None = None,
    siblings: Sequence[int] = (),
    values: str | Path | None = None,
    capped: bool = False,
    on_step: OnStep | None = None,
) -> Tuned:
    """Return the settings within a divergence per token, by predicted speed.

    Parameters
    ----------
    source : a trace, or saved rows (K = 1 only).
    costs : of a call, or what measures them for settings that it is given.
    level : divergence per emitted token that may be metered, in its unit (nats for KL).
    divergence : what the meter adds up.
    widths : K to try; None for the usual ones up to what was logged.
    policies : as :func:`cactus_theory.tuning.families.families`.
    siblings : how many of the draft's likeliest tokens to try beside each drafted one, with every
        family; none by default.
    values : where to write what an accepted token is worth, learned from a quarter of the texts,
        for the soft band at its fastest K; None, or too few cycles, and it does without.
    capped : also replay a ledger, which keeps every answer within the level (KL, of a trace).
    on_step : called with what is done, how many steps of it are, and of how many.

    Raises
    ------
    ValueError
        A level that is not above 0, more drafted tokens than were logged, fewer than two texts,
        an unknown divergence or policy, drafted trees, siblings of drafts without rows or whose
        costs are not known.

    Examples
    --------
    >>> from cactus_theory.traces import SavedRows
    >>> q, p = np.array([[0.2, 0.8], [0.5, 0.5]]), np.array([[0.9, 0.1], [0.6, 0.4]])
    >>> best = tune(SavedRows.of(q, p), Costs.ratios(0.1), level=0.05).best
    >>> best.verifier, best.num_draft_tokens
    ('chain', 1)
    >>> round(best.replay.divergence_per_token().value, 3)
    0.05
    """
    level, kind = checked_level(level), find_divergence(divergence)
    if isinstance(source, Trace):
        source.check_chains("tune")
    said = on_step or (lambda what, done, total: None)
    widths = _widths(source, widths)
    wanted = families(kind, policies, siblings)
    if siblings and not _has_rows(source):
        raise ValueError("siblings: must be tried on a trace whose drafts have rows; got none")
    for count in siblings if isinstance(costs, Costs) else ():
        costs.beside(count)
    learning = values is not None and kind.spec == "kl" and _can_learn(source, wanted)
    texts = shares(source.texts, learning)
    judged = source.part(texts.judged) if isinstance(source, Trace) else source
    found = _solved(judged, wanted, widths, level, kind.spec, said)
    known = costs if isinstance(costs, Costs) else costs(_settings(found))
    choices = [_choice(own, made, known, texts.halves) for own, made in found]
    soft = fastest([own for own in choices if own.family.name == "soft_band:price"])
    soft = soft if learning else None
    if soft is not None and soft.num_draft_tokens > 1:
        assert values is not None and isinstance(source, Trace) and isinstance(judged, Trace)
        made = learn_for(source.part(texts.learned), soft.num_draft_tokens, Path(values))
        said("learning values", 1, 1)
        valued = _with_values(judged, soft, made, level, kind.spec, known)
        if valued is not None:
            family, spec, own = valued
            choice = _choice(family, own, known, texts.halves)
            choices.append(replace(choice, policy=spec, values=Path(made.file)))
            known = known.with_times(family.key, soft.family.key, family.times)
    choices.sort(key=lambda own: -own.chosen_by.value)
    paths = [own.key for own in wanted if not own.siblings]
    tried = {"families": paths, "widths": widths}
    about = _about(source) | {"tried": tried | ({"siblings": list(siblings)} if siblings else {})}
    answers = None
    if capped and kind.spec == "kl" and isinstance(judged, Trace):
        said("replaying a cap on every answer", 0, 1)
        answers = _capped(judged, choices, level)
    plain, every = plain_speed(known), tuple(choices)
    return Tuned(level, kind.spec, known, plain, every, texts.halves, about, answers)


def _widths(source: Source, widths: Sequence[int] | None) -> list[int]:
    logged = source.num_draft_tokens
    if widths is None:
        return sorted({min(width, logged) for width in WIDTHS})
    for width in widths:
        if whole_number("num-draft-tokens", width, 1) > logged:
            raise ValueError(f"num-draft-tokens: must be at most the {logged} logged; got {width}")
    if not widths:
        raise ValueError("num-draft-tokens: must hold at least one K; got none")
    return sorted(set(widths))


def _can_learn(source: Source, wanted: Sequence[Family]) -> bool:
    enough = len(source) >= ENOUGH_CYCLES and _has_rows(source)
    return enough and any(own.name == "soft_band:price" for own in wanted)


def _has_rows(source: Source) -> bool:
    return isinstance(source, Trace) and source.manifest.total("draft_rows") > 0


def _solved(
    judged: Source,
    wanted: Sequence[Family],
    widths: Sequence[int],
    level: float,
    divergence: str,
    said: OnStep,
) -> list[tuple[Family, Replay]]:
    """Return every family at every K, its knob solved; those that cannot stay within are not."""
    found, total = [], len(wanted) * len(widths)
    for number, family in enumerate(wanted):
        knobs = Knobs(judged, family, widths, divergence)
        for place, width in enumerate(widths):
            said(f"solving knobs, {family.key}", number * len(widths) + place, total)
            if (own := knobs.at(width, level)) is not None:
                found.append((family, own))
    said("solving knobs", total, total)
    return found


def _settings(found: Sequence[tuple[Family, Replay]]) -> list[Setting]:
    """Return every family at a few K, each at the knob solved for the K next to it."""
    widths = sorted({own.num_draft_tokens for _, own in found})
    steps = [round(i * (len(widths) - 1) / (TIMED_WIDTHS - 1)) for i in range(TIMED_WIDTHS)]
    timed = sorted({widths[step] for step in steps})
    every: dict[str, dict[int, Replay]] = {}
    for family, own in found:
        every.setdefault(family.key, {})[own.num_draft_tokens] = own
    counts = {family.key: family.siblings for family, _ in found}
    settings = []
    for key, own in every.items():
        for width in timed:
            near = own[min(own, key=lambda known: abs(known - width))]  # noqa: B023
            settings.append(Setting(key, near.policy, near.verifier, width, counts[key]))
    return settings


def _choice(
    family: Family, own: Replay, costs: Costs, halves: tuple[Sequence[int], Sequence[int]]
) -> Choice:
    width, nothing = own.num_draft_tokens, own.tokens_per_call
    made = Choice(family, own.policy, own.verifier, width, own, nothing, nothing)
    return _priced(made, costs, halves)


def _priced(own: Choice, costs: Costs, halves: tuple[Sequence[int], Sequence[int]]) -> Choice:
    """Return the choice with its speeds at these costs."""
    timed = costs.beside(own.family.siblings), own.family.costs, own.family.times
    first, second = (speed(own.replay.part(half), *timed) for half in halves)
    return replace(own, chosen_by=first, speed=second)


def _capped(judged: Trace, choices: Sequence[Choice], level: float) -> Answers | None:
    """Return the fastest lossy setting that a ledger can follow, under a cap on every answer."""
    able = [own for own in choices if own.values is None and not own.family.siblings]
    able = [own for own in able if not find_policy(own.policy).needs_path]
    band = [own for own in able if own.family.name == "band:price"]
    own = fastest([own for own in band or able if not own.family.lossless])
    if own is None:
        return None
    return answers_of(judged, own.family, own.policy, own.num_draft_tokens, level)


def _with_values(
    judged: Trace,
    soft: Choice,
    values: ValueTable,
    level: float,
    divergence: str,
    costs: Costs,
) -> tuple[Family, str, Replay] | None:
    """Return the soft band with values at the K that is fastest without, its knob solved.

    Its spec leaves the values out. Its verification takes several passes for one: it is timed
    beside the other's, on the rows.
    """
    name, width, like = f"{soft.family.name},values", soft.num_draft_tokens, soft.family.key
    family = replace(soft.family, name=name, values=values, like=like)
    knobs = Knobs(judged, family, [width], divergence)
    own = knobs.at(width, level)
    if own is None:
        return None
    spec, times = knobs.spec(own), costs.times(family.key, like)
    if times is None:
        both = find_policy(spec, values=values), soft.policy
        times = verification_times(judged, both, soft.verifier, width)
    return replace(family, times=times), spec, own


def _about(source: Source) -> dict[str, object]:
    """Return what a file of the result says about the trace."""
    about: dict[str, object] = {
        "cycles": len(source),
        "texts": source.texts,
        "fingerprint": source.fingerprint,
        "knob_tolerance": TOLERANCE,
    }
    if not isinstance(source, Trace):
        return about
    header = source.header
    if "max_new_tokens" in header.details:
        about["max_new_tokens"] = header.details["max_new_tokens"]
    weights = {
        name: header.details[name]
        for name in ("target_weights", "draft_weights")
        if name in header.details
    }
    return about | {"target": header.target, "draft": header.draft,
                    "temperature": header.temperature} | weights  # fmt: skip
