"""The record of a request: its policy, its account, its own readings.

From its first step with drafts to its end, through preemption: tokens that are computed again are
not emitted again, and cost nothing. Tokens of an account are those of rounds and of steps without
a draft, the prompt's own among them, so that the cap of
:class:`~cactus_theory.decoding.ledger.Ledger` holds at every length of the answer.

With ``CACTUS_READINGS`` every request leaves one line of JSON as it ends, which ``promise
--readings`` reads; SERVING.md has its fields.

The engine may end a text inside a round: tokens of that round that come after the end are in the
numbers of drafts and steps, as in the counters, and not in the answer: at most K of them, with
asynchronous scheduling, which has the next round under way by then, at most 2K + 1.
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

End = tuple[str | None, int | None]  # why an answer has ended and its tokens; None: not told
LONGEST_NAME = 200  # most characters of a request's id, which a client may choose
QUIET_S = 60.0  # seconds between two warnings of readings that were not written


class Request:
    """A request: its admission, its grant, the nats it has spent and the tokens it has got.

    ``followed`` is its policy, under a cap a ledger of it with its books. The meter measures every
    row, where readings are asked for.
    """

    def __init__(self, params: Any, granted: Grant, settings: Settings) -> None:
        self.params, self.policy, self.cap = params, granted.policy, granted.cap
        policy = self.policy if self.cap is None else Ledger(self.policy, self.cap)
        self.followed = Rule(policy, ())
        self.meter = Meter(self.policy.unit) if settings.readings else None
        self.drafted = self.accepted = self.emitted = 0
        self.undrafted = 0  # steps, of a token each
        self.greedy = getattr(params, "temperature", None) == 0

    @property
    def strict(self) -> bool:
        """Return whether vLLM decides: the request is greedy, and its policy not for that."""
        return self.greedy and self.policy.unit != REGRET

    def book(self, nodes: Sequence[Node], emitted: int) -> Meter:
        """Enter the charges of the nodes of a round that a policy decided, of ``emitted`` tokens.

        Return what was measured of them.
        """
        measured = Meter(self.policy.unit)
        if not nodes:
            return measured
        self.followed.observe(nodes)
        self.followed.advance([0] * emitted)
        if self.meter is not None:
            measured.add(nodes)
            self.meter.take(measured)  # rows of a step are not kept
        return measured

    def step(self, drafted: int, accepted: int) -> None:
        """Count a step: a round, or a token without a draft, which an account is credited with."""
        self.drafted, self.accepted = self.drafted + drafted, self.accepted + accepted
        self.emitted += accepted + 1
        if not drafted:
            self.undrafted += 1
            self.followed.advance([0])

    def reading(self, name: str, end: End, model: str) -> dict[str, Any]:
        """Return the request's own numbers."""
        assert self.meter is not None
        reason, length = end
        limit = getattr(self.params, "max_tokens", None) or self.emitted
        length = min(self.emitted, limit) if length is None else length
        spent = self.meter.sums()[1]
        if self.cap is not None:  # both bound what the answer itself was charged
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
    """Return the writer of readings as lines of JSON: to the log, or to the end of a file."""
    import fcntl

    lost, warned = 0, -math.inf

    def write(reading: dict[str, Any]) -> None:
        nonlocal lost, warned
        line = json.dumps(reading)
        if where == LOG:
            return log(f"Cactus reading: {line}")
        try:
            with Path(where).open("ab", buffering=0) as file:
                with suppress(OSError):  # some file systems know no locks
                    fcntl.flock(file, fcntl.LOCK_EX)  # from other engines
                append(file, f"{line}\n".encode())
        except OSError as error:  # a full disk must not end the engine
            lost += 1
            if time.monotonic() - warned >= QUIET_S:
                warned = time.monotonic()
                warn(f"cactus-theory: readings that were not written so far: {lost} ({error})")

    return write


def append(file: Any, content: bytes) -> None:
    """Write at the end of an unbuffered file: all of it, or nothing and OSError."""
    size = os.fstat(file.fileno()).st_size
    try:
        if file.write(content) < len(content):
            raise OSError("no space is left")
    except OSError:
        with suppress(OSError):  # a pipe keeps what it has got
            file.truncate(size)
        raise
