"""The record of a request on model runner V1: its policy, its account, its own readings.

From its first step with drafts to its end, through preemption: tokens that are computed again are
not emitted again, and cost nothing. Tokens of an account are those of rounds with a draft, at
most what the answer has, so that the cap of :class:`~cactus_theory.decoding.ledger.Ledger` holds at
every length of the answer.

With ``CACTUS_READINGS`` every request leaves one line of JSON as it ends:

======================  ===================================================================
``time``                of its end, ISO 8601 in UTC
``model``, ``request``  the name that the model is served by, and vLLM's id of the request
``finish_reason``       vLLM's: ``stop``, ``length``, ``abort``, …; null where its scheduler did
                        not say. A stop string is found by the front end, which then aborts the
                        request here: ``abort``
``policy``, ``cap``     what it was admitted with; the policy is null for a greedy request, which
                        vLLM decides by the largest logit
``drafted``             tokens that were drafted for it
``accepted``            accepted ones among them
``emitted``             these, and one recovered or bonus token a round
``emitted_divergence``  D(out‖q) summed over its verified rows, every one of them measured
``divergence``          what was measured
======================  ===================================================================

The engine may end a text inside a round: tokens of that round that come after the end are in these
numbers, as they are in the counters, and not in the answer: at most K of them, with asynchronous
scheduling, which has the next round under way by then, at most 2K + 1.
"""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cactus_theory.decoding._meter import Meter
from cactus_theory.decoding._verification import Followed, verified_rows
from cactus_theory.decoding.ledger import Ledger
from cactus_theory.verify.draft import Verified
from cactus_theory.vllm.admission import Grant
from cactus_theory.vllm.settings import LOG, Settings

LONGEST_NAME = 200  # most characters of a request's id, which a client may choose


class Request:
    """A request: its admission, its grant, the nats it has spent and the tokens it has got.

    ``followed`` is its policy, under a cap a ledger of it with its books. The meter measures every
    row, where readings are asked for.
    """

    def __init__(self, params: Any, granted: Grant, settings: Settings) -> None:
        self.params, self.policy, self.cap = params, granted.policy, granted.cap
        policy = self.policy if self.cap is None else Ledger(self.policy, self.cap)
        self.followed, self.judge = Followed(policy, ()), settings.verifier
        measured = bool(settings.readings)
        self.meter: Meter | None = None
        if measured:
            self.meter = Meter(self.followed.policies, settings.divergence, settings.verifier)
        self.rounds: Any = None  # rounds recorded for CACTUS_TRACE
        self.drafted = self.accepted = self.emitted = 0
        self.greedy = getattr(params, "temperature", None) == 0

    @property
    def accounted(self) -> bool:
        """Return whether its rounds are to be booked: it has a cap or a meter."""
        return self.cap is not None or self.meter is not None

    def book(self, verified: Verified, place: int) -> tuple[int, float]:
        """Enter the tokens and charges of a round, at row ``place`` of the verified batch.

        Return the rows that were measured and what they add up to.
        """
        count, accepted = verified.draft.lengths[place], int(verified.verdict.num_accepted[place])
        if not count:
            return 0, 0.0
        charged = slice(0, min(accepted + 1, count))
        self._count(count, accepted)
        rows = verified_rows(place, charged, verified, self.judge)
        self.followed.observe(rows)
        self.followed.advance([0] * (accepted + 1))
        if self.meter is None:
            return 0, 0.0
        before = self.meter.sums()
        judges = [self.followed.policies.index(policy) for policy in rows.policies]
        choice = rows.draft_token_ids.new_tensor(judges)
        self.meter.add(rows.target_probs, rows.draft_probs, choice, rows.path)
        after = self.meter.sums()  # rows of a step are not kept
        return after[0] - before[0], after[1] - before[1]

    def count_greedy(self, drafted: int, emitted: int) -> None:
        """Enter a round that the largest logits have decided."""
        self.greedy = True
        self._count(drafted, emitted - 1)

    def reading(self, name: str, reason: str | None, model: str) -> dict[str, Any]:
        """Return the request's own numbers."""
        assert self.meter is not None
        return {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "model": model,
            "request": name[:LONGEST_NAME],
            "finish_reason": reason,
            "policy": None if self.greedy else self.policy.spec,
            "cap": self.cap,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "emitted": self.emitted,
            "emitted_divergence": self.meter.sums()[1],
            "divergence": self.meter.divergence.spec,
        }

    def _count(self, drafted: int, accepted: int) -> None:
        self.drafted, self.accepted = self.drafted + drafted, self.accepted + accepted
        self.emitted += accepted + 1


def reporter_of(where: str, log: Callable[[str], None]) -> Callable[[dict[str, Any]], None]:
    """Return the writer of readings as lines of JSON: to the log, or to the end of a file."""

    def write(reading: dict[str, Any]) -> None:
        line = json.dumps(reading)
        if where == LOG:
            return log(f"Cactus reading: {line}")
        try:
            with Path(where).open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:  # a full disk must not end the engine
            log(f"cactus-theory: a reading was not written: {error}")

    return write
