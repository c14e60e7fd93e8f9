"""Measure what relaxed acceptance really costs, on the rows a decode has verified."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.decoding.result import MeterReading, VerifiedRows
from cactus_theory.divergences import divergence
from cactus_theory.emitted import emitted_law
from cactus_theory.policies import Policy

# Rows wait until so many entries (8 MiB of float64) have come together.
BATCHED_ENTRIES = 2**20


class Meter:
    """Adds D_kl(out‖q) over verified rows, up to and including each round's first rejection.

    ``out`` is the exact emitted law of the rule. By the chain rule the expected sum bounds
    the KL of whole texts from the target's.
    """

    def __init__(self, rule: Policy) -> None:
        self.rule = rule
        self.waiting: list[tuple[Tensor, Tensor]] = []
        self.entries = 0
        self.rows = 0
        self.total = self.largest = self.expected = 0.0

    def add(
        self, target_probs: Float[Tensor, "rows vocab"], draft_probs: Float[Tensor, "rows vocab"]
    ) -> None:
        """Take note of one round's verified rows."""
        self.waiting.append((target_probs, draft_probs))
        self.rows += len(target_probs)
        self.entries += target_probs.numel()
        if self.entries >= BATCHED_ENTRIES:
            self._work_off()

    def reading(self, accepted: int, emitted: int) -> MeterReading:
        """Return the sums, given how many drafted tokens were accepted and tokens emitted."""
        self._work_off()
        return MeterReading(
            rows=self.rows,
            kl=self.total,
            kl_per_row=self.total / self.rows if self.rows else 0.0,
            kl_per_token=self.total / emitted if emitted else 0.0,
            largest_row_kl=self.largest,
            expected_accepted=self.expected,
            accepted=accepted,
        )

    def _work_off(self) -> None:
        if not self.waiting:
            return
        q, p = (torch.cat(rows) for rows in zip(*self.waiting, strict=True))
        self.waiting, self.entries = [], 0
        spent = divergence("kl").value(emitted_law(self.rule, q, p), q).clamp(min=0.0)
        self.total += float(spent.sum())
        self.largest = max(self.largest, float(spent.max()))
        self.expected += float((p * self.rule.keep(q, p)).sum())


class Recorder:
    """Keeps the verified rows of a decode."""

    def __init__(self) -> None:
        self.rounds: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def add(
        self,
        target_probs: Float[Tensor, "rows vocab"],
        draft_probs: Float[Tensor, "rows vocab"],
        draft_token_ids: Int[Tensor, "rows"],
        accepted: int,
    ) -> None:
        """Keep one round's verified rows, of which the first ``accepted`` were accepted."""
        flags = torch.arange(len(draft_token_ids), device=draft_token_ids.device) < accepted
        self.rounds.append((target_probs, draft_probs, draft_token_ids, flags))

    def rows(self, vocab: int) -> VerifiedRows:
        """Return everything kept, stacked over rounds."""
        if not self.rounds:
            nothing = torch.empty(0, vocab, dtype=torch.float64)
            ids = torch.empty(0, dtype=torch.int64)
            return VerifiedRows(nothing, nothing.clone(), ids, ids.bool())
        parts: list[Any] = [torch.cat(part) for part in zip(*self.rounds, strict=True)]
        return VerifiedRows(*parts)
