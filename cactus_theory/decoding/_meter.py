"""Measure what relaxed acceptance costs, on the rows that a decode has verified, token by token."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.base.threads import one_thread
from cactus_theory.decoding._verification import path_to, rows_at
from cactus_theory.decoding.readings import Kind, Reading
from cactus_theory.decoding.result import LogProbs
from cactus_theory.divergences import Divergence, read_divergence
from cactus_theory.policies import Policy
from cactus_theory.policies._decisions import PathState
from cactus_theory.verify.contract import Verifier, find_verifier
from cactus_theory.verify.draft import Verified


class TokenLog:
    """Entries (B · room,) of new tokens, in any order: charges, 0 for none, ln q and ln h."""

    def __init__(self, batch: int, room: int, log_probs: bool) -> None:
        self.batch, self.room = batch, room
        self.charges = torch.zeros(batch * room, dtype=torch.float64, device="cpu")
        self.target = torch.full_like(self.charges, torch.nan) if log_probs else None
        self.emitted = torch.full_like(self.charges, torch.nan) if log_probs else None

    def slots(self, text: int, first: int, count: int) -> Int[Tensor, "count"]:
        start = text * self.room + first
        return torch.arange(start, start + count, device="cpu")

    def score(
        self,
        position: tuple[int, int],
        ids: Sequence[int],
        target_probs: Float[Tensor, "rows vocab"],
        path: Int[Tensor, "most"] | None = None,
    ) -> None:
        """Enter ln q of a round's tokens, for ln h as well: :meth:`charge` replaces that later.

        ``position`` is the text and its new tokens before these, ``target_probs`` the text's rows
        of the round, ``path`` the accepted tokens of a tree among the drafted ones, None where
        they are the first ones.
        """
        if self.target is None or self.emitted is None:
            return
        rows: Any = slice(0, len(ids))
        if path is not None:  # a token's row follows the accepted token before it
            rows = [0, *(taken + 1 for taken in path[: len(ids) - 1].tolist())]
        q = check.normalised(target_probs[rows])
        target_logs = q.gather(-1, torch.tensor(ids, device=q.device)[:, None])[:, 0].log().cpu()
        slots = self.slots(*position, len(ids))
        self.target[slots] = self.emitted[slots] = target_logs

    def charge(
        self,
        slots: Int[Tensor, "rows"],
        emitted: Float[Tensor, "rows"],
        spent: Float[Tensor, "rows"],
    ) -> None:
        """Enter the charges of tokens, in the meter's divergence, and ln h of h."""
        self.charges[slots] = spent.cpu()
        if self.emitted is not None:
            self.emitted[slots] = emitted.log().cpu()

    def costs(self, width: int) -> Float[Tensor, "batch width"]:
        return self.charges.reshape(self.batch, self.room)[:, :width].clone()

    def log_probs(self, width: int) -> LogProbs | None:
        if self.target is None or self.emitted is None:
            return None
        shape = self.batch, self.room
        return LogProbs(*(logs.reshape(shape)[:, :width] for logs in (self.target, self.emitted)))


# entries of rows of a device that are collected before they are measured, in few launches
WAITING_ENTRIES = 2**19
Choice = Int[Tensor, "rows"]


class Meter:
    """Adds D(out‖q) over the rows of accepted tokens and of the one recovered after them.

    ``out`` is the exact emitted law of the policy that judged the row; in a block it is that at the
    node's alive ratio, and counts once, not times the ratio. By the chain rule of KL the expected
    sum bounds the KL of whole texts from the target's (THEORY.md, Theorem 11). ``Emitted.charges``
    computes it (:mod:`cactus_theory.verify._emitted`).
    """

    def __init__(
        self,
        policies: tuple[Policy, ...],
        divergence: str | Divergence = "kl",
        verifier: str | Verifier = "chain",
        log: TokenLog | None = None,
    ) -> None:
        self.policies, self.verifier, self.log = policies, find_verifier(verifier), log
        self.divergence = read_divergence(divergence)
        self.waiting: list[tuple[Tensor, ...]] = []
        self.rows = 0
        # sums stay where the rows are: nothing waits for a device
        zeros = torch.zeros(4, dtype=torch.float64, device="cpu")
        self.total, self.largest, self.expected, self.off_head = zeros

    def add(
        self,
        target_probs: Float[Tensor, "rows vocab"],
        draft_probs: Float[Tensor, "rows vocab"],
        choice: Choice | None,
        path: PathState | None = None,
        tokens: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Measure verified rows, on a device some time before :meth:`sums` returns.

        ``choice`` is the policy of each (None: there is only one), ``path`` how a verifier of
        blocks reached them (None: that does not matter), ``tokens`` where the log has the
        tokens that were emitted there, and their ids (None: there is no log).
        """
        count, like = len(target_probs), target_probs
        alive = like.new_ones(count, dtype=torch.float64) if path is None else path.alive
        # NaN: not looked ahead
        raised = alive * math.nan if path is None or path.raised is None else path.raised
        numbers = torch.zeros(count, dtype=torch.int64, device="cpu") if choice is None else choice
        slots, ids = tokens or (numbers, numbers)
        columns = target_probs, draft_probs, numbers, alive, raised, slots, ids
        self.rows += count
        if not like.is_cuda:
            return self._measure_rows(*columns)
        self.waiting.append(tuple(column.clone() for column in columns))
        if sum(waiting[0].numel() for waiting in self.waiting) >= WAITING_ENTRIES:
            self._measure_waiting()

    def sums(self) -> tuple[int, float]:
        """Return the number of measured rows and their summed divergence; rows wait for this."""
        self._measure_waiting()
        return self.rows, float(self.total)

    def reading(self, rounds: Mapping[Kind, int], num_tokens: int) -> Reading:
        """Return the sums beside what all rows took."""
        rows, spent = self.sums()
        return Reading(
            rounds,
            num_tokens,
            emitted_divergence=spent,
            largest_row_divergence=float(self.largest),
            divergence=self.divergence.spec,
            rows=rows,
            expected_accepted=float(self.expected),
            raised_off_head=float(self.off_head),
        )

    def _measure_waiting(self) -> None:
        if self.waiting:
            self._measure_rows(*map(torch.cat, zip(*self.waiting, strict=True)))
        self.waiting = []

    @one_thread()
    def _measure_rows(
        self, q: Tensor, p: Tensor, choice: Choice, alive: Tensor, raised: Tensor,
        slots: Tensor, ids: Tensor,
    ) -> None:  # fmt: skip
        """Measure rows by their policies, apart where these looked ahead."""
        # numbers of policies and paths may lie on devices of their own
        kinds = list(zip(choice.tolist(), raised.isfinite().tolist(), strict=True))
        for number, ahead in dict.fromkeys(kinds):
            columns = q, p, alive, raised, slots, ids
            if len(set(kinds)) > 1:
                rows = [place for place, kind in enumerate(kinds) if kind == (number, ahead)]
                columns = tuple(column[rows] for column in columns)
            own_q, own_p, own_alive, own_raised, *tokens = columns
            path = PathState(own_alive, own_raised if ahead else None)
            emitted = self.verifier.emitted(self.policies[number], own_q, own_p, path)
            spent, accepted, beyond = emitted.charges(self.divergence)
            self.off_head = self.off_head + beyond.sum()
            self.expected = self.expected + accepted.sum()
            self.total = self.total + spent.sum()
            self.largest = torch.maximum(self.largest.to(spent.device), spent.max())
            if self.log is not None:
                self.log.charge(tokens[0], emitted.at(tokens[1]), spent)


def charge(
    meter: Meter, row: int, new: Sequence[int], verified: Verified, position: tuple[int, int]
) -> None:
    """Give the meter the charged rows of one text.

    ``new`` are the tokens that the text took, ``position`` which text of the batch it is, and how
    many new tokens it had before.
    """
    drafted, choice = verified.draft.lengths[row], verified.assigned.choice
    nodes = verified.verdict.charged_rows(row, min(drafted, len(new)))
    q, p = rows_at(row, nodes, verified)
    choices = None if choice is None else choice[row, nodes]
    tokens = None
    if meter.log is not None:
        tokens = meter.log.slots(*position, len(q)), torch.tensor(new[: len(q)], device=q.device)
    meter.add(q, p, choices, path_to(row, nodes, verified), tokens)
