"""Settings with their predicted speeds, and which of them is recommended.

The chosen setting is recommended if it is faster than decoding without a draft on both halves of
the texts. Siblings are recommended only where they are faster than the fastest setting without,
by more than BEYOND standard errors of the paired ratio on both halves.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cactus_theory.traces.estimate import Estimate, Replay
from cactus_theory.tuning.answers import Answers
from cactus_theory.tuning.costs import Costs, plain_speed, speed
from cactus_theory.tuning.families import Family

# standard errors of a paired ratio that siblings must be ahead by
BEYOND = 2.0


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
        again = [priced(own, costs, self.halves) for own in self.choices]
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


def priced(own: Choice, costs: Costs, halves: tuple[Sequence[int], Sequence[int]]) -> Choice:
    """Return the choice with its speeds at these costs."""
    timed = costs.beside(own.family.siblings), own.family.costs, own.family.times
    first, second = (speed(own.replay.part(half), *timed) for half in halves)
    return replace(own, chosen_by=first, speed=second)
