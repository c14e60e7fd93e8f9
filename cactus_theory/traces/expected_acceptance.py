r"""Compute the acceptance to expect at each position of a draft, with standard errors over texts.

Given its rows, a round accepts at least i drafted tokens with probability
:math:`P_i = Π_{j≤i} φ_j` (a chain; ``VerdictLaw.alive`` for any verifier). The expectation is the
mean over rounds with a draft: :math:`m_i = E[P_i]` is the share of drafts whose token at position i
an engine counts as accepted, and :math:`1 + Σ_i m_i` is tokens per target call. The product of mean
φ_j differs from :math:`m_i`, because the rows of one round are not independent. Positions behind an
end of text are not reached, unless the engine counts them.
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
    """The R rounds of a trace that drafted a token, with probabilities in place of coins.

    Attributes
    ----------
    text : (R,) number of the round's text.
    lengths : (R,) number of drafted tokens.
    left : (R,) number of drafted tokens that fit into the text's ``max_new_tokens``, at most K.
    alive : (R, K + 1) probability that at least i drafted tokens are accepted.
    going : (R, K + 1) whether none of the first i drafted tokens ends the text.
    prompts : (T,) index of each text's prompt.
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
    """Expected acceptance of a policy and a verifier on a trace, by position in the draft.

    Attributes
    ----------
    rounds : number of rounds that drafted a token.
    texts : number of texts with such a round, over which standard errors are computed.
    accepted : K estimates: for each position, the share of all rounds in which the position is
        reached and its token accepted.
    if_reached : K estimates: the share of the rounds that reach a position in which its token is
        accepted.
    if_accepted : K estimates: the share of the rounds that accept the token before in which the
        position's token is accepted; an end of text and the end of a draft count as not accepted.
    tokens_per_call : estimate of emitted tokens per target call, one of which is not drafted.
    mass : three arrays by position: expected number of rounds that accept the position before, that
        go on from there, and that reach the position.
    strata : index of each text's prompt if every prompt has two texts or more; standard errors then
        hold for these prompts. Otherwise 0; standard errors then hold for prompts drawn like these.
    freedom : degrees of freedom of the standard errors.
    """

    def __init__(
        self, record: LoggedRounds, behind_ends: bool = False, short_ends: bool = False
    ) -> None:
        """Count positions behind an end of text, too, if ``behind_ends`` is true.

        If ``short_ends`` is true, drafts are cut to ``record.left`` tokens.
        """
        self.record, self.behind_ends = record, behind_ends
        lengths = np.minimum(record.lengths, record.left) if short_ends else record.lengths
        # probabilities by round and position: (R, K), and (R, K + 1) where i counts accepted tokens
        drafted = np.arange(record.alive.shape[1] - 1) < lengths[:, None]
        going, has_draft = record.going | behind_ends, (lengths > 0).astype(float)
        self._accepted = np.where(drafted & going[:, :-1], record.alive[:, 1:], 0.0)
        at_least = np.concatenate([has_draft[:, None], self._accepted], 1)
        go_on = np.where(going, at_least, 0.0)
        self._before, reached = at_least[:, :-1], np.where(drafted, go_on[:, :-1], 0.0)
        self.mass = tuple(part.sum(0) for part in (self._before, go_on[:, :-1], reached))
        texts = np.unique(record.text[lengths > 0])
        # rounds without a draft add 0, so it does not matter which of the T + 1 sums they add to
        place_of_text = np.searchsorted(texts, record.text)
        self.rounds, self.texts = float(has_draft.sum()), len(texts)

        def ratio(above: np.ndarray, below: np.ndarray) -> Estimate:
            tops, bottoms = (
                np.bincount(place_of_text, by_round, self.texts + 1)[:-1]
                for by_round in (above, below)
            )
            return ratio_of_sums(tops, bottoms, record.source)

        self.accepted = tuple(ratio(accepted, has_draft) for accepted in self._accepted.T)
        self.if_reached = tuple(map(ratio, self._accepted.T, reached.T))
        self.if_accepted = tuple(map(ratio, self._accepted.T, self._before.T))
        self.tokens_per_call = ratio(has_draft + go_on[:, 1:].sum(1), has_draft)
        prompts = record.prompts[texts]
        twice = (np.unique(prompts, return_counts=True)[1] > 1).all()
        self.strata = prompts if twice else np.zeros_like(prompts)
        self.freedom = self.texts - len(np.unique(self.strata))

    def counted(self, **options: bool) -> "Expectation":
        """Return the expectation of the same rounds with other ``options`` of the constructor."""
        return Expectation(self.record, **options)

    def error(self, estimate: Estimate) -> float:
        """Return the jackknife's standard error, within prompts if each has two texts or more.

        With θ the numbers with one text left out, the error is (T − 1)/T times the root of
        Σ_s n_s/(n_s − 1) Σ (θ − mean of θ in s)², over strata s of n_s texts.
        """
        share = (self.texts - 1) / self.texts
        _, stratum, sizes = np.unique(self.strata, return_inverse=True, return_counts=True)
        means = np.bincount(stratum, estimate.left_out) / sizes
        squares = np.bincount(stratum, (estimate.left_out - means[stratum]) ** 2)
        return share * float(np.sqrt((sizes / (sizes - 1) * squares).sum()))

    def intervals(self, estimates: Sequence[Estimate]) -> list[tuple[float, float]]:
        """Return confidence intervals that hold together with a probability of 99 %.

        The intervals are Wilson's over texts, within [0, 1] for shares and [1, K + 1] for tokens
        per target call; their width is by Student's t and Bonferroni. Raises CannotSay for too
        few texts.
        """
        check_texts(self.texts)
        width = critical(len(estimates), self.freedom)
        intervals = []
        for mean in estimates:
            low, span = (1, len(self.accepted)) if mean is self.tokens_per_call else (0, 1)
            error, texts = self.error(mean), self.texts
            intervals.append(wilson(mean.value, error, width, texts, low=low, span=span))
        return intervals

    def coins(self, place: int) -> float:
        """Return the variance that coins give the acceptance at a position, for one round.

        The round has accepted the token before the position. Rows are fixed: the variance does not
        include differences between texts or rounds.
        """
        rate = self.if_accepted[place].value
        accepted, before = self._accepted[:, place], self._before[:, place]
        # of A − rate·B; A and B are 1 if the position, and the one before, are accepted: A ≤ B
        variance = accepted * (1 - 2 * rate) + rate**2 * before - (accepted - rate * before) ** 2
        return float(variance.sum() / max(before.sum(), 1e-300))


def wilson(
    value: float, error: float, width: float, texts: int, low: float, span: float
) -> tuple[float, float]:
    """Return Wilson's interval of a mean that lies in [low, low + span].

    For a share r of n trials it is (r + z²/2n ± z √(r(1 − r)/n + z²/4n²))/(1 + z²/n), where z is
    ``width``, half the interval in standard errors. The number n is chosen so that a share of this
    ``value`` has the standard error ``error``. For a mean at an end of its range n is ``texts``.
    The whole range is returned if ``value`` or ``error`` is not finite.
    """
    rate, spread = (value - low) / span, error / span
    if not np.isfinite([rate, spread]).all():
        return low, low + span
    variance = max(rate * (1 - rate), 0.0)
    per_trial = spread**2 / variance if variance > 0 else 1 / texts  # 1/n
    z2_per_trial = width**2 * per_trial
    half = width * np.sqrt(variance * per_trial + z2_per_trial * per_trial / 4)
    ends = ((rate + z2_per_trial / 2 + sign * half) / (1 + z2_per_trial) for sign in (-1, 1))
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
    """Compute the acceptance to expect from a policy and a verifier, at each position of a draft.

    The numbers are exact given the logged rows: no coin is drawn. Rounds start where the rounds of
    the logged decode started. So the estimates converge to the true values (they are consistent)
    for the policy, verifier and K of that decode. Rounds without a draft do not count.

    Parameters
    ----------
    source : a trace or its folder.
    policy : a policy or its spec.
    verifier : a verifier or its name.
    num_draft_tokens : K, to which longer drafts are cut; None for all logged tokens.
    behind_ends : whether drafted positions behind an end of text are counted; some engines do so.
    on_cycles : called from time to time with the number of rounds that are done.

    Returns
    -------
    accepted : K estimates: for each position, the share of all rounds in which the position is
        reached and its token accepted.
    tokens_per_call : estimate of emitted tokens per target call.
    rounds : number of rounds with a draft.

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
    max_new_tokens, done = trace.header.details.get("max_new_tokens"), 0
    # an empty first part, as np.concatenate needs one where no round has a draft
    no_rounds, no_rows = np.zeros(0, int), np.zeros((0, width + 1))
    parts: list[Any] = [(no_rounds, no_rounds, no_rounds, no_rows.astype(bool), no_rows)]
    for batch in trace.batches(ENTRIES, width):
        count, drafted = batch.draft_token_ids.shape
        done += count
        on_cycles(done)
        if not drafted:
            continue
        *law, _ = batch_law(batch, rule, verifier, {}, trace.ends)
        left = np.full(count, width)
        if max_new_tokens is not None:  # every call gives a token that is not drafted
            left = np.clip(max_new_tokens - 1 - batch.position.numpy(), 0, width)
        to_width = (0, 0), (0, width - drafted)
        alive, going = (np.pad(rows.numpy(), to_width) for rows in law)
        parts.append((batch.text.numpy(), np.full(count, drafted), left, going, alive))
    text, lengths, left, going, alive = map(np.concatenate, zip(*parts, strict=True))
    prompts = np.array(trace.prompts)
    record = LoggedRounds(text, lengths, left, alive, going, prompts, source=trace.fingerprint)
    return Expectation(record, behind_ends)


@cache
def critical(tests: float, freedom: int, level: float = EXPECTED) -> float:
    """Return the number of standard errors beyond which a two-sided test raises an alarm.

    False alarms: at most 1 − level over all ``tests`` together (Bonferroni); a one-sided test
    counts half. ``freedom`` is the degrees of freedom of the standard errors (Student's t); the
    result is ∞ for none. Raises ModuleNotFoundError without scipy (extra llm).
    """
    special = check.optional_module("scipy.special", "llm")
    tail = (1 - level) / (2 * tests)
    return float("inf") if freedom < 1 else -float(special.stdtrit(freedom, tail))
