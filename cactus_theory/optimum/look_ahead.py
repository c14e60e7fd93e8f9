r"""The best law of a deterministically drafted block: :math:`h ∝ q e^{N/ν}` for N accepted tokens.

A deterministic draft (greedy, n-gram) is a function of the text before it, so that the tokens
drafted after each token are known in advance. At a price ν of KL, in tokens per nat, the best law
weights a text by its q, times e^{1/ν} for every accepted token (THEORY.md, Theorem 14; Theorem 26
for tokens that keep their probability). Weights are stored as logarithms. The policy ``band`` uses
this law.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.base.tolerances import LEAST
from cactus_theory.optimum.band_row import AheadRow, NodeRow, Row
from cactus_theory.optimum.boxes import NO_BOXES, Boxes

# One backward pass over a path, without a search. The law of a block is q's law with each text
# weighted by e^{1/ν} for every accepted token. All that a row needs of later rows is z, the mean
# weight of the text after its drafted token n:
# 1. After the last token nothing is drafted; accepting this token weighs e^{1/ν}, so ln z = 1/ν.
# 2. In a row only mass m may move. Token n shares m with the others by the odds q_n z to m − q_n:
#    h_n = m sigmoid(ln q_n − ln(m − q_n) + ln z).
# 3. The row's mean weight ((m − q_n + q_n z)/m)^m, times e^{1/ν}, is z for the token before.
# 4. A token that may not rise keeps q_n, the probability of a text to go through it: z^{q_n}.
# The pass ends after K steps. By the chain rule of KL a block's E N − ν KL is a sum over its rows.
# Each row is optimal given the later rows, so the law of the path is the best law (Theorem 14).


@dataclass(frozen=True)
class LookAhead:
    """The best law of blocks at a price, in tokens per nat, for rows with boxes.

    h is proportional to q except at drafted tokens and at tokens whose boxes forbid a fall.
    """

    price: float
    boxes: Boxes = NO_BOXES

    def path(
        self,
        q: Float[Tensor, "batch K vocab"],
        ids: Int[Tensor, "batch K"],
        counts: Int[Tensor, "batch"],
        worth: Float[Tensor, "batch K1"] | None = None,
    ) -> Float[Tensor, "batch K"]:
        r"""Return the emitted probability h_n of each drafted token n under the best law.

        :math:`h_n = m q_n z/(m − q_n + q_n z)`, with z the mean weight of the text after n and m
        the mass that may move: that of n and of all tokens that may fall. z is computed backwards:
        e^{1/ν} after the last token, and before a token e^{1/ν} ((m − q_n + q_n z)/m)^m. If n may
        not rise (held, or off the head), h_n = q_n, and for the token before n, z is
        e^{1/ν} z^{q_n}. Entries beyond ``counts`` have no meaning. With a tilt, z is also
        multiplied by e^``worth`` of each row, the bonus token's included (Theorem 29;
        :func:`cactus_theory.policies.tilt.worth_of_rows`).
        """
        # a row may round to an ulp above 1; entries below 0 are refused
        q_n = q.gather(-1, ids[..., None])[..., 0].double().clamp(0.0, 1.0)
        fixed, mass = self._fixed(q, ids, q_n)
        log_rest, log_q_n = (mass - q_n).clamp(min=0.0).log(), q_n.log()
        unit, width = 1 / self.price, q_n.shape[1]
        row_worth = q.new_zeros(len(q), width + 1) if worth is None else worth
        log_z = q_n.new_full((len(q_n),), unit)  # reaches only entries beyond ``counts``
        raised = torch.zeros_like(q_n)
        for place in range(width - 1, -1, -1):
            # the row after a path's last token is that of the bonus token
            log_z = torch.where(counts == place + 1, unit + row_worth[:, place + 1], log_z)
            log_others, log_drafted, m = log_rest[:, place], log_q_n[:, place], mass[:, place]
            h_n = m * (log_drafted - log_others + log_z).sigmoid()
            log_mean = m * (torch.logaddexp(log_others, log_drafted + log_z) - m.log())
            stays = q_n[:, place]
            raised[:, place] = torch.where(fixed[:, place], stays, h_n)
            log_mean = torch.where(fixed[:, place], stays * log_z, log_mean)
            log_z = unit + row_worth[:, place] + log_mean
        return raised

    def _fixed(self, q: Tensor, ids: Tensor, q_n: Tensor) -> tuple[Tensor, Tensor]:
        """Return whether each drafted token may not rise, and the mass m that may move."""
        fixed, mass = torch.zeros_like(q_n, dtype=torch.bool), torch.ones_like(q_n)
        self.boxes.check(q.shape[-1])
        for token in self.boxes.ids:  # they must not fall; where one was drafted, its mass is in m
            mass = torch.where(ids == token, mass, mass - q[..., token].double())
            fixed = fixed | ((ids == token) & (token in self.boxes.held))
        if self.boxes.head:  # tokens off the head may not rise
            fixed = fixed | (q_n < self.boxes.head * q.amax(-1).double())
        return fixed, mass.clamp(min=LEAST)

    def law(
        self,
        q: Float[Tensor, "*batch vocab"],
        p: Float[Tensor, "*batch vocab"],
        raised: Float[Tensor, "*batch"],
    ) -> Float[Tensor, "*batch vocab"]:
        """Return rows with mass ``raised`` on tokens of p, divided as in p, and the rest as in q.

        Tokens that must not fall keep their q, unless p gives them mass.
        """
        drafted, mass = p > 0, raised[..., None]
        stays = torch.zeros_like(drafted)
        stays[..., list(self.boxes.ids)] = True
        stays = stays & ~drafted
        left = 1 - mass - torch.where(stays, q, 0.0).sum(-1, keepdim=True)
        rest = q.masked_fill(drafted | stays, 0.0)
        total = rest.sum(-1, keepdim=True)
        scale = torch.where(total > 0, left / torch.where(total > 0, total, 1.0), 0.0)
        return torch.where(drafted, p * mass, torch.where(stays, q, rest * scale))

    def row(self, q: Row, token: int, raised: float, alive: float) -> NodeRow | None:
        """Return the compiled row, h = ``raised`` at ``token``; None if ``law`` must write it."""
        return AheadRow(q, token, raised, alive, self.boxes)
