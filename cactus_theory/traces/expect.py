r"""Expected acceptance at each position of a draft, from rows, with standard errors over texts.

A round accepts at least i drafted tokens with probability :math:`P_i = Π_{j≤i} φ_j` given its
rows (a chain; ``VerdictLaw.alive`` for any verifier). Expected are the means over rounds that
drafted anything: :math:`m_i = E[P_i]`, which an engine counts as accepted at position i over
drafts, and :math:`1 + Σ_i m_i` tokens a call. Mean φ_j multiplied up is another number: rows of one
round are alike. A place behind an end of text is not reached, unless an engine counts it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from cactus_theory.base import arguments as check
from cactus_theory.base import defaults
from cactus_theory.base.significance import EXPECTED
from cactus_theory.base.threads import one_thread
from cactus_theory.policies import Policy
from cactus_theory.traces.estimate import Estimate, check_texts, ratio_of_sums
from cactus_theory.traces.replays import batch_law, charged_policy, draft_width
from cactus_theory.traces.trace import ENTRIES, Trace
from cactus_theory.verify.contract import Verifier, find_verifier


@dataclass(frozen=True, eq=False)
class LoggedRounds:
    """The rounds of a trace that drafted anything, all coins integrated out.

    Attributes
    ----------
    text, lengths, left : (R,) whose round it is, how many tokens it drafted, and how many at most
        an engine drafts that stops at the end of the text.
    alive : (R, K + 1) how probably at least so many drafted tokens are accepted.
    going : (R, K + 1) whether none of so many drafted tokens ends the text.
    prompts : (T,) of each text of the trace.
    source : fingerprint of the trace.
    """

    text: Int[np.ndarray, "rounds"]
    lengths: Int[np.ndarray, "rounds"]
    left: Int[np.ndarray, "rounds"]
    alive: Float[np.ndarray, "rounds K1"]
    going: Bool[np.ndarray, "rounds K1"]
    prompts: Int[np.ndarray, "texts"]
    source: str


class Expectation:
    """Expected acceptance of a policy and a verifier on a trace, by position.

    Attributes
    ----------
    rounds, texts : how many drafted anything, and how many texts the errors count.
    accepted : K estimates, the share of all rounds that reach and accept each position.
    if_reached : the share accepted of those that reach it.
    if_accepted : the share accepted of those that accept the position before: an end of text, and
        the end of a draft, count as a place that is not accepted.
    tokens_per_call : the mean of products: new tokens per target call, one of them not drafted.
    mass : by position how many rounds accept the one before, go on there, and reach it.
    strata : the prompt of each text, where each prompt has two: errors are then of these prompts.
        All 0 otherwise: errors are of prompts like these.
    freedom : degrees of freedom of errors.
    """

    def __init__(
        self, record: LoggedRounds, behind_ends: bool = False, short_ends: bool = False
    ) -> None:
        """Count places behind an end of text; draft no more than is left of a text, or all."""
        self.record, self.behind_ends = record, behind_ends
        lengths = np.minimum(record.lengths, record.left) if short_ends else record.lengths
        drafted = np.arange(record.alive.shape[1] - 1) < lengths[:, None]
        going, whole = record.going | behind_ends, (lengths > 0).astype(float)
        self._accepted = np.where(drafted & going[:, :-1], record.alive[:, 1:], 0.0)
        before = np.concatenate([whole[:, None], self._accepted], 1)
        on = np.where(going, before, 0.0)
        self._before, reached = before[:, :-1], np.where(drafted, on[:, :-1], 0.0)
        self.mass = tuple(part.sum(0) for part in (self._before, on[:, :-1], reached))
        texts = np.unique(record.text[lengths > 0])
        which = np.searchsorted(texts, record.text)
        self.rounds, self.texts = float(whole.sum()), len(texts)

        def ratio(above: np.ndarray, below: np.ndarray) -> Estimate:
            top, under = (np.bincount(which, own, self.texts + 1)[:-1] for own in (above, below))
            return ratio_of_sums(top, under, record.source)

        self.accepted = tuple(ratio(own, whole) for own in self._accepted.T)
        self.if_reached = tuple(map(ratio, self._accepted.T, reached.T))
        self.if_accepted = tuple(map(ratio, self._accepted.T, self._before.T))
        self.tokens_per_call = ratio(whole + on[:, 1:].sum(1), whole)
        prompts = record.prompts[texts]
        twice = (np.unique(prompts, return_counts=True)[1] > 1).all()
        self.strata = prompts if twice else np.zeros_like(prompts)
        self.freedom = self.texts - len(np.unique(self.strata))

    def counted(self, **options: bool) -> "Expectation":
        """Return the same rounds under other options."""
        return Expectation(self.record, **options)

    def error(self, estimate: Estimate) -> float:
        """Return the standard error: the jackknife's, within prompts where it can be."""
        less = (self.texts - 1) / self.texts
        _, which, sizes = np.unique(self.strata, return_inverse=True, return_counts=True)
        around = estimate.left_out - (np.bincount(which, estimate.left_out) / sizes)[which]
        return less * float(np.sqrt((sizes / (sizes - 1) * np.bincount(which, around**2)).sum()))

    def intervals(self, estimates: Sequence[Estimate]) -> list[tuple[float, float]]:
        """Return intervals that hold together with probability EXPECTED (Bonferroni, Student's t).

        They are Wilson's over texts: of shares within [0, 1], of tokens a call within [1, K + 1].
        Raises CannotSay for fewer than FEWEST_TEXTS texts.
        """
        check_texts(self.texts)
        width = critical(len(estimates), self.freedom)
        return [
            wilson(own.value, self.error(own), width, self.texts,
                   *((1, len(self.accepted)) if own is self.tokens_per_call else (0, 1)))
            for own in estimates
        ]  # fmt: skip

    def coins(self, place: int) -> float:
        """Return the variance of accepted minus expected, of a round that accepts the one before.

        That of the coins given the rows: texts and rounds that differ are not in it.
        """
        rate = self.if_accepted[place].value
        own, base = self._accepted[:, place], self._before[:, place]
        spread = own * (1 - 2 * rate) + rate**2 * base - (own - rate * base) ** 2
        return float(spread.sum() / max(base.sum(), 1e-300))


def wilson(
    value: float, error: float, width: float, texts: int, low: float, span: float
) -> tuple[float, float]:
    """Return Wilson's interval of a mean in [low, low + span]: ``width`` errors; all for no value.

    Its number of trials is the one whose share would have this error; of a mean at an end of its
    range it is the number of texts.
    """
    rate, spread = (value - low) / span, error / span
    if not np.isfinite([rate, spread]).all():
        return low, low + span
    variance = max(rate * (1 - rate), 0.0)
    per_trial = spread**2 / variance if variance > 0 else 1 / texts
    more = width**2 * per_trial
    half = width * np.sqrt(variance * per_trial + more * per_trial / 4)
    ends = ((rate + more / 2 + sign * half) / (1 + more) for sign in (-1, 1))
    first, last = (low + span * min(max(float(end), 0.0), 1.0) for end in ends)
    return first, last


@one_thread()
def expect(
    source: Trace | str | Path,
    policy: str | Policy = defaults.POLICY,
    verifier: str | Verifier = defaults.VERIFIER,
    *,
    num_draft_tokens: int | None = None,
    behind_ends: bool = False,
    on_cycles: Callable[[int], Any] = int,
) -> Expectation:
    """Return the acceptance to expect at each position; exact given the rows, all coins out.

    A trace's rounds start where those of the decode that was logged did: for that decode's
    policy, verifier and K the numbers are consistent. LoggedRounds without a draft do not count.

    Parameters
    ----------
    source : a trace or its folder.
    policy, verifier : what decides.
    num_draft_tokens : cut longer drafts to so many; None for all that were logged.
    behind_ends : whether places behind an end of text are counted, as some engines do.
    on_cycles : called with how many rounds are done, now and then.

    Returns
    -------
    accepted : K estimates, the share of rounds that reach and accept each position.
    tokens_per_call : an estimate.
    rounds : how many.

    Raises
    ------
    ValueError, NotImplementedError
        As :func:`cactus_theory.traces.replay`.

    Examples
    --------
    >>> expect("simulations/data/trace", num_draft_tokens=2).rounds
    68.0
    """
    trace = Trace.open(source) if isinstance(source, str | Path) else source
    width = draft_width(trace, num_draft_tokens)
    rule = charged_policy(trace, policy)
    verifier = find_verifier(verifier)
    verifier.check(rule)
    longest, done = trace.header.details.get("max_new_tokens"), 0
    nothing = np.zeros(0, int), np.zeros((0, width + 1))
    parts: list[Any] = [(*nothing[:1] * 3, nothing[1].astype(bool), nothing[1])]
    for batch in trace.batches(ENTRIES, width):
        count, drafted = batch.draft_token_ids.shape
        done += count
        on_cycles(done)
        if not drafted:
            continue
        own_alive, own_going, _ = batch_law(batch, rule, verifier, {}, trace.ends)
        left = np.full(count, width)
        if longest is not None:  # beside the token that every call gives
            left = np.clip(longest - 1 - batch.position.numpy(), 0, width)
        wide = [
            np.pad(own.numpy(), ((0, 0), (0, width - drafted))) for own in (own_going, own_alive)
        ]
        parts.append((batch.text.numpy(), np.full(count, drafted), left, *wide))
    text, lengths, left, going, alive = map(np.concatenate, zip(*parts, strict=True))
    prompts, source = np.array(trace.prompts), trace.fingerprint
    record = LoggedRounds(text, lengths, left, alive, going, prompts, source)
    return Expectation(record, behind_ends)


@cache
def critical(tests: float, freedom: int, level: float = EXPECTED) -> float:
    """Return how many standard errors two-sided tests may be off; ∞ without freedom.

    All ``tests``, of which one-sided ones count half, together alarm with probability 1 − level at
    most (Bonferroni), where errors have so many degrees of freedom (Student's t). Raises
    ModuleNotFoundError without scipy (extra llm).
    """
    special = check.optional_module("scipy.special", "llm")
    tail = (1 - level) / (2 * tests)
    return float("inf") if freedom < 1 else -float(special.stdtrit(freedom, tail))
