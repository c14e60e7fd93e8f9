"""Keep the record of each request: its policy, the nats charged under its cap, its readings.

A record lasts from the request's first step to its end. It survives preemption: tokens that are
then computed again are not emitted again and are not charged again. Each emitted token adds the cap
to the nats that the request may spend, also a token of a step without a draft and the token that
the prompt's step emits. So the cap of :class:`~cactus_theory.decoding.ledger.Ledger` holds at every
length of the answer.

With ``CACTUS_READINGS`` every request writes one line of JSON when it ends, which the command
``promise --readings`` reads; SERVING.md lists the fields.

The engine may end a text inside a round. The counts of drafts and steps then include the tokens of
the round after the end, as the Prometheus counters do, but the answer does not. At most K tokens
are in excess, or 2K + 1 with asynchronous scheduling, where the next round has already begun.
"""

import json
import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cactus_theory.decoding.assignment import Rule
from cactus_theory.decoding.ledger import Ledger
from cactus_theory.decoding.meter import Meter
from cactus_theory.decoding.readings import DIRECTIONS
from cactus_theory.divergences.regret import REGRET
from cactus_theory.verify.node import Node
from cactus_theory.vllm.settings import LOG, Grant, Settings

End = tuple[str | None, int | None]  # why an answer ended, its number of tokens; None: unknown
LONGEST_NAME = 200  # most characters of a request's id, which a client may choose
QUIET_S = 60.0  # seconds between two warnings about readings that could not be written


class Request:
    """The state of one request: its policy and cap, the nats spent and the tokens emitted.

    ``followed`` is a :class:`Rule`: the policy or, under a cap, a :class:`Ledger` of the policy and
    the ledger's state. With readings, ``meter`` measures every verified row of the request.
    """

    def __init__(self, params: Any, granted: Grant, settings: Settings) -> None:
        self.params, self.policy, self.cap = params, granted.policy, granted.cap
        policy = self.policy if self.cap is None else Ledger(self.policy, self.cap)
        self.followed = Rule(policy, ())
        self.meter = Meter(self.policy.unit) if settings.readings else None
        self.drafted = self.accepted = self.emitted = 0
        self.undrafted = 0  # steps without a draft, each of which emits one token
        self.greedy = getattr(params, "temperature", None) == 0

    @property
    def strict(self) -> bool:
        """Return whether vLLM's rule judges the request: it is greedy, without a regret policy."""
        return self.greedy and self.policy.unit != REGRET

    def book(self, nodes: Sequence[Node], emitted: int) -> Meter:
        """Charge the request for a round's nodes, and count ``emitted`` tokens for the cap.

        Return a meter with the measurements of the nodes, empty without readings.
        """
        measured = Meter(self.policy.unit)
        if not nodes:
            return measured
        self.followed.observe(nodes)
        self.followed.advance([0] * emitted)  # an account reads the number of ids, not the ids
        if self.meter is not None:
            measured.add(nodes)
            self.meter.take(measured)  # sums only: the rows of a step are freed after the step
        return measured

    def step(self, drafted: int, accepted: int) -> None:
        """Count a round, or a step without a draft, whose one token then counts for the cap."""
        self.drafted, self.accepted = self.drafted + drafted, self.accepted + accepted
        self.emitted += accepted + 1
        if not drafted:
            self.undrafted += 1
            self.followed.advance([0])

    def reading(self, name: str, end: End, model: str) -> dict[str, Any]:
        """Return the numbers of the request as the fields of a line of JSON."""
        assert self.meter is not None
        reason, length = end
        limit = getattr(self.params, "max_tokens", None) or self.emitted
        length = min(self.emitted, limit) if length is None else length
        spent = self.meter.sums()[1]
        # the meter may include tokens after the end; its sum and cap · length both bound the nats
        if self.cap is not None:
            spent = min(spent, self.cap * length)
        return {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "server": f"{platform.node()}:{os.getpid()}",
            "model": model,
            "request": name[:LONGEST_NAME],
            "finish_reason": reason,
            "policy": None if self.strict else self.policy.spec,
            "cap": self.cap,
            "num_tokens": length,
            # each call emits one token that is no accepted drafted token
            "num_calls": self.emitted - self.accepted,
            "num_drafts": self.emitted - self.accepted - self.undrafted,
            "num_draft_tokens": self.drafted,
            "num_accepted_tokens": self.accepted,
            f"emitted_{self.policy.unit.spec}": spent,
            **dict(zip(DIRECTIONS, self.meter.directions.tolist(), strict=True)),
        }


def reporter_of(
    where: str, log: Callable[[str], None], warn: Callable[[str], None]
) -> Callable[[dict[str, Any]], None]:
    """Return a function that writes readings as lines of JSON, to the log or the end of a file.

    ``where`` is ``log`` or the file's path. If lines could not be written to the file, ``warn``
    gets their number.
    """
    import fcntl

    lost, warned = 0, -math.inf

    def write(reading: dict[str, Any]) -> None:
        nonlocal lost, warned
        line = json.dumps(reading)
        if where == LOG:
            return log(f"Cactus reading: {line}")
        try:
            with Path(where).open("ab", buffering=0) as file:
                with suppress(OSError):  # some file systems have no locks
                    fcntl.flock(file, fcntl.LOCK_EX)  # other engines may write to the same file
                append(file, f"{line}\n".encode())
        except OSError as error:  # a full disk must not end the engine
            lost += 1
            if time.monotonic() - warned >= QUIET_S:
                warned = time.monotonic()
                warn(f"cactus-theory: readings that were not written so far: {lost} ({error})")

    return write


def append(file: Any, content: bytes) -> None:
    """Append to an unbuffered file: either the whole content, or nothing and an OSError."""
    size = os.fstat(file.fileno()).st_size
    try:
        if file.write(content) < len(content):
            raise OSError("no space is left")
    except OSError:
        with suppress(OSError):  # a pipe cannot be truncated
            file.truncate(size)
        raise
