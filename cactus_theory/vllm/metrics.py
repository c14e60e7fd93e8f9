"""Count tokens by policy inside an engine, measure the nats spent, and report to Prometheus.

SERVING.md explains each counter. The labels are ``policy`` (the spec of the request's policy) and
vLLM's ``model_name`` and ``engine``. The sum of divergences is D(h‖q) of the measured rows times
the number of rows per measured row: an unbiased estimate of the sum over all verified rows, exact
for ``CACTUS_METER=1``. The label ``divergence`` is the policy's unit: ``kl``, or ``regret`` for a
policy of temperature 0. Greedy requests with other policies are not counted, as no policy decides
their drafts. If an engine stops inside a round (an end of text, a length), an answer has up to K
fewer tokens than are counted, up to 2K + 1 with asynchronous scheduling.

The counters are in the registry of the sampling process. If another process answers /metrics, vLLM
shows the counters only with ``PROMETHEUS_MULTIPROC_DIR``. Token counts are sent at every step.
Counts by position and the meter's sums are sent about once a second and when the last request has
ended. The engine reports this end by an empty step; an ``LLM`` in one process takes no empty step,
so there the numbers are sent with the next step or when the process ends. The sampling process
writes the log line at vLLM's interval (``VLLM_LOG_STATS_INTERVAL``), when a step is taken.
"""

import math
import random
import time
from collections.abc import Callable, Sequence

from cactus_theory.decoding.meter import Meter
from cactus_theory.divergences import Divergence
from cactus_theory.policies import Policy
from cactus_theory.verify.draft import Draft, Verdict
from cactus_theory.verify.node import Node
from cactus_theory.vllm.settings import Settings

# bounds of the histogram of nats per answer (shipped pair: price 2 spends about 0.02 per token)
BUCKETS = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
TOKENS = ("drafted_tokens", "accepted_tokens", "emitted_tokens", "undrafted_tokens")
DIVERGENCE = "emitted_divergence_nats"  # has the unit as a label
COUNTER_HELP = {
    "verified_rows": "Target rows whose emitted law was the policy's",
    "drafted_tokens": "Drafted tokens that the policy judged",
    "accepted_tokens": "Drafted tokens that were accepted",
    "emitted_tokens": "Accepted, recovered and bonus tokens, and those of steps without a draft",
    "undrafted_tokens": "Tokens of steps without a draft among the emitted ones",
    "measured_rows": "Verified rows that the meter measured",
    DIVERGENCE: "Divergence of the emitted law from the target, summed over rows",
}
# gauges, as these sums over the verified rows may fall (cactus_theory.emitted.directions)
SIGNED = {
    "emitted_surprise_nats": "Nats by which emitted tokens are less likely than the target's own",
    "emitted_agreement": "By how many tokens more a target that is asked again would say the same",
}
PER_POSITION = {
    "drafted_tokens_per_pos": "Drafted tokens that the policy judged, by position in the draft",
    "accepted_tokens_per_pos": "Drafted tokens that were accepted, by position in the draft",
}


class Counts:
    """The counts of one policy in one process.

    ``positions`` has (drafted, accepted) for each position in the draft. ``answers`` has the
    charges, in the policy's unit, of ended answers that are not yet sent.
    """

    def __init__(self, unit: Divergence) -> None:
        self.tokens = dict.fromkeys(("verified_rows", *TOKENS), 0)
        self.positions: list[tuple[int, int]] = []
        self.meter = Meter(unit)
        self.answers: list[float] = []


class Tally:
    """The counts of one process, by the spec of the policy."""

    def __init__(self, settings: Settings, seed: int = 0) -> None:
        self.settings = settings
        self.counts: dict[str, Counts] = {}
        self.chance = random.Random(seed)  # picks the measured rows; no token depends on it
        self.skip = self._gap()

    def of(self, policy: Policy) -> Counts:
        """Return the counts of a policy, at 0 for a new policy."""
        if (label := policy.spec) not in self.counts:
            self.counts[label] = Counts(policy.unit)
        return self.counts[label]

    def add(self, draft: Draft, verdict: Verdict, admitted: Sequence[Policy]) -> None:
        """Count a call of the verifier, and measure randomly picked nodes.

        ``admitted`` has the policy of each request of the call. Under a cap some of a request's
        tokens are judged at a higher price or without loss, but are counted under this policy, too.
        """
        accepted = verdict.num_accepted.tolist()
        by_policy = dict[int, Counts]()  # looked up by id, as making a spec for each row is slow
        rows = zip(admitted, draft.lengths, accepted, strict=True)
        for row, (policy, drafted, kept) in enumerate(rows):
            if not drafted:
                continue
            charged = min(kept + 1, drafted)  # rows of drafted tokens; the bonus token has none
            if id(policy) not in by_policy:
                by_policy[id(policy)] = self.of(policy)
            counts = by_policy[id(policy)]
            counts.tokens["verified_rows"] += charged
            counts.tokens["drafted_tokens"] += drafted
            counts.tokens["accepted_tokens"] += kept
            counts.tokens["emitted_tokens"] += kept + 1
            positions = counts.positions
            positions += [(0, 0)] * (drafted - len(positions))  # none if the list is long enough
            for place in range(drafted):
                drafted_there, accepted_there = positions[place]
                positions[place] = drafted_there + 1, accepted_there + (place < kept)
            if self.settings.readings:  # each request has a meter, whose sums ``take`` adds
                continue
            # ``skip`` rows lie between here and the next row to measure
            if self.skip < charged and self.settings.meter:
                self._measure(counts.meter, verdict.nodes(row)[:charged])
            self.skip -= charged

    def add_undrafted(self, admitted: Policy) -> None:
        """Count a token of a step without a draft."""
        tokens = self.of(admitted).tokens
        tokens["emitted_tokens"] += 1
        tokens["undrafted_tokens"] += 1

    def take(self, admitted: Policy, measured: Meter) -> None:
        """Add the measurements of a request's rows to the counts of its policy."""
        self.of(admitted).meter.take(measured)

    def totals(self, label: str) -> dict[str, float]:
        """Measure the rows collected so far; return all counts of a policy and the meter's sums."""
        counts = self.counts[label]
        rows, nats = counts.meter.sums()
        read = {"measured_rows": rows, DIVERGENCE: nats * self.settings.meter}
        signed = zip(SIGNED, counts.meter.directions[1:] * self.settings.meter, strict=True)
        return {**counts.tokens, **read, **{name: float(value) for name, value in signed}}

    def line(self) -> str:
        """Return one line of totals for the log."""
        by_label = {label: self.totals(label).items() for label in self.counts}
        return "; ".join(
            f"{label}: "
            + ", ".join(f"{name} {value:.12g}" for name, value in totals)
            + f", divergence {self.counts[label].meter.divergence.spec}"
            for label, totals in by_label.items()
        )

    def _measure(self, meter: Meter, nodes: Sequence[Node]) -> None:
        """Measure those nodes of a request that were picked at random."""
        while self.skip < len(nodes):
            meter.add([nodes[self.skip]])
            self.skip += 1 + self._gap()

    def _gap(self) -> int:
        """Draw how many rows to skip, so that one row in ``settings.meter`` is measured."""
        if self.settings.meter <= 1:
            return 0  # 1: every row is measured; 0: the meter is off, and the gap is not used
        return int(math.log(1 - self.chance.random()) / math.log(1 - 1 / self.settings.meter))


class Reporter:
    """Send a tally to Prometheus: counts at every step, the meter's sums every ``send`` seconds.

    Every ``interval`` seconds one line is written to the log. ``model`` (the served name) and
    ``engine`` (the data-parallel rank) are vLLM's labels.
    """

    def __init__(
        self, tally: Tally, log: Callable[[str], None], interval: float, *, model: str = "",
        engine: int = 0, send: float = 1.0,
    ) -> None:  # fmt: skip
        import prometheus_client as client  # pyright: ignore[reportMissingImports]

        self.tally, self.log = tally, log
        self.interval, self.send_interval = interval, send
        self.last_sent = self.logged = time.monotonic()
        self.labels = {"model_name": model, "engine": str(engine)}
        # the total last sent, by counter and labels: a counter of Prometheus takes increases only
        self.sent_totals: dict[tuple[str, ...], float] = {}
        shared = ["policy", *self.labels]
        self.counters = dict[str, client.Counter]()
        for name, text in COUNTER_HELP.items():
            labels = [*shared, "divergence"] if name == DIVERGENCE else shared
            self.counters[name] = client.Counter(f"cactus:{name}", text, labels)
        for name, text in PER_POSITION.items():
            self.counters[name] = client.Counter(f"cactus:{name}", text, [*shared, "position"])
        self.gauges = {
            name: client.Gauge(f"cactus:{name}", text, shared, multiprocess_mode="livesum")
            for name, text in SIGNED.items()
        }
        text = "Divergence of the emitted law from the target over one answer"
        self.answers = client.Histogram(
            "cactus:answer_divergence_nats", text, [*shared, "divergence"], buckets=BUCKETS
        )

    def step(self) -> None:
        """Send the counts and, when their time has come, the meter's sums and the log line."""
        now = time.monotonic()
        read = now - self.last_sent >= self.send_interval
        self.send(read)
        if read and now - self.logged >= self.interval:
            self.logged = now
            self.log(f"Cactus metrics: {self.tally.line()}")

    def finish(self) -> None:
        """Send all numbers and write the last log line, at the end of the process."""
        self.send()
        if self.tally.counts:
            self.log(f"Cactus metrics: {self.tally.line()}")

    def send(self, read: bool = True) -> None:
        """Send token counts and charges of answers; with ``read`` also counts by position, sums."""
        for label, counts in list(self.tally.counts.items()):
            totals = self.tally.totals(label) if read else counts.tokens
            unit = {"divergence": counts.meter.divergence.spec}
            for name, value in totals.items():
                if name in SIGNED:
                    self.gauges[name].labels(**self.labels, policy=label).set(value)
                else:
                    own_label = unit if name == DIVERGENCE else {}
                    self._raise(name, value, policy=label, **own_label)
            for position, drafted_accepted in enumerate(counts.positions if read else ()):
                for name, value in zip(PER_POSITION, drafted_accepted, strict=True):
                    self._raise(name, value, policy=label, position=str(position))
            for spent in counts.answers:
                self.answers.labels(**self.labels, policy=label, **unit).observe(spent)
            counts.answers.clear()
        if read:
            self.last_sent = time.monotonic()

    def _raise(self, name: str, value: float, **labels: str) -> None:
        """Raise a Prometheus counter, which takes increases only, to the total ``value``."""
        key = (name, *labels.values())
        increase = value - self.sent_totals.get(key, 0)
        if increase > 0:
            self.counters[name].labels(**self.labels, **labels).inc(increase)
            self.sent_totals[key] = value
