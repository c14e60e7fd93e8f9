"""Count what policies do inside an engine, and measure what it costs.

Counters, by the spec of the policy that judged. Requests only name policies that the server
offers, so that none makes a label. All have vLLM's own labels ``model_name`` and ``engine``, too:

==============================================  ================================================
``cactus:verified_rows_total``                  target rows whose emitted law was the policy's:
                                                per round of a request one for each accepted
                                                token, and one for the first refusal
``cactus:drafted_tokens_total``                 drafted tokens that the policy judged
``cactus:accepted_tokens_total``                accepted ones among them
``cactus:drafted_tokens_per_pos_total``         the two by ``position`` in the draft, from 0: what
``cactus:accepted_tokens_per_pos_total``        was drafted there, and accepted there
``cactus:emitted_tokens_total``                 accepted tokens, and one more a step: recovered,
                                                bonus, or of a step without a draft
``cactus:undrafted_tokens_total``               tokens of steps without a draft among them, a
                                                prompt's own first token as well
``cactus:measured_rows_total``                  verified rows that the meter has measured
``cactus:emitted_divergence_nats_total``        their D(out‖q), times rows per measured row: an
                                                unbiased estimate of the sum over all verified
                                                rows; exact for ``CACTUS_METER=1``. Labelled with
                                                the divergence, in its unit
``cactus:answer_divergence_nats``               a histogram over answers that have ended, greedy
                                                ones apart, of the same sum over one answer's rows;
                                                with ``CACTUS_READINGS``, as all of an answer's rows
                                                are measured then
``cactus:info``                                 1, with what the server was asked for as labels
==============================================  ================================================

Divergence a token is ``rate(cactus:emitted_divergence_nats_total)`` over
``rate(cactus:emitted_tokens_total)``, acceptance at a position the quotient of its two counters:
drafts may be shorter than K. Steps are emitted less accepted tokens, drafts these less undrafted
ones. Greedy requests are not counted: no policy decides there. An engine that stops inside a round
(an end of text, a length) emits fewer tokens than counted: at most K fewer an answer, with
asynchronous scheduling 2K + 1.

Where they are seen: the counters are in the registry of the process that samples. With one
process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``) that is the registry vLLM serves at ``/metrics``.
With an engine in a process of its own, the default, it is not: set ``PROMETHEUS_MULTIPROC_DIR``
to an empty folder before the start, and ``/metrics`` shows the counters of every process, as it
does vLLM's own; ``cactus:info`` is the front end's own and shown either way. Counts are sent at
every step; those by position and what the meter reads, about once a second and when the last
request has ended, which the engine tells by an empty step (an ``LLM`` in one process takes none:
there the next step, or the end of the process, tells). The log line comes from the sampling
process, whatever the others do, at vLLM's interval (``VLLM_LOG_STATS_INTERVAL``), when a step is
taken. vLLM's answer to one request (``metrics.speculative_decoding``) has no place for numbers of a
plugin: ``CACTUS_READINGS`` writes those of each request elsewhere.
"""

import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from cactus_theory.decoding._meter import Meter
from cactus_theory.decoding._verification import path_to, rows_at
from cactus_theory.policies import Policy
from cactus_theory.verify.draft import Verified
from cactus_theory.vllm.settings import Settings

# bounds of a histogram, nats of an answer: price 2 spends about 0.02 a token on the shipped pair
BUCKETS = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
TOKENS = ("drafted_tokens", "accepted_tokens", "emitted_tokens", "undrafted_tokens")
COUNTS = ("verified_rows", *TOKENS)
WORDS = {
    "verified_rows": "Target rows whose emitted law was the policy's",
    "drafted_tokens": "Drafted tokens that the policy judged",
    "accepted_tokens": "Drafted tokens that were accepted",
    "emitted_tokens": "Accepted, recovered and bonus tokens, and those of steps without a draft",
    "undrafted_tokens": "Tokens of steps without a draft among the emitted ones",
    "measured_rows": "Verified rows that the meter measured",
    "emitted_divergence_nats": "Divergence of the emitted law from the target, summed over rows",
}
PER_POSITION = {
    "drafted_tokens_per_pos": "Drafted tokens that the policy judged, by position in the draft",
    "accepted_tokens_per_pos": "Drafted tokens that were accepted, by position in the draft",
}


class Tally:
    """Counters of one process, and the meters of its policies, by label of policy.

    ``positions`` has (drafted, accepted) for each place of a draft, ``closed`` the rows that were
    measured and the divergence that was read by meters that are gone, or by those of requests,
    ``answers`` what those that have ended were charged until it is sent on.
    """

    def __init__(self, settings: Settings, seed: int = 0) -> None:
        self.settings = settings
        self.counts: dict[str, dict[str, int]] = {}
        self.positions: dict[str, list[tuple[int, int]]] = {}
        self.meters: dict[str, dict[str, Meter]] = {}
        self.closed: dict[str, tuple[int, float]] = {}
        self.answers: list[tuple[str, float]] = []
        self.chance = random.Random(seed)  # which rows are measured; no token depends on it
        self.skip = self._gap()

    def add(self, verified: Verified, admitted: Sequence[Policy] = ()) -> None:
        """Count a call, and hand rows that are chosen to the meter.

        ``admitted`` has for each row of the call the policy of its request, which under a cap is
        not the one that judged every token; without it the judge of the row's first token.
        """
        accepted, choice = verified.verdict.num_accepted.tolist(), verified.assigned.choice
        judges = verified.assigned.policies
        if not admitted:
            numbers = [0] * len(accepted) if choice is None else choice[:, 0].tolist()
            admitted = [judges[number] for number in numbers]
        labels = {id(policy): policy for policy in admitted}  # a label takes a while to make
        labels = {key: self._label(policy) for key, policy in labels.items()}
        rows = zip(admitted, verified.draft.lengths, accepted, strict=True)
        for row, (policy, drafted, kept) in enumerate(rows):
            if not drafted:
                continue
            label = labels[id(policy)]
            charged = min(kept + 1, drafted)
            counts = self.counts[label]
            counts["verified_rows"] += charged
            counts["drafted_tokens"] += drafted
            counts["accepted_tokens"] += kept
            counts["emitted_tokens"] += kept + 1
            self._place(self.positions[label], drafted, kept)
            if self.settings.readings:  # requests have meters of their own
                continue
            if self.skip < charged and self.settings.meter:
                self._measure(label, verified, row, charged)
            self.skip -= charged

    def add_undrafted(self, admitted: Policy) -> None:
        """Count a token of a step without a draft."""
        counts = self.counts[self._label(admitted)]
        counts["emitted_tokens"] += 1
        counts["undrafted_tokens"] += 1

    def take(self, admitted: Policy, rows: int, spent: float) -> None:
        """Enter rows that a request's own meter has measured."""
        label = self._label(admitted)
        closed = self.closed.get(label, (0, 0.0))
        self.closed[label] = closed[0] + rows, closed[1] + spent

    def end(self, admitted: Policy, spent: float) -> None:
        """Enter what an answer was charged as a whole."""
        self.answers.append((self._label(admitted), spent))

    def totals(self, label: str) -> dict[str, float]:
        """Return every count of a policy, with what its meter has read: rows wait for this."""
        counts = self.counts[label]
        sums = [meter.sums() for meter in self.meters.get(label, {}).values()]
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
            f"{totals['undrafted_tokens']} of them in steps without a draft, "
            f"{rate:.1%} of {totals['drafted_tokens']} drafted tokens accepted, by position "
            + " ".join(f"{kept / drafted:.2f}" for drafted, kept in self.positions[label])
        )
        if not self.settings.meter or not totals["measured_rows"]:
            return text
        spent = totals["emitted_divergence_nats"] / max(totals["emitted_tokens"], 1)
        name = self.settings.divergence.spec
        return f"{text}, emitted {name} per token {spent:.4f} ({totals['measured_rows']} rows)"

    def _label(self, policy: Policy) -> str:
        """Return the policy's spec: a bounded set, as requests only name policies."""
        label = policy.spec
        self.counts.setdefault(label, dict.fromkeys(COUNTS, 0))
        self.positions.setdefault(label, [])
        return label

    def _place(self, positions: list[tuple[int, int]], drafted: int, kept: int) -> None:
        positions += [(0, 0)] * (drafted - len(positions))
        for place in range(drafted):
            there, accepted = positions[place]
            positions[place] = there + 1, accepted + (place < kept)

    def _measure(self, label: str, verified: Verified, row: int, charged: int) -> None:
        """Give the meter those of a request's charged rows that chance has picked."""
        while self.skip < charged:
            place = slice(self.skip, self.skip + 1)
            q, p = rows_at(row, place, verified)
            choice = verified.assigned.choice
            number = 0 if choice is None else int(choice[row, self.skip])
            meter = self._meter(label, verified.assigned.policies[number])
            meter.add(q, p, None, path_to(row, place, verified))
            self.skip += 1 + self._gap()

    def _gap(self) -> int:
        """Return the number of rows to skip: each is measured with probability 1/meter."""
        if self.settings.meter <= 1:
            return 0  # all of them, or the meter is off
        gap = math.log(1 - self.chance.random()) / math.log(1 - 1 / self.settings.meter)
        return int(gap)

    def _meter(self, label: str, policy: Policy) -> Meter:
        """Return the meter of a policy: one a label, under a cap one for each of its prices."""
        meters = self.meters.setdefault(label, {})
        if policy.spec not in meters:
            own = self.settings
            meters[policy.spec] = Meter((policy,), own.divergence, own.verifier)
        return meters[policy.spec]


class Prometheus:
    """The counters of a tally in Prometheus' registry of this process.

    ``model`` and ``engine`` are vLLM's labels: the name that is served, the data-parallel rank.
    """

    def __init__(
        self, tally: Tally, model: str = "", engine: int = 0, registry: Any = None
    ) -> None:
        import prometheus_client as client  # pyright: ignore[reportMissingImports]

        self.tally, self.labels = tally, {"model_name": model, "engine": str(engine)}
        self.sent: dict[tuple[str, ...], float] = {}
        own = ["policy", *self.labels]
        options: Any = {} if registry is None else {"registry": registry}
        self.counters = {}
        for name, words in WORDS.items():
            labels = [*own, "divergence"] if name.endswith("nats") else own
            self.counters[name] = client.Counter(f"cactus:{name}", words, labels, **options)
        for name, words in PER_POSITION.items():
            labels = [*own, "position"]
            self.counters[name] = client.Counter(f"cactus:{name}", words, labels, **options)
        words = "Divergence of the emitted law from the target over one answer"
        labels = [*own, "divergence"]
        self.answers = client.Histogram(
            "cactus:answer_divergence_nats", words, labels, buckets=BUCKETS, **options
        )

    def send(self, read: bool = True) -> None:
        """Raise the counters to the tally's totals, only if ``read`` all of them."""
        divergence = self.tally.settings.divergence.spec
        for label, counts in list(self.tally.counts.items()):
            totals = self.tally.totals(label) if read else counts
            for name, value in totals.items():
                further = {"divergence": divergence} if name.endswith("nats") else {}
                self._raise(name, value, policy=label, **further)
            if not read:
                continue
            for position, both in enumerate(self.tally.positions[label]):
                for name, value in zip(PER_POSITION, both, strict=True):
                    self._raise(name, value, policy=label, position=str(position))
        for label, spent in self.tally.answers:
            labels = self.labels | {"policy": label, "divergence": divergence}
            self.answers.labels(**labels).observe(spent)
        self.tally.answers.clear()

    def _raise(self, name: str, value: float, **labels: str) -> None:
        key = (name, *labels.values())
        increase = value - self.sent.get(key, 0)
        if increase > 0:
            self.counters[name].labels(**self.labels, **labels).inc(increase)
            self.sent[key] = value


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

    def flush(self) -> None:
        """Send all that was counted and measured, as no request is left."""
        self.sent = time.monotonic()
        self.prometheus.send()

    def finish(self) -> None:
        """Report all that is left."""
        self.prometheus.send()
        if self.prometheus.tally.counts:
            self.log(f"Cactus metrics: {self.prometheus.tally.line()}")
