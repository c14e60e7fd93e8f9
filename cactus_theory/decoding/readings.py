r"""Acceptance and emitted divergence of one request, under the names that serving engines use.

A *draft* is a round of one text with at least one drafted token. Most counts have the names of
vLLM's counters in ``/metrics`` (``vllm:spec_decode_num_drafts``, …).

Always: Σ acceptance_histogram = num_drafts, Σ a · acceptance_histogram[a] = num_accepted_tokens =
Σ num_accepted_tokens_per_pos, and mean_acceptance_length = 1 + Σ marginal_acceptance_rates. The
marginal rate at position i = 1, 2, … is the share of drafts with at least i accepted tokens. If all
drafts have K tokens and none holds an end of text, the marginal rates are also the running products
of the conditional rates. At a position that a shorter draft lacks, the marginal rate counts the
draft as not accepted, and the conditional rate leaves the draft out.

An end of text inside a draft ends the round: tokens after the end count as drafted and not as
accepted, and no recovered or bonus token follows (engines may also count tokens after the end).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

Kind = tuple[int, int, bool]

# names of the readings in JSON, in their order there; the last seven are None without the meter
NUMBERS = (
    "num_drafts num_draft_tokens num_accepted_tokens num_accepted_tokens_per_pos "
    "mean_acceptance_length acceptance_rate acceptance_histogram "
    "marginal_acceptance_rates conditional_acceptance_rates num_tokens num_calls "
    "accepted_per_call tokens_per_call emitted_divergence emitted_divergence_per_token "
    "emitted_divergence_per_row largest_row_divergence entropy_per_token "
    "surprise_per_token agreement_per_token"
).split()
# three sums that show in which direction emitted laws depart from the target
DIRECTIONS = "entropy", "surprise", "agreement"


@dataclass(frozen=True)
class Reading:
    """Counts and metered divergence of one request, or of all requests of a decode together.

    Rates are NaN where there was nothing to count. The attributes from ``emitted_divergence`` on,
    except ``divergence``, are None if the meter was off.

    Attributes
    ----------
    rounds : (drafted, accepted, ended) → the number of such rounds of a text; ``ended`` is whether
        the text ended before the last token of the round.
    num_tokens : number of new tokens.
    emitted_divergence : Σ D(h‖q) over the verified rows, up to and including a round's first
        rejection, each computed exactly; if the policy has a tilt or is ``truncated``, also over
        the rows of bonus tokens and of tokens of rounds without a draft.
    largest_row_divergence : the largest D(h‖q) of a verified row.
    divergence : the name of the metered divergence, which sets the unit (nats for KL).
    rows : number of rows in ``emitted_divergence``; None for one request of a batch.
    expected_accepted : Σ over the verified rows of the acceptance Σ p φ, on average equal to the
        number of accepted tokens; None for one request of a batch.
    raised_off_head : Σ over the verified rows of :func:`cactus_theory.emitted.raised_off_head`;
        None for one request of a batch.
    entropy : Σ over new tokens of the entropy of h, the law that the token was drawn from, in nats.
    surprise : Σ over new tokens of the nats by which a token drawn from h is on average less likely
        under the target q than a token drawn from q.
    agreement : Σ over new tokens of how much more often a token drawn from h equals a second draw
        from q than a token drawn from q does (:func:`cactus_theory.emitted.directions` defines
        entropy, surprise and agreement). For ``regret``, q is the row at temperature 1.
    """

    rounds: Mapping[Kind, int]
    num_tokens: int
    emitted_divergence: float | None = None
    largest_row_divergence: float | None = None
    divergence: str = "kl"
    rows: int | None = None
    expected_accepted: float | None = None
    raised_off_head: float | None = None
    entropy: float | None = None
    surprise: float | None = None
    agreement: float | None = None

    @cached_property
    def drafts(self) -> dict[Kind, int]:
        """Return the rounds with at least one drafted token."""
        return {kind: times for kind, times in self.rounds.items() if kind[0]}

    @property
    def acceptance_histogram(self) -> tuple[int, ...]:
        """Return the number of drafts with exactly a accepted tokens, for a = 0, 1, …"""
        histogram = [0] * (max((drafted for drafted, _, _ in self.drafts), default=0) + 1)
        for (_, accepted, _), times in self.drafts.items():
            histogram[accepted] += times
        return tuple(histogram)

    @property
    def num_drafts(self) -> int:
        """Return the number of drafts: rounds with at least one drafted token."""
        return sum(self.drafts.values())

    @property
    def num_draft_tokens(self) -> int:
        """Return the number of drafted tokens."""
        return sum(drafted * times for (drafted, _, _), times in self.drafts.items())

    @property
    def num_accepted_tokens_per_pos(self) -> tuple[int, ...]:
        """Return for each position the number of drafts whose token there was accepted."""
        return tuple(accumulate(reversed(self.acceptance_histogram[1:])))[::-1]

    @property
    def num_accepted_tokens(self) -> int:
        """Return the number of accepted tokens."""
        return sum(self.num_accepted_tokens_per_pos)

    @property
    def mean_acceptance_length(self) -> float:
        """Return 1 + accepted tokens per draft; the 1 counts the recovered or bonus token."""
        return 1 + _share(self.num_accepted_tokens, self.num_drafts)

    @property
    def acceptance_rate(self) -> float:
        """Return the share of drafted tokens that were accepted."""
        return _share(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def marginal_acceptance_rates(self) -> tuple[float, ...]:
        """Return for each position the share of all drafts whose token there was accepted."""
        return tuple(_share(count, self.num_drafts) for count in self.num_accepted_tokens_per_pos)

    @property
    def conditional_acceptance_rates(self) -> tuple[float, ...]:
        """Return for each position the acceptance rate among the drafts that reached the position.

        A draft reaches a position if it has a token there and all tokens before were accepted.
        """
        accepted = self.num_accepted_tokens_per_pos
        refused = [0] * len(accepted)
        for (drafted, kept, ended), times in self.drafts.items():
            if kept < drafted and not ended:
                refused[kept] += times
        return tuple(_share(yes, yes + no) for yes, no in zip(accepted, refused, strict=True))

    @property
    def num_calls(self) -> int:
        """Return the number of target calls that include this text, with or without a draft."""
        return sum(self.rounds.values())

    @property
    def accepted_per_call(self) -> float:
        """Return accepted tokens per target call, without recovered and bonus tokens."""
        return _share(self.num_accepted_tokens, self.num_calls)

    @property
    def tokens_per_call(self) -> float:
        """Return new tokens per target call, recovered and bonus tokens included."""
        return _share(self.num_tokens, self.num_calls)

    @property
    def emitted_divergence_per_token(self) -> float | None:
        """Return ``emitted_divergence`` per new token; None without a meter."""
        return self._per_token(self.emitted_divergence)

    @property
    def emitted_divergence_per_row(self) -> float | None:
        """Return ``emitted_divergence`` / ``rows``, 0 without rows; None if either is None."""
        if self.emitted_divergence is None or self.rows is None:
            return None
        return self.emitted_divergence / self.rows if self.rows else 0.0

    @property
    def entropy_per_token(self) -> float | None:
        """Return the mean entropy of h over new tokens, in nats; None without a meter."""
        return self._per_token(self.entropy)

    @property
    def surprise_per_token(self) -> float | None:
        """Return ``surprise``, in nats, per new token; None without a meter."""
        return self._per_token(self.surprise)

    @property
    def agreement_per_token(self) -> float | None:
        """Return Σ h q − Σ q² per new token; None without a meter.

        This is the probability that a token drawn from h equals an independent draw from q, less
        the probability that a token drawn from q does.
        """
        return self._per_token(self.agreement)

    def _per_token(self, total: float | None) -> float | None:
        return None if total is None else _share(total, self.num_tokens)

    def as_dict(self) -> dict[str, Any]:
        """Return all readings that are not None, by name, for JSON."""
        numbers = {name: getattr(self, name) for name in NUMBERS}
        return {
            name.replace("divergence", self.divergence): value
            for name, value in numbers.items()
            if value is not None
        }


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
