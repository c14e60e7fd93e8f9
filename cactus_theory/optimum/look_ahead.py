r"""The best law of a block of a deterministic draft: :math:`h ∝ q e^{N/ν}`, N accepted tokens.

A deterministic draft (greedy, n-gram) is a function of the text before it, so that what follows a
token is known, and what it is worth is, too: at a price ν of KL, in tokens per nat, every token
that is accepted raises a block's weight by e^{1/ν} (THEORY.md, Theorem 14), in logarithms here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class LookAhead:
    """The best law at a price, in tokens per nat: h is proportional to q off drafted tokens."""

    price: float
    # least q_n of a raised token, as a share of the likeliest token's probability
    head: float = 0.0

    def path(
        self,
        q_n: Float[Tensor, "batch K"],
        counts: Int[Tensor, "batch"],
        most: Float[Tensor, "batch K"] | None = None,
    ) -> Float[Tensor, "batch K"]:
        r"""Return :math:`h_n = q_n z/(1 − q_n + q_n z)` of drafted tokens, z what follows each.

        Backwards, z = e^{1/ν} after the last token and before a token e^{1/ν}(1 − q_n + q_n z).
        Off the ``head``, where q_n < head · ``most`` (max q), h_n = q_n and before the token
        z is e^{1/ν} z^{q_n}. Entries beyond ``counts`` are not read.
        """
        q_n = q_n.clamp(0.0, 1.0)  # a row may round to an ulp above 1; entries below 0 are refused
        odds = q_n.log() - (-q_n).log1p()
        unit, width = 1 / self.price, q_n.shape[1]
        follows = torch.full_like(q_n[:, 0], unit) if width else q_n.sum(-1)
        raised = torch.zeros_like(q_n)
        for place in range(width - 1, -1, -1):
            follows = torch.where(counts == place + 1, unit, follows)
            raised[:, place] = (odds[:, place] + follows).sigmoid()
            none, one = (-q_n[:, place]).log1p(), q_n[:, place].log()
            before = torch.logaddexp(none, one + follows)
            if most is not None:
                off = q_n[:, place] < self.head * most[:, place]
                before = torch.where(off, q_n[:, place] * follows, before)
                raised[:, place] = torch.where(off, q_n[:, place], raised[:, place])
            follows = unit + before
        return raised

    def tree(self, q_n: Sequence[float], children: Sequence[Sequence[int]]) -> list[float]:
        r"""Return :math:`h_n = q_n e^{1/ν} z_n/z` of the tokens of a deterministic tree.

        Node 0 is the text, node n + 1 follows token n, and ``children`` are the deterministic
        tokens after each node, none where another one was sampled; tokens that are no node's are
        not read. z of a node is 1 − Σ q_n + e^{1/ν} Σ q_n z_n over its children, 1 without any.
        Nothing with a ``head``: then trees are followed node by node.
        """
        if self.head:
            return []
        follows, raised = [0.0] * len(children), [0.0] * len(q_n)
        for node in range(len(children) - 1, -1, -1):
            places = [place for place in children[node] if q_n[place] > 0]
            if not places:
                continue
            rest = 1 - math.fsum(q_n[place] for place in places)
            worths = [1 / self.price + math.log(q_n[at]) + follows[at + 1] for at in places]
            terms = [*worths, math.log(rest)] if rest > 0 else worths
            most = max(terms)
            follows[node] = most + math.log(math.fsum(math.exp(term - most) for term in terms))
            for place, worth in zip(places, worths, strict=True):
                raised[place] = math.exp(worth - follows[node])
        return raised


def with_raised(
    q: Float[Tensor, "*batch vocab"],
    p: Float[Tensor, "*batch vocab"],
    raised: Float[Tensor, "*batch"],
) -> Float[Tensor, "*batch vocab"]:
    """Return rows with mass ``raised`` on the tokens of p, shared as in p, the rest as in q."""
    drafted, mass = p > 0, raised[..., None]
    rest = q.masked_fill(drafted, 0.0)
    total = rest.sum(-1, keepdim=True)
    scale = torch.where(total > 0, (1 - mass) / torch.where(total > 0, total, 1.0), 0.0)
    return torch.where(drafted, p * mass, rest * scale)
