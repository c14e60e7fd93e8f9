"""Count what policies do inside an engine, and measure what it costs.

Counters, by the spec of the server's policy; what requests choose for themselves is counted under
the registered name of the policy, without its knobs, so that no request makes a label:

==============================================  ================================================
``cactus:verified_rows_total``                  target rows whose emitted law was the policy's:
                                                per round of a request one for each accepted
                                                token, and one for the first refusal
``cactus:drafted_tokens_total``                 drafted tokens that the policy judged
``cactus:accepted_tokens_total``                accepted ones among them
``cactus:emitted_tokens_total``                 these, and one recovered or bonus token a round
``cactus:measured_rows_total``                  verified rows that the meter has measured
``cactus:emitted_divergence_nats_total``        their D(out‖q), times rows per measured row: an
                                                unbiased estimate of the sum over all verified
                                                rows; exact for ``CACTUS_METER=1``. Labelled with
                                                the divergence, in its unit
==============================================  ================================================

Divergence a token is ``rate(cactus:emitted_divergence_nats_total)`` over
``rate(cactus:emitted_tokens_total)``. Rounds of greedy requests and of requests without drafts
are not counted: no policy decides there, and a prompt's first token is not emitted by a round.
An engine that stops inside a round (an end of text, a length) emits fewer tokens than counted.

Where they are seen: the counters are in the registry of the process that samples. With one
process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``) that is the registry vLLM serves at ``/metrics``.
With an engine in a process of its own, the default, it is not: set ``PROMETHEUS_MULTIPROC_DIR``
to an empty folder before the start, and ``/metrics`` shows the counters of every process, as it
does vLLM's own. Counts are sent at every step; what the meter reads, about once a second, by the
first step after that, so it stands still while a server is idle. The log line comes from the
sampling process, whatever the others do, at vLLM's interval (``VLLM_LOG_STATS_INTERVAL``), when a
step is taken. vLLM's answer to one request (``metrics.speculative_decoding``) has no place for
numbers of a plugin: ``CACTUS_READINGS`` writes those of each request elsewhere.
"""

import math
import random
import time
from collections.abc import Callable
from typing import Any

from cactus_theory.decoding._meter import Meter
from cactus_theory.decoding._verification import path_to, rows_at
from cactus_theory.policies import Policy
from cactus_theory.verify.draft import Verified
from cactus_theory.vllm.admission import family
from cactus_theory.vllm.settings import Settings

METERS = 16  # policies under one label whose rows are collected at the same time
COUNTS = ("verified_rows", "drafted_tokens", "accepted_tokens", "emitted_tokens")
WORDS = {
    "verified_rows": "Target rows whose emitted law was the policy's",
    "drafted_tokens": "Drafted tokens that the policy judged",
    "accepted_tokens": "Drafted tokens that were accepted",
    "emitted_tokens": "Accepted, recovered and bonus tokens of rounds with a draft",
    "measured_rows": "Verified rows that the meter measured",
    "emitted_divergence_nats": "Divergence of the emitted law from the target, summed over rows",
}


class Tally:
    """Counters of one process, and the meters of its policies, by label of policy.

    ``closed`` are rows measured and divergence read by meters that are gone.
    """

    def __init__(self, settings: Settings, seed: int = 0) -> None:
        self.settings = settings
        self.counts: dict[str, dict[str, int]] = {}
        self.meters: dict[str, list[Meter]] = {}
        self.closed: dict[str, tuple[int, float]] = {}
        self.chance = random.Random(seed)  # which rows are measured; no token depends on it
        self.skip = self._gap()

    def add(self, verified: Verified) -> None:
        """Count a call, and hand rows that are chosen to the meter."""
        accepted, choice = verified.verdict.num_accepted.tolist(), verified.assigned.choice
        numbers = [0] * len(accepted) if choice is None else choice[:, 0].tolist()
        labels = [self._label(policy) for policy in verified.assigned.policies]
        rows = zip(numbers, verified.draft.lengths, accepted, strict=True)
        for row, (number, drafted, kept) in enumerate(rows):
            if not drafted:
                continue
            charged = min(kept + 1, drafted)
            counts = self.counts[labels[number]]
            counts["verified_rows"] += charged
            counts["drafted_tokens"] += drafted
            counts["accepted_tokens"] += kept
            counts["emitted_tokens"] += kept + 1
            if self.skip < charged and self.settings.meter:
                self._measure(verified, row, charged)
            self.skip -= charged

    def totals(self, label: str) -> dict[str, float]:
        """Return every count of a policy, with what its meter has read: rows wait for this."""
        counts = self.counts[label]
        sums = [meter.sums() for meter in self.meters.get(label, ())]
        closed = self.closed.get(label, (0, 0.0))
        measured = closed[0] + sum(rows for rows, _ in sums)
        spent = (closed[1] + sum(own for _, own in sums)) * self.settings.meter
        return {**counts, "measured_rows": measured, "emitted_divergence_nats": spent}

    def line(self) -> str:
        """Return one line of totals for the log."""
        return "; ".join(self._text(label, self.totals(label)) for label in self.counts)

    def _text(self, label: str, totals: dict[str, float]) -> str:
        rate = totals["accepted_tokens"] / max(totals["drafted_tokens"], 1)
        text = (
            f"{label} ({self.settings.verifier.spec}): {totals['emitted_tokens']} tokens, "
            f"{rate:.1%} of {totals['drafted_tokens']} drafted tokens accepted"
        )
        if not self.settings.meter or not totals["measured_rows"]:
            return text
        spent = totals["emitted_divergence_nats"] / max(totals["emitted_tokens"], 1)
        name = self.settings.divergence.spec
        return f"{text}, emitted {name} per token {spent:.4f} ({totals['measured_rows']} rows)"

    def _label(self, policy: Policy) -> str:
        """Return the server's spec, or a registered name: a bounded set, whatever requests say."""
        same = policy == self.settings.policy
        label = self.settings.policy.spec if same else family(policy)
        self.counts.setdefault(label, dict.fromkeys(COUNTS, 0))
        return label

    def _measure(self, verified: Verified, row: int, charged: int) -> None:
        """Give the meter those of a request's charged rows that chance has picked."""
        while self.skip < charged:
            place = slice(self.skip, self.skip + 1)
            q, p = rows_at(row, place, verified)
            choice = verified.assigned.choice
            number = 0 if choice is None else int(choice[row, self.skip])
            meter = self._meter(verified.assigned.policies[number])
            meter.add(q, p, None, path_to(row, place, verified))
            self.skip += 1 + self._gap()

    def _gap(self) -> int:
        """Return how many rows to pass over: each is measured with probability 1/meter."""
        if self.settings.meter <= 1:
            return 0  # all of them, or the meter is off
        gap = math.log(1 - self.chance.random()) / math.log(1 - 1 / self.settings.meter)
        return int(gap)

    def _meter(self, policy: Policy) -> Meter:
        label = self._label(policy)
        meters = self.meters.setdefault(label, [])
        for meter in meters:
            if meter.policies[0] == policy:
                return meter
        if len(meters) == METERS:
            (rows, spent), closed = meters.pop(0).sums(), self.closed.get(label, (0, 0.0))
            self.closed[label] = closed[0] + rows, closed[1] + spent
        meters.append(Meter((policy,), self.settings.divergence, self.settings.verifier))
        return meters[-1]


class Prometheus:
    """The counters of a tally in Prometheus' registry of this process."""

    def __init__(self, tally: Tally, registry: Any = None) -> None:
        import prometheus_client as client  # pyright: ignore[reportMissingImports]

        self.tally = tally
        self.sent: dict[tuple[str, str], float] = {}
        options = {} if registry is None else {"registry": registry}
        self.counters = {}
        for name, words in WORDS.items():
            labels = ["policy", "divergence"] if name.endswith("nats") else ["policy"]
            self.counters[name] = client.Counter(f"cactus:{name}", words, labels, **options)

    def send(self, read: bool = True) -> None:
        """Raise the counters to the tally's totals, those of the meter only if ``read``."""
        for label, counts in list(self.tally.counts.items()):
            totals = self.tally.totals(label) if read else counts
            for name, value in totals.items():
                increase = value - self.sent.get((label, name), 0)
                if increase > 0:
                    labels = {"policy": label}
                    if name.endswith("nats"):
                        labels["divergence"] = self.tally.settings.divergence.spec
                    self.counters[name].labels(**labels).inc(increase)
                    self.sent[label, name] = value


class Reporter:
    """Sends counts to Prometheus at every step, readings of the meter once a second or so.

    A line goes to the log at an interval, in seconds.
    """

    def __init__(
        self, prometheus: Prometheus, log: Callable[[str], None], interval: float, send: float = 1.0
    ) -> None:
        self.prometheus, self.log = prometheus, log
        self.interval, self.send_interval = interval, send
        self.sent = self.logged = time.monotonic()

    def step(self) -> None:
        """Report what is due."""
        now = time.monotonic()
        read = now - self.sent >= self.send_interval
        self.prometheus.send(read)
        if not read:
            return
        self.sent = now
        if now - self.logged >= self.interval:
            self.logged = now
            self.log(f"Cactus metrics: {self.prometheus.tally.line()}")

    def finish(self) -> None:
        """Report all that is left."""
        self.prometheus.send()
        if self.prometheus.tally.counts:
            self.log(f"Cactus metrics: {self.prometheus.tally.line()}")
