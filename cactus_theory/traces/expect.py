r"""Expected acceptance at each position of a draft, from rows, with standard errors over texts.

A round accepts at least i drafted tokens with probability :math:`P_i = Π_{j≤i} φ_j` given its
rows (a chain; ``VerdictLaw.alive`` for any verifier). Expected are the means over rounds:
:math:`m_i = E[P_i]`, which an engine counts as accepted at position i over drafts,
:math:`m_i/m_{i−1}` among the tokens reached, and :math:`1 + Σ_i m_i` tokens a call. Mean φ_j
multiplied up, :math:`1 + Σ_i Π_{j≤i} E[φ_j]`, is another number: rows of one round are alike, and a
mean of products is not the product of means.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.base import defaults
from cactus_theory.base.threads import one_thread
from cactus_theory.policies import Policy
from cactus_theory.policies import policy as find_policy
from cactus_theory.policies._policy import one_hot
from cactus_theory.traces.estimate import Estimate, PerText, Replay, combined, ratio_of_sums
from cactus_theory.traces.replays import TextSums, batch_law, draft_width
from cactus_theory.traces.rows import ENTRIES
from cactus_theory.traces.trace import Batch, Trace
from cactus_theory.verify.contract import Verifier, find_verifier

# joint confidence level of all intervals of a table
LEVEL = 0.99


@dataclass(frozen=True, eq=False)
class Expectation:
    """Expected acceptance of a policy and a verifier on a trace, by position.

    Attributes
    ----------
    replay : sums by text.
    squares : (3, K) sums over rounds of the squares of how probably a position is reached, of
        that times how probably it is accepted, and of the latter's squares.
    alone : (K, T) sums of φ over all rounds, reached or not.
    strata : (T,) the prompt of each text, if each prompt has at least two: errors are then of
        these prompts. All 0 otherwise: errors are of prompts like these.
    """

    replay: Replay
    squares: Float[np.ndarray, "3 K"]
    alone: Float[np.ndarray, "K texts"]
    strata: Int[np.ndarray, "texts"]

    @property
    def texts(self) -> int:
        """Return how many texts the errors count."""
        return len(self.strata)

    @property
    def freedom(self) -> int:
        """Return the degrees of freedom of errors."""
        return self.texts - len(np.unique(self.strata))

    def error(self, estimate: Estimate) -> float:
        """Return the standard error: the jackknife's, within prompts where it can be."""
        less = (self.texts - 1) / self.texts
        return less * float(np.sqrt(_within(estimate.left_out, self.strata)))

    def intervals(self, estimates: Sequence[Estimate]) -> list[tuple[float, float]]:
        """Return intervals that hold together with probability LEVEL (Bonferroni, Student's t)."""
        width = critical(len(estimates), self.freedom)
        spans = [(estimate.value, width * self.error(estimate)) for estimate in estimates]
        return [(value - span, value + span) for value, span in spans]

    @property
    def rounds(self) -> float:
        """Return the number of rounds."""
        return float(self.replay.cycles.sum())

    @cached_property
    def accepted(self) -> tuple[Estimate, ...]:
        """Return for each position the share of all rounds that reach and accept it."""
        sums = self.replay
        return tuple(ratio_of_sums(own, sums.cycles, sums.source) for own in sums.accepted_at)

    @property
    def if_reached(self) -> tuple[Estimate, ...]:
        """Return for each position the share accepted of those that are reached."""
        return self.replay.acceptance_by_position

    @property
    def tokens_per_call(self) -> Estimate:
        """Return the mean of products: new tokens per target call, one of them not drafted."""
        return self.replay.tokens_per_call

    @cached_property
    def product_of_means(self) -> Estimate:
        """Return 1 + Σ Π of mean acceptances of all rows, which is not what a round yields."""
        sums = self.replay
        means = [ratio_of_sums(accepted, sums.cycles, sums.source) for accepted in self.alone]
        return combined(lambda *parts: 1 + np.cumprod(parts, 0).sum(0), *means)

    def scatter(self, place: int) -> float:
        """Return the variance of one round's accepted minus expected, of those it reaches.

        Of a run of n rounds that reach the position its acceptance has this variance over n:
        coins within a round, and texts that differ.
        """
        rate = self.if_reached[place].value
        reached, accepted = self.replay.reached[place], self.replay.accepted_at[place]
        among = _within(accepted - rate * reached, self.strata)
        reached_squares, products, kept_squares = self.squares[:, place]
        coins = accepted.sum() * (1 - 2 * rate) + rate**2 * reached.sum()
        coins -= kept_squares - 2 * rate * products + rate**2 * reached_squares
        return float((among + coins) / max(reached.sum(), 1e-300))

    @cached_property
    def length_scatter(self) -> float:
        """Return a bound on the variance of one round's tokens: texts that differ count twice."""
        mean = np.array([share.value for share in self.accepted])
        coins = float(((2 * np.arange(len(mean)) + 1) * mean).sum() - mean.sum() ** 2)
        return coins + self.rounds * self.error(self.tokens_per_call) ** 2


@one_thread()
def expect(
    source: Trace | str | Path,
    policy: str | Policy = defaults.POLICY,
    verifier: str | Verifier = defaults.VERIFIER,
    *,
    num_draft_tokens: int | None = None,
    short_ends: bool = False,
    on_cycles: Callable[[int], None] | None = None,
) -> Expectation:
    """Return the acceptance to expect at each position; exact given the rows, all coins out.

    A trace's rounds start where those of the decode that was logged did: for that decode's
    policy, verifier and K the numbers are consistent.

    Parameters
    ----------
    source : a trace or its folder.
    policy, verifier : what decides.
    num_draft_tokens : cut longer drafts to so many; None for all that were logged.
    short_ends : what counters show of an engine that drafts no more than is left of a text, and
        divides by all rounds that drafted anything; needs a trace that says how long texts may be.
    on_cycles : called with how many rounds are done, now and then.

    Returns
    -------
    accepted : K estimates, the share of rounds that reach and accept each position.
    tokens_per_call : an estimate.
    rounds : how many.

    Raises
    ------
    ValueError, NotImplementedError
        As :func:`cactus_theory.traces.replay`; ``short_ends`` of a trace of other texts.

    Examples
    --------
    >>> expect("simulations/data/trace", num_draft_tokens=2).rounds
    68.0
    """
    trace = Trace.open(source) if isinstance(source, str | Path) else source
    trace.check_chains("expect")
    width = draft_width(trace, num_draft_tokens)
    policy, verifier = find_policy(policy), find_verifier(verifier)
    verifier.check(policy)
    sums = TextSums(trace.texts, width, ())
    squares, alone = np.zeros((3, width)), np.zeros((width, trace.texts))
    ends = torch.tensor(trace.header.eos_token_ids, dtype=torch.int64)
    longest = trace.header.details.get("max_new_tokens", 0)
    if short_ends:
        check.whole_number("short_ends: max_new_tokens of the trace", longest, 1)
    for batch in trace.batches(ENTRIES, width):
        alive, going, _ = batch_law(batch, policy, verifier, {}, ends)
        if short_ends:
            left = (longest - 1 - batch.position)[:, None]  # beside the token every call gives
            alive = torch.where(torch.arange(alive.shape[1]) <= left, alive, 0.0)
            drafts = left[:, 0] > 0
            batch, alive, going = _rows(batch, drafts), alive[drafts], going[drafts]
        sums.add(batch.text, alive, going, {})
        reached = torch.where(going[:, :-1], alive[:, :-1], 0.0)
        accepted = torch.where(going[:, :-1], alive[:, 1:], 0.0)
        products = torch.stack([reached**2, reached * accepted, accepted**2]).sum(1)
        squares[:, : products.shape[1]] += products.numpy()
        if batch.draft_token_ids.shape[1]:
            for place, acceptance in enumerate(_acceptance(batch, policy).T):
                np.add.at(alone[place], batch.text.numpy(), acceptance.numpy())
        if on_cycles is not None:
            on_cycles(int(sums.cycles.sum()))
    result = sums.result(policy.spec, verifier.spec, trace.fingerprint)
    prompts = np.array(trace.prompts)
    single = np.unique(prompts, return_counts=True)[1].min() < 2
    strata = np.zeros_like(prompts) if single else prompts
    return Expectation(result, squares, alone, strata)


def _rows(batch: Batch, chosen: Tensor) -> Batch:
    """Return some cycles of a batch."""
    rows = {
        field.name: value[chosen]
        for field in fields(batch)
        if (value := getattr(batch, field.name)) is not None
    }
    return replace(batch, **rows)


def _acceptance(batch: Batch, policy: Policy) -> Float[Tensor, "batch K"]:
    """Return φ of every drafted token, whether reached or not."""
    ids, q = batch.draft_token_ids, batch.target_probs
    p = one_hot(ids, q) if batch.draft_probs is None else batch.draft_probs
    return policy.acceptance(q[:, :-1], p, ids[..., None])[..., 0]


def _within(values: PerText, strata: Int[np.ndarray, "texts"]) -> float:
    """Return Σ m/(m − 1) Σ (v − mean)² over strata of m texts: the variance of the sum of v."""
    _, which, sizes = np.unique(strata, return_inverse=True, return_counts=True)
    if sizes.min() < 2:
        return float("nan")
    around = values - (np.bincount(which, values) / sizes)[which]
    return float((sizes / (sizes - 1) * np.bincount(which, around**2)).sum())


@cache
def critical(tests: float, freedom: int, level: float = LEVEL) -> float:
    """Return how many standard errors two-sided tests may be off; ∞ without freedom.

    All ``tests``, of which one-sided ones count half, together alarm with probability 1 − level at
    most (Bonferroni), where errors have so many degrees of freedom (Student's t). Raises
    ModuleNotFoundError without scipy (extra llm).
    """
    special = check.optional_module("scipy.special", "llm")
    tail = (1 - level) / (2 * tests)
    return float("inf") if freedom < 1 else -float(special.stdtrit(freedom, tail))
