"""Measure what relaxed acceptance costs, on the rows that a decode has verified."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.decoding.result import MeterReading, VerifiedRows
from cactus_theory.decoding.token_log import TokenLog
from cactus_theory.divergences import Divergence
from cactus_theory.divergences import divergence as find_divergence
from cactus_theory.policies import Policy
from cactus_theory.policies._base import (
    one_hot,
)
from cactus_theory.policies._forms import FixedTarget, PerProposal
from cactus_theory.policies._records import Path
from cactus_theory.verify.contract import Draft, Verified, Verifier
from cactus_theory.verify.registry import find_verifier

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
        rules: tuple[Policy, ...],
        divergence: str | Divergence = "kl",
        verifier: str | Verifier = "chain",
        log: TokenLog | None = None,
    ) -> None:
        self.rules, self.verifier, self.log = rules, find_verifier(verifier), log
        self.divergence = find_divergence(divergence)
        self.waiting: list[Waiting] = []
        self.only = torch.zeros(1, dtype=torch.int64)
        self.sure = torch.ones(1, dtype=torch.float64)
        self.entries = 0
        self.rows = 0
        # sums stay where the rows are: nothing waits for a device
        self.total, self.largest, self.expected = torch.zeros(3, dtype=torch.float64)

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
            choice = self.only.expand(len(target_probs))
        if path is None:
            path = Path(self.sure.expand(len(choice)), self.only.expand(len(choice)))
        # a path of one piece either looked ahead or did not; NaN stands for the latter
        raised = path.alive * math.nan if path.raised is None else path.raised
        slots, ids = tokens or (self.only.expand(len(choice)),) * 2
        own = (target_probs, draft_probs, choice, path.alive, path.left, raised, slots, ids)
        self.waiting.append(own)
        self.rows += len(target_probs)
        self.entries += target_probs.numel()
        if self.entries >= WAITING_ENTRIES:
            self._work_off()

    def reading(self, accepted: int, emitted: int) -> MeterReading:
        """Return the sums, given how many drafted tokens were accepted and tokens emitted."""
        self._work_off()
        total = float(self.total)
        return MeterReading(
            rows=self.rows,
            kl=total,
            kl_per_row=total / self.rows if self.rows else 0.0,
            kl_per_token=total / emitted if emitted else 0.0,
            largest_row_kl=float(self.largest),
            expected_accepted=float(self.expected),
            accepted=accepted,
            divergence=self.divergence.spec,
        )

    def _work_off(self) -> None:
        if not self.waiting:
            return
        size = max(1, BATCHED_ENTRIES // self.waiting[0][0].shape[-1])
        for group in _groups(self.waiting, size):
            columns = (torch.cat(part).split(size) for part in zip(*group, strict=True))
            for q, p, choice, alive, left, raised, *tokens in zip(*columns, strict=True):
                path = Path(alive, left, raised)
                self._judge(check.normalised(q), check.normalised(p), choice, path, tokens)
        self.waiting, self.entries = [], 0

    def _judge(
        self, q: Tensor, p: Tensor, choice: Choice, path: Path, tokens: Sequence[Tensor]
    ) -> None:
        assert path.raised is not None
        ahead = path.raised.isfinite()
        for number, rule in enumerate(self.rules):
            for looked in (False, True):
                mine = (choice == number) & (ahead == looked)
                if bool(mine.all()):
                    raised = path.raised if looked else None
                    self._measure(rule, q, p, Path(path.alive, path.left, raised), tokens)
                elif bool(mine.any()):
                    raised = path.raised[mine] if looked else None
                    own = Path(path.alive[mine], path.left[mine], raised)
                    some = [part[mine.to(part.device)] for part in tokens]
                    self._measure(rule, q[mine], p[mine], own, some)

    def _measure(
        self, rule: Policy, q: Tensor, p: Tensor, path: Path, tokens: Sequence[Tensor]
    ) -> None:
        emitted = self.verifier.emitted(rule, q, p, path)
        # a policy that is lossless for what it emits accepts Σ min(p, out)
        exact = isinstance(rule, FixedTarget | PerProposal)
        offered = p if bool((path.alive == 1).all()) else p / path.alive[:, None]
        kept = torch.minimum(offered, emitted) if exact else p * rule.keep(q, p)
        self.expected = self.expected + kept.sum()
        if emitted is q:  # seen, not claimed: the policy returned the target's own row
            return
        spent = self.divergence.value(emitted, q).clamp(min=0.0)
        self.total = self.total + spent.sum()
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


class Recorder:
    """Keeps the verified rows of a decode."""

    def __init__(self) -> None:
        self.rounds: list[VerifiedRows] = []

    def add(self, rows: VerifiedRows) -> None:
        """Keep one round's verified rows."""
        self.rounds.append(rows)

    def rows(self, vocab: int) -> VerifiedRows:
        """Return everything kept, stacked over rounds, as float64 rows that sum to 1."""
        if not self.rounds:
            nothing = torch.empty(0, vocab, dtype=torch.float64)
            ids = torch.empty(0, dtype=torch.int64)
            return VerifiedRows(nothing, nothing.clone(), ids, ids.bool())
        rounds = self.rounds
        return VerifiedRows(
            check.normalised(torch.cat([own.target_probs for own in rounds])),
            check.normalised(torch.cat([own.draft_probs for own in rounds])),
            torch.cat([own.draft_token_ids for own in rounds]),
            torch.cat([own.accepted for own in rounds]),
            sum((own.policies for own in rounds), ()),
            rounds[0].verifier,
            _joined([own.path for own in rounds if own.path is not None]),
        )


def _joined(paths: Sequence[Path]) -> Path | None:
    """Return the paths to rows of one round after another."""
    if not paths:
        return None
    raised = [own.alive * math.nan if own.raised is None else own.raised for own in paths]
    parts = [own.alive for own in paths], [own.left for own in paths], raised
    return Path(*map(torch.cat, parts))


def rows_of(
    row: int, nodes: Any, places: Any, q: Tensor, draft: Draft
) -> tuple[Float[Tensor, "count vocab"], Float[Tensor, "count vocab"]]:
    """Return copies of the target and draft rows of one text at nodes.

    ``places`` are the drafted tokens that follow them, which a certain draft is certain of. Where
    the draft declares the laws of its nodes its row is their selection law.
    """
    own_q = q[row, nodes].clone()
    if draft.sampled is not None:
        some = range(draft.lengths[row])[nodes] if isinstance(nodes, slice) else nodes
        return own_q, draft.offers(row, some, own_q)
    if draft.probs is None:
        return own_q, one_hot(draft.token_ids[row, places], own_q)
    return own_q, draft.probs[row, nodes].clone()


def rows_at(row: int, nodes: Any, seen: Verified) -> tuple[Tensor, Tensor]:
    """Return the same of charged nodes."""
    declared = seen.draft.sampled is not None
    places = seen.judged(row, nodes) if seen.draft.probs is None and not declared else nodes
    q, p = rows_of(row, nodes, places, seen.target_probs, seen.draft)
    if declared and seen.verdict.raised is not None:
        raised = seen.raised(row)
        for number, node in enumerate(nodes):
            ids, values = raised[node]
            if ids:  # their shares of what h gives them
                p[number] = 0.0
                p[number, ids] = p.new_tensor(values) / math.fsum(values)
    return q, p


def verified(row: int, nodes: Any, seen: Verified, verifier: Verifier) -> VerifiedRows:
    """Return copies of all that was verified of one text at charged nodes, no bonus among them."""
    ids = seen.draft.token_ids[row, seen.judged(row, nodes)].clone()
    kept = torch.arange(len(ids), device=ids.device) < seen.verdict.num_accepted[row]
    choice, policies = seen.assigned.choice, seen.assigned.policies
    numbers = [0] * len(ids) if choice is None else choice[row, nodes].tolist()
    judged = tuple(policies[number] for number in numbers)
    path = path_to(row, nodes, seen)
    return VerifiedRows(*rows_at(row, nodes, seen), ids, kept, judged, verifier, path)


def path_to(row: int, nodes: Any, seen: Verified) -> Path | None:
    """Return how charged rows of one text were reached, None where it does not matter."""
    verdict, draft = seen.verdict, seen.draft
    if verdict.alive is None:
        return None
    # measured later, when a step may have written the next round there
    alive, drafted = verdict.alive[row, nodes].clone(), draft.lengths[row]
    left = alive.new_tensor(draft.left(row), dtype=torch.int64)[:drafted][nodes]
    raised = None if verdict.raised is None else verdict.raised[row, nodes].clone()
    if raised is not None and draft.sampled is not None:
        mass = [math.fsum(values) or math.nan for _, values in seen.raised(row)]
        raised = alive.new_tensor(mass)[nodes]
    if isinstance(nodes, slice) and nodes.stop > drafted:  # a bonus: see ``Block.bonus``
        alive = torch.cat([alive[:drafted], alive.new_ones(1)])
        left = torch.cat([left, left.new_zeros(1)])
    return Path(alive, left, raised)


def charge(
    meter: Meter, row: int, new: Sequence[int], seen: Verified, place: tuple[int, int]
) -> None:
    """Give the meter the charged rows of one text, with that of a charged bonus.

    ``new`` are the tokens that the text took, ``place`` which text of the batch it is, and how
    many new tokens it had before.
    """
    drafted, choice = seen.draft.lengths[row], seen.assigned.choice
    nodes = seen.verdict.charged_rows(row, min(drafted + seen.verdict.charges_bonus, len(new)))
    q, p = rows_at(row, nodes, seen)
    own = None if choice is None else choice[row, nodes]
    if own is not None and len(own) < len(q):  # the bonus follows the last one's policy
        own = torch.cat([own, choice[row, drafted - 1 : drafted]])  # type: ignore[index]
    tokens = None
    if meter.log is not None:
        tokens = meter.log.slots(*place, len(q)), torch.tensor(new[: len(q)], device=q.device)
    meter.add(q, p, own, path_to(row, nodes, seen), tokens)
