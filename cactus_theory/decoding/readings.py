r"""Acceptance and emitted divergence of one request, under the names that serving engines use.

A *draft* is a round of one text with at least one drafted token; N are the new tokens.

=============================  ==========================================================  =======
field                          definition                                                  name of
=============================  ==========================================================  =======
num_drafts                     drafts                                                      vLLM
num_draft_tokens               drafted tokens                                              vLLM
num_accepted_tokens            accepted ones among them                                    vLLM
num_accepted_tokens_per_pos    for each place i of a draft, drafts whose token i was       vLLM
                               accepted
mean_acceptance_length         1 + num_accepted_tokens/num_drafts: counts the recovered    vLLM
                               or bonus token
acceptance_rate                num_accepted_tokens/num_draft_tokens                        vLLM
acceptance_histogram           for a = 0, 1, …: drafts with exactly a accepted tokens      vLLM
marginal_acceptance_rates      num_accepted_tokens_per_pos/num_drafts: Pr(token i is       ours
                               accepted)
conditional_acceptance_rates   the same among drafts that reached place i, with all        ours
                               tokens before it accepted and one drafted there
num_tokens, num_calls          N; target calls with this text in them, those without a     ours
                               draft as well
tokens_per_call                N/num_calls                                                 ours
emitted_kl                     Σ D(out‖q) over this text's verified rows                   ours
emitted_kl_per_token           emitted_kl/N                                                ours
largest_row_kl                 the largest of its rows                                     ours
=============================  ==========================================================  =======

vLLM's counters have these names in its ``/metrics`` (``vllm:spec_decode_num_drafts``, …) and
others in the answer to one request (``metrics.speculative_decoding``), which
:meth:`Reading.speculative_decoding` returns as it stands there.

Always: Σ acceptance_histogram = num_drafts, Σ a · acceptance_histogram[a] = num_accepted_tokens =
Σ num_accepted_tokens_per_pos, and mean_acceptance_length = 1 + Σ marginal_acceptance_rates; the
marginal rates are the tail of the histogram. Where all drafts have K tokens and none holds an end
of text, the marginal rates are also the running products of the conditional ones. Drafts that
are shorter count as not accepted at their missing places in the marginal rates and not at all in
the conditional ones.

An end of text inside a draft ends the draft there: tokens after it count as drafted and not as
accepted, and no token follows the accepted ones (engines may count those after the end, too).
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from operator import attrgetter
from typing import Any

Kind = tuple[int, int, bool]
VLLM_SUMMARY = {
    "mean_acceptance_length": "mean_acceptance_length",
    "draft_acceptance_rate": "acceptance_rate",
    "acceptance_histogram": "acceptance_histogram",
    "num_spec_steps": "num_drafts",
    "num_accepted_draft_tokens": "num_accepted_tokens",
    "num_draft_tokens": "num_draft_tokens",
}


@dataclass(frozen=True)
class Reading:
    """What one request took and cost; the module defines every field.

    Rates are NaN where there was nothing to count. The fields named kl, and ``emitted_divergence``,
    ``emitted_divergence_per_token`` and ``largest_row_divergence``, which are the same, hold the
    divergence that the meter read, in its unit (nats for KL), and None where it was off.

    Examples
    --------
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> result = generate(pair.target, pair.draft, ids, policy="band:price=1", max_new_tokens=8)
    >>> one = result.readings()[0]
    >>> one.num_tokens, one.num_accepted_tokens == sum(one.num_accepted_tokens_per_pos)
    (8, True)
    """

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: tuple[int, ...]
    mean_acceptance_length: float
    acceptance_rate: float
    acceptance_histogram: tuple[int, ...]
    marginal_acceptance_rates: tuple[float, ...]
    conditional_acceptance_rates: tuple[float, ...]
    num_tokens: int
    num_calls: int
    tokens_per_call: float
    emitted_kl: float | None = None
    emitted_kl_per_token: float | None = None
    largest_row_kl: float | None = None
    emitted_divergence = property(attrgetter("emitted_kl"))
    emitted_divergence_per_token = property(attrgetter("emitted_kl_per_token"))
    largest_row_divergence = property(attrgetter("largest_row_kl"))

    def speculative_decoding(self) -> dict[str, Any]:
        """Return vLLM's object for one request; ``num_spec_tokens`` is the longest draft."""
        summary = {name: getattr(self, field) for name, field in VLLM_SUMMARY.items()}
        return summary | {"num_spec_tokens": len(self.num_accepted_tokens_per_pos)}

    def as_dict(self, divergence: str = "kl") -> dict[str, Any]:
        """Return every field for JSON, with vLLM's object for one request among them."""
        fields = {name.replace("kl", divergence): value for name, value in asdict(self).items()}
        return fields | {"speculative_decoding": self.speculative_decoding()}


def reading_of(
    rounds: Mapping[Kind, int], num_tokens: int, costs: Sequence[float] | None = None
) -> Reading:
    """Return the reading of a request.

    ``rounds`` tells how many rounds (drafted, accepted, ended inside); ``costs`` are the meter's
    for each of the N tokens, None where it was off.
    """
    drafts = {kind: times for kind, times in rounds.items() if kind[0]}
    width = max((drafted for drafted, _, _ in drafts), default=0)
    histogram = [0] * (width + 1)
    for (_, accepted, _), times in drafts.items():
        histogram[accepted] += times
    kept = list(accumulate(reversed(histogram[1:])))[::-1]
    reached = [_reached(drafts, place) for place in range(width)]
    count, drafted = sum(histogram), sum(kind[0] * times for kind, times in drafts.items())
    calls, spent = sum(rounds.values()), None if costs is None else math.fsum(costs)
    return Reading(
        num_drafts=count,
        num_draft_tokens=drafted,
        num_accepted_tokens=sum(kept),
        num_accepted_tokens_per_pos=tuple(kept),
        mean_acceptance_length=1 + _share(sum(kept), count),
        acceptance_rate=_share(sum(kept), drafted),
        acceptance_histogram=tuple(histogram),
        marginal_acceptance_rates=tuple(_share(accepted, count) for accepted in kept),
        conditional_acceptance_rates=tuple(map(_share, kept, reached)),
        num_tokens=num_tokens,
        num_calls=calls,
        tokens_per_call=_share(num_tokens, calls),
        emitted_kl=spent,
        emitted_kl_per_token=None if spent is None else _share(spent, num_tokens),
        largest_row_kl=None if costs is None else max(costs, default=0.0),
    )


def pooled(rounds: Sequence[Mapping[Kind, int]]) -> dict[Kind, int]:
    """Return how many rounds of all texts did each thing."""
    total: Counter[Kind] = Counter()
    for counts in rounds:
        total.update(counts)
    return dict(total)


def _reached(rounds: Mapping[Kind, int], place: int) -> int:
    """Return how many drafts had all tokens before ``place`` accepted and one drafted there."""
    return sum(
        times
        for (drafted, accepted, ended), times in rounds.items()
        if accepted > place or (accepted == place < drafted and not ended)
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
