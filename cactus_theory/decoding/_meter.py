"""Measure what relaxed acceptance costs, on the rows that a decode has verified, token by token."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.base.reused_memory import passing, scratch
from cactus_theory.base.threads import one_thread
from cactus_theory.decoding._verification import path_to, rows_at
from cactus_theory.decoding.readings import Kind, Reading
from cactus_theory.decoding.result import LogProbs
from cactus_theory.divergences import Divergence
from cactus_theory.divergences import divergence as find_divergence
from cactus_theory.emitted import raised_off_head
from cactus_theory.policies import Policy
from cactus_theory.policies._base_classes import FixedTarget, PerProposal
from cactus_theory.policies._decisions import Path
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
        ids: Int[Tensor, "rows"],
        emitted: Float[Tensor, "rows vocab"],
        spent: Float[Tensor, "rows"],
    ) -> None:
        """Enter the charges of tokens, in the meter's divergence, and ln h."""
        self.charges[slots] = spent.cpu()
        if self.emitted is not None:
            self.emitted[slots] = emitted.gather(-1, ids[:, None])[:, 0].log().cpu()

    def costs(self, width: int) -> Float[Tensor, "batch width"]:
        """Return the charges of the first ``width`` tokens of each text."""
        return self.charges.reshape(self.batch, self.room)[:, :width].clone()

    def log_probs(self, width: int) -> LogProbs | None:
        if self.target is None or self.emitted is None:
            return None
        shape = self.batch, self.room
        return LogProbs(*(logs.reshape(shape)[:, :width] for logs in (self.target, self.emitted)))


# Rows are collected up to WAITING_ENTRIES entries, then measured in batches of at most
# BATCHED_ENTRIES (192 KiB of float64): few calls, on arrays that fit into a core's own cache.
# Measured under Cactus on 630 rows of 2,048, microseconds a row: 51 for batches of 8 rows, 50 for
# 12; 16 and 32 are sometimes faster and sometimes slower, depending on the allocator.
WAITING_ENTRIES = 2**19
BATCHED_ENTRIES = 2**14 + 2**13
Choice = Int[Tensor, "rows"]
Waiting = tuple[Tensor, ...]


class Meter:
    """Adds D(out‖q) over verified rows, up to and including each round's first rejection.

    ``out`` is the exact emitted law of the policy that judged the row. By the chain rule of KL
    the expected sum bounds the KL of whole texts from the target's (THEORY.md, Theorem 11).
    """

    def __init__(
        self,
        policies: tuple[Policy, ...],
        divergence: str | Divergence = "kl",
        verifier: str | Verifier = "chain",
        log: TokenLog | None = None,
    ) -> None:
        self.policies, self.verifier, self.log = policies, find_verifier(verifier), log
        self.divergence = find_divergence(divergence)
        self.waiting: list[Waiting] = []
        self.zero = torch.zeros(1, dtype=torch.int64, device="cpu")
        self.one = torch.ones(1, dtype=torch.float64, device="cpu")
        self.rows = self.entries = 0
        # sums stay where the rows are: nothing waits for a device
        zeros = torch.zeros(4, dtype=torch.float64, device="cpu")
        self.total, self.largest, self.expected, self.raised = zeros

    def add(
        self,
        target_probs: Float[Tensor, "rows vocab"],
        draft_probs: Float[Tensor, "rows vocab"],
        choice: Choice | None,
        path: Path | None = None,
        tokens: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Collect verified rows.

        ``choice`` is the policy of each (None: there is only one), ``path`` how a verifier of
        blocks reached them (None: that does not matter), ``tokens`` where the log has the
        tokens that were emitted there, and their ids (None: there is no log).
        """
        if choice is None:
            choice = self.zero.expand(len(target_probs))
        if path is None:
            path = Path(self.one.expand(len(choice)))
        # a path of one piece either looked ahead or did not; NaN stands for the latter
        raised = path.alive * math.nan if path.raised is None else path.raised
        slots, ids = tokens or (self.zero.expand(len(choice)),) * 2
        ways = path.alive, raised
        self.waiting.append((target_probs, draft_probs, choice, *ways, slots, ids))
        self.rows += len(target_probs)
        self.entries += target_probs.numel()
        if self.entries >= WAITING_ENTRIES:
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
            raised_off_head=float(self.raised),
        )

    @one_thread()
    def _measure_waiting(self) -> None:
        if not self.waiting:
            return
        size = max(1, BATCHED_ENTRIES // self.waiting[0][0].shape[-1])
        for group in _groups(self.waiting, size):
            parts: Any = (
                zip(*group, strict=True) if len(group) > 1 else ((part,) for part in group[0])
            )
            columns = (
                (torch.cat(part) if len(part) > 1 else part[0]).split(size) for part in parts
            )
            for q, p, choice, alive, raised, *tokens in zip(*columns, strict=True):
                path = Path(alive, raised)
                memory = scratch("meter.rows", (2, *q.shape), device=q.device).unbind(0)
                q, p = map(check.normalised, (q, p), memory)
                self._by_policy(q, p, choice, path, tokens)
        self.waiting, self.entries = [], 0

    def _by_policy(
        self, q: Tensor, p: Tensor, choice: Choice, path: Path, tokens: Sequence[Tensor]
    ) -> None:
        assert path.raised is not None
        # numbers of policies and paths may lie on devices of their own
        choice, looked_ahead = choice.cpu(), path.raised.isfinite().cpu()
        for number, policy in enumerate(self.policies):
            for ahead in (False, True):
                rows = (choice == number) & (looked_ahead == ahead)
                if bool(rows.all()):
                    raised = path.raised if ahead else None
                    self._measure(policy, q, p, Path(path.alive, raised), tokens)
                elif bool(rows.any()):
                    raised = path.raised[rows] if ahead else None
                    their_path = Path(path.alive[rows], raised)
                    their_tokens = [part[rows.to(part.device)] for part in tokens]
                    self._measure(policy, q[rows], p[rows], their_path, their_tokens)

    def _measure(
        self, policy: Policy, q: Tensor, p: Tensor, path: Path, tokens: Sequence[Tensor]
    ) -> None:
        emitted = self.verifier.emitted(policy, q, p, path)
        # a policy that is lossless for what it emits accepts Σ min(p, out)
        exact = isinstance(policy, FixedTarget | PerProposal)
        offered = p if bool((path.alive == 1).all()) else p / path.alive[:, None]
        if exact:
            accepted = torch.minimum(offered, emitted, out=passing(p))
        else:
            accepted = p * policy.acceptance_row(q, p)
        self.expected = self.expected + accepted.sum()
        del accepted
        if emitted is q:  # seen, not claimed: the policy returned the target's own row
            return
        spent = self.divergence.value(emitted, q).clamp(min=0.0)
        self.total = self.total + spent.sum()
        self.raised = self.raised + raised_off_head(emitted, q).sum()
        self.largest = torch.maximum(self.largest.to(spent.device), spent.max())
        if self.log is not None:
            slots, ids = tokens
            self.log.charge(slots, ids, emitted, spent)


def _groups(waiting: list[Waiting], size: int) -> Iterator[list[Waiting]]:
    """Yield the collected rows in groups of up to ``size`` rows; parts are not split."""
    group: list[Waiting] = []
    rows = 0
    for part in waiting:
        if group and rows + len(part[0]) > size:
            yield group
            group, rows = [], 0
        group.append(part)
        rows += len(part[0])
    yield group


def charge(
    meter: Meter, row: int, new: Sequence[int], verified: Verified, position: tuple[int, int]
) -> None:
    """Give the meter the charged rows of one text, with that of a charged bonus.

    ``new`` are the tokens that the text took, ``position`` which text of the batch it is, and how
    many new tokens it had before.
    """
    drafted, choice = verified.draft.lengths[row], verified.assigned.choice
    verdict = verified.verdict
    nodes = verdict.charged_rows(row, min(drafted + verdict.charges_bonus, len(new)))
    q, p = rows_at(row, nodes, verified)
    choices = None if choice is None else choice[row, nodes]
    if choices is not None and len(choices) < len(q):  # the bonus follows the last one's policy
        choices = torch.cat([choices, choice[row, drafted - 1 : drafted]])  # type: ignore[index]
    tokens = None
    if meter.log is not None:
        tokens = meter.log.slots(*position, len(q)), torch.tensor(new[: len(q)], device=q.device)
    meter.add(q, p, choices, path_to(row, nodes, verified), tokens)
