"""The meter of a decode: add up the divergence of the emitted laws from the target's rows.

After each round the decode loop passes the nodes at which tokens were emitted to a :class:`Meter`.
The meter also writes the charge of each new token into a :class:`TokenLog`.
"""

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

# number of a text in the batch, number of its new tokens before this token, id of this token
Emitted = tuple[int, int, int]
# entries of q that are collected on a device before they are measured: measuring rows one by one
# would launch many small kernels
WAITING_ENTRIES = 2**19


class TokenLog:
    """Charges and log-probabilities (B, room) of new tokens, and directions (B, 3) of texts.

    ``room`` is the most new tokens of a text; ``directions`` are the sums of entropy, surprise and
    agreement over each text (:class:`Reading`). Charges are 0 and log-probabilities NaN where no
    token was entered.
    """

    def __init__(self, batch: int, room: int, log_probs: bool) -> None:
        self.has_log_probs = log_probs
        self.charges = np.zeros((batch, room))
        self.directions = np.zeros((batch, len(DIRECTIONS)))
        self.target, self.emitted = np.full((2, batch, room), np.nan)

    def enter(self, node: Node, spent: float, emitted: Emitted) -> None:
        """Record an emitted token: charge, directions and, if the log keeps them, ln q and ln h."""
        number, place, token = emitted
        self.charges[number, place] = spent
        self.directions[number] += node.directions
        if self.has_log_probs:
            with np.errstate(divide="ignore"):  # a user's rule may emit a token with q = 0
                self.target[number, place] = np.log(float(node.target[token]))
                self.emitted[number, place] = np.log(node.h(token))

    def costs(self, width: int) -> Float[Tensor, "batch width"]:
        """Return the charges of the first ``width`` tokens of every text, in the meter's unit."""
        return torch.from_numpy(self.charges[:, :width].copy())

    def log_probs(self, width: int) -> LogProbs | None:
        """Return ln q and ln h of the first ``width`` tokens of every text; None if not kept."""
        if not self.has_log_probs:
            return None
        columns = (torch.from_numpy(logs[:, :width].copy()) for logs in (self.target, self.emitted))
        return LogProbs(*columns)


class Meter:
    """Sum of D(h‖q) over the nodes where tokens were emitted.

    h is the exact emitted law of the policy at the node. In a block, h depends on the probability P
    with which the node was reached; D(h‖q) is not multiplied by P. By the chain rule of KL, the
    expected sum is an upper bound of the KL of whole texts from the target (THEORY.md, Theorem 11).
    ``Node.charge`` computes D(h‖q) (:mod:`cactus_theory.verify.node`).
    """

    def __init__(self, divergence: str | Divergence = "kl", log: TokenLog | None = None) -> None:
        self.divergence, self.log = read_divergence(divergence), log
        self.waiting: list[tuple[Node, Emitted | None]] = []
        self.rows = 0
        # sum and largest of D(h‖q); sums of the acceptance and of ``emitted.raised_off_head``
        self.total = self.largest = self.expected = self.off_head = 0.0
        self.directions = np.zeros(3)

    def add(self, nodes: Sequence[Node], emitted: Sequence[Emitted] | None = None) -> None:
        """Add the charges of nodes; nodes on a device are collected and measured later.

        ``emitted`` are the tokens emitted at the nodes, for the log; None without a log.
        :meth:`sums` measures all collected nodes.
        """
        pairs = list(zip(nodes, emitted or [None] * len(nodes), strict=True))
        if not isinstance(nodes[0].q, Tensor):
            return self._enter(pairs)
        self.waiting += [(node.copy(), token) for node, token in pairs]
        if sum(len(node.q) for node, _ in self.waiting) >= WAITING_ENTRIES:
            self._enter_waiting()

    def sums(self) -> tuple[int, float]:
        """Measure the collected nodes; return the number of measured rows and the sum of D(h‖q)."""
        self._enter_waiting()
        return self.rows, self.total

    def take(self, other: "Meter") -> None:
        """Add the sums of another meter, after measuring the nodes that the other has collected."""
        rows, spent = other.sums()
        self.rows, self.total = self.rows + rows, self.total + spent
        self.largest = max(self.largest, other.largest)
        self.expected += other.expected
        self.off_head += other.off_head
        self.directions += other.directions

    def reading(self, rounds: Mapping[Kind, int], num_tokens: int) -> Reading:
        """Return the meter's sums together with the counts of rounds and tokens."""
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
        """Measure nodes together, add their charges to the sums, and log the emitted tokens."""
        charge_nodes([node for node, _ in pairs], self.divergence)
        for node, emitted in pairs:
            spent, accepted, raised = node.charge(self.divergence)
            self.rows += node.drafted or node.is_written  # not q of an undrafted token
            self.total += spent
            self.largest = max(self.largest, spent)
            self.expected += accepted
            self.off_head += raised
            self.directions += node.directions
            if self.log is not None and emitted is not None:
                self.log.enter(node, spent, emitted)
