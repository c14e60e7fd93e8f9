"""Lossless sampling towards another row than q: p where p is close to q, or a truncated q."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from cactus_theory.base.tensors import from_numpy, ungraphed
from cactus_theory.base.tolerances import LEAST
from cactus_theory.divergences.definition import known_divergence
from cactus_theory.optimum.band_row import DraftRow, NodeRow, loops
from cactus_theory.optimum.bands import divergences_of
from cactus_theory.policies._base_classes import FixedTarget
from cactus_theory.policies.claims import Budget, Declaration, Support
from cactus_theory.policies.knob_values import (
    Count,
    DivergenceSpec,
    NotNegative,
    PositiveShare,
)
from cactus_theory.policies.policy import (
    Entries,
    PathState,
    Rows,
    accept_probability,
    normalised_or,
)
from cactus_theory.policies.registry import register


@register("fuzzy")
@dataclass(frozen=True)
class Fuzzy(FixedTarget):
    r"""Sample losslessly towards :math:`h = p` where :math:`D(p\|q) < T`, else :math:`h = q`.

    If D is just above T, nothing is gained over lossless sampling. Tokens that the target excludes
    are rejected: where D < T, h is p on the target's support, and the rest of p's mass goes to
    tokens with q > p, in proportion to (q − p)₊. Where D ≥ T the policy is lossless speculative
    sampling, which the source calls the recursive variant. The source's exact variant draws a token
    from q there without testing the drafted token; it emits the same law and accepts less. Source:
    Holsman et al. 2025 (Fuzzy Speculative Decoding, arXiv 2502.20704).

    Parameters
    ----------
    threshold : T ≥ 0, in the divergence's unit; 0 is lossless.
    divergence : spec of the divergence D.
    support : with ``free``, as published, h is p itself, and tokens that the target excludes are
        emitted where the divergence is finite.
    """

    threshold: NotNegative
    divergence: DivergenceSpec = "jensen_shannon"
    support: Support = "target"
    knob = "threshold"

    @property
    def declares(self) -> Declaration:
        """Return: divergence of h from q at most the threshold."""
        budget = Budget(self.divergence, self.threshold, "emitted")
        return Declaration(
            direction=1,
            strict=0.0,
            budget=budget,
            between=True,
            at_least_speculative=True,
            continuous=False,
            support=self.support,
        )

    def bounds(self, q_n: Entries, p_n: Entries) -> tuple[Entries, Entries]:
        """Return bounds on h_n/p_n, min(1, q_n/p_n) and ∞, as h is p or q."""
        return accept_probability(q_n, p_n), torch.full_like(q_n, torch.inf)

    def row(self, q: np.ndarray, p: np.ndarray, alive: float = 1.0) -> NodeRow | None:
        """Return the solver of a node's row h, q or p; None if h = p and p has mass where q = 0."""
        if loops() is None:
            return None
        if not bool(self.takes_draft(*(from_numpy(row) for row in (q, p)))):
            return NodeRow(alive)
        return None if ((q <= LEAST) & (p > 0)).any() else DraftRow(q, p, alive)

    def takes_draft(self, q: Rows, p: Rows) -> Bool[Tensor, "*batch"]:
        """Return for each row whether D(p‖q) is below the threshold, so that p is emitted."""
        p, q = (ungraphed(rows) for rows in (p, q))
        return divergences_of(known_divergence(self.divergence), p, q) < self.threshold

    def target(self, q: Rows, p: Rows, path: PathState | None = None) -> Rows:
        """Return h: q, or p, whose mass where q = 0 goes to (q − p)₊ if ``support`` is target."""
        taken = self.takes_draft(q, p)
        # on a GPU a look at the flags would wait for the device
        if not (taken.is_cuda or bool(taken.any())):
            return q
        drafted = p
        if self.support == "target":
            drafted = torch.where(q > 0, p, 0.0)
            lost = (p - drafted).sum(-1, keepdim=True)
            if lost.is_cuda or bool(lost.any()):
                drafted = drafted + lost * normalised_or((q - p).clamp(min=0.0), q)
        return torch.where(taken[..., None], drafted, q)


@register("truncated")
@dataclass(frozen=True)
class Truncated(FixedTarget):
    r"""Sample losslessly towards q cut to its k likeliest tokens, its nucleus, or both.

    The nucleus is the smallest set of likeliest tokens with mass at least ``top_p``, so
    KL(h‖q) = −ln q(nucleus) ≤ −ln top_p. arXiv 2607.26627 has this policy as a baseline.

    Parameters
    ----------
    top_p : mass of the nucleus; 1 keeps all tokens.
    top_k : k, the number of tokens kept; None keeps all.
    """

    top_p: PositiveShare = 1.0
    top_k: Count | None = None

    @property
    def declares(self) -> Declaration:
        """Return: KL of h from q at most −ln top_p if top_k is not given."""
        budget = Budget("kl", -math.log(self.top_p), "emitted") if self.top_k is None else None
        strict = 1.0 if self.top_k is None else None
        return Declaration(strict=strict, budget=budget, continuous=False)

    def target(self, q: Rows, p: Rows, path: PathState | None = None) -> Rows:
        """Return the truncated q, renormalised; ties at the cut go to the smaller index."""
        if self.top_p == 1 and self.top_k is None:
            return q
        ranked, order = q.sort(dim=-1, descending=True, stable=True)
        before = ranked.cumsum(-1) - ranked  # mass of the likelier tokens
        kept = (before < self.top_p) & (ranked > 0)
        if self.top_k is not None:
            kept[..., self.top_k :] = False
        chosen = torch.zeros_like(kept).scatter(-1, order, kept)
        return normalised_or(torch.where(chosen, q, 0.0), q)

    def undrafted(self, q: Rows) -> Rows:
        """Return the truncated q, as for drafted tokens."""
        return self.target(q, q)
