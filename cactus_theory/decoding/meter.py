"""Measure what relaxed acceptance costs at the nodes that a decode has verified."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.base.threads import one_thread
from cactus_theory.decoding.readings import DIRECTIONS, Kind, Reading
from cactus_theory.decoding.result import LogProbs
from cactus_theory.divergences import Divergence, read_divergence
from cactus_theory.verify.node import Node, charge_nodes

# a text of the batch, how many new tokens it had before, and the new one
Emitted = tuple[int, int, int]
# entries of rows of a device that are collected before they are measured, in few launches
WAITING_ENTRIES = 2**19


class TokenLog:
    """Charges of new tokens (B, room), 0 for none, ln q and ln h of each, directions of texts."""

    def __init__(self, batch: int, room: int, log_probs: bool) -> None:
        self.has_log_probs = log_probs
        self.charges = np.zeros((batch, room))
        self.directions = np.zeros((batch, len(DIRECTIONS)))
        self.target, self.emitted = np.full((2, batch, room), np.nan)

    def enter(self, node: Node, spent: float, emitted: Emitted) -> None:
        """Record the charge of an emitted token, and its log-probabilities if they are kept."""
        *at, token = emitted
        self.charges[*at] = spent
        self.directions[at[0]] += node.directions
        if self.has_log_probs:
            with np.errstate(divide="ignore"):  # a row of one's own may emit what q excludes
                self.target[*at] = np.log(float(node.target[token]))
                self.emitted[*at] = np.log(node.h(token))

    def costs(self, width: int) -> Float[Tensor, "batch width"]:
        """Return the charges of the first ``width`` tokens of every text, in the meter's unit."""
        return torch.from_numpy(self.charges[:, :width].copy())

    def log_probs(self, width: int) -> LogProbs | None:
        """Return ln q and ln h of the first ``width`` tokens of every text; None if not kept."""
        if not self.has_log_probs:
            return None
        logs = (torch.from_numpy(of[:, :width].copy()) for of in (self.target, self.emitted))
        return LogProbs(*logs)


class Meter:
    """Adds D(h‖q) over the nodes where tokens were emitted.

    h is the exact law emitted there by the policy that judged the row; in a block it is that at the
    node's alive ratio, and counts once, not times the ratio. By the chain rule of KL the expected
    sum bounds the KL of whole texts from the target's (THEORY.md, Theorem 11). ``Node.charge``
    computes it (:mod:`cactus_theory.verify.node`).
    """

    def __init__(self, divergence: str | Divergence = "kl", log: TokenLog | None = None) -> None:
        self.divergence, self.log = read_divergence(divergence), log
        self.waiting: list[tuple[Node, Emitted | None]] = []
        self.rows = 0
        self.total = self.largest = self.expected = self.off_head = 0.0
        self.directions = np.zeros(3)

    def add(self, nodes: Sequence[Node], emitted: Sequence[Emitted] | None = None) -> None:
        """Measure nodes, on a device some time before :meth:`sums` returns.

        ``emitted`` are the tokens that came from them (None: there is no log).
        """
        pairs = list(zip(nodes, emitted or [None] * len(nodes), strict=True))
        if not isinstance(nodes[0].q, Tensor):
            return self._enter(pairs)
        self.waiting += [(node.copy(), token) for node, token in pairs]
        if sum(len(node.q) for node, _ in self.waiting) >= WAITING_ENTRIES:
            self._enter_waiting()

    def sums(self) -> tuple[int, float]:
        """Return the number of measured rows and their summed divergence; rows wait for this."""
        self._enter_waiting()
        return self.rows, self.total

    def take(self, other: "Meter") -> None:
        """Add what another meter has measured, whose rows wait for this."""
        rows, spent = other.sums()
        self.rows, self.total = self.rows + rows, self.total + spent
        self.largest = max(self.largest, other.largest)
        self.expected, self.off_head = (
            self.expected + other.expected,
            self.off_head + other.off_head,
        )
        self.directions += other.directions

    def reading(self, rounds: Mapping[Kind, int], num_tokens: int) -> Reading:
        """Return the sums beside what all rows took."""
        rows, spent = self.sums()
        return Reading(
            rounds,
            num_tokens,
            emitted_divergence=spent,
            largest_row_divergence=self.largest,
            divergence=self.divergence.spec,
            rows=rows,
            expected_accepted=self.expected,
            raised_off_head=self.off_head,
            **dict(zip(DIRECTIONS, self.directions.tolist(), strict=True)),
        )

    def _enter_waiting(self) -> None:
        waiting, self.waiting = self.waiting, []
        self._enter(waiting)

    @one_thread()
    def _enter(self, pairs: Sequence[tuple[Node, Emitted | None]]) -> None:
        charge_nodes([node for node, _ in pairs], self.divergence)
        for node, emitted in pairs:
            spent, accepted, raised = node.charge(self.divergence)
            self.rows += node.drafted or node.is_written
            self.total += spent
            self.largest = max(self.largest, spent)
            self.expected += accepted
            self.off_head += raised
            self.directions += node.directions
            if self.log is not None and emitted is not None:
                self.log.enter(node, spent, emitted)
