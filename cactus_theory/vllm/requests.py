"""What one request has been granted, has spent, and has got: kept from its first step to its end.

An account is by request id, not by place in a batch, so that it outlives a preemption; tokens
that are computed again are not emitted again, and cost nothing. Its tokens are those of rounds
with a draft. That is at most what the answer has, so that the cap of
:class:`~cactus_theory.decoding.ledger.Ledger` holds at every length of the answer.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.decoding._meter import Meter
from cactus_theory.decoding._verification import verified_rows
from cactus_theory.decoding.ledger import Ledger
from cactus_theory.policies import Policy
from cactus_theory.verify.contract import Verified
from cactus_theory.vllm.settings import LOG, Settings

LONGEST_NAME = 200  # characters of a request's id, which a client may choose


class Request:
    """One request.

    Attributes
    ----------
    params : the sampling parameters that it was admitted with.
    rules : the policies that may judge its tokens, one without a cap.
    account : the ledger's books, None without a cap.
    meter : measures every row, None unless readings are asked for.
    """

    def __init__(self, params: Any, policy: Policy, cap: float | None, settings: Settings) -> None:
        self.params, self.policy, self.cap = params, policy, cap
        self.ledger = None if cap is None else Ledger(policy, cap)
        self.rules = (policy,) if self.ledger is None else self.ledger.rules
        self.judge = settings.verifier
        self.account = None if self.ledger is None else self.ledger.begin(())
        measured = bool(settings.readings)
        self.meter = Meter(self.rules, settings.divergence, settings.verifier) if measured else None
        self.drafted = self.accepted = self.emitted = 0

    def choice(
        self,
        drafted: Int[Tensor, "K"],
        target_probs: Float[Tensor, "K vocab"],
        draft_probs: Float[Tensor, "K vocab"],
    ) -> Int[Tensor, "K"]:
        """Return which of ``rules`` judges each token."""
        if self.ledger is None or self.account is None:
            return torch.zeros_like(drafted)
        return self.ledger.choose_by_rows(self.account, drafted, target_probs, draft_probs)

    def book(self, seen: Verified, place: int, choice: Int[Tensor, "K"]) -> None:
        """Enter what a round has emitted, at row ``place`` of what was verified."""
        count, kept = seen.draft.lengths[place], int(seen.verdict.num_accepted[place])
        if not count:
            return
        charged = slice(0, min(kept + 1, count))
        self.drafted, self.accepted = self.drafted + count, self.accepted + kept
        self.emitted += kept + 1
        rows = verified_rows(place, charged, seen, self.judge)
        if self.ledger is not None and self.account is not None:
            account = self.ledger.observe(self.account, rows)
            self.account = self.ledger.advance(account, [0] * (kept + 1))
        if self.meter is not None:
            self.meter.add(rows.target_probs, rows.draft_probs, choice[charged], rows.path)
            self.meter.reading(0, 0)  # rows of a step are not kept

    def reading(self, name: str) -> dict[str, Any]:
        """Return the request's own numbers."""
        assert self.meter is not None
        found = self.meter.reading(self.accepted, self.emitted)
        return {
            "request": name[:LONGEST_NAME],
            "policy": self.policy.spec,
            "cap": self.cap,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "emitted": self.emitted,
            "emitted_divergence": found.kl,
            "divergence": found.divergence,
        }


def reporter_of(where: str, log: Callable[[str], None]) -> Callable[[dict[str, Any]], None]:
    """Return what writes a reading as a line of JSON: to the log, or to the end of a file."""

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
