"""The laws emitted at rows that a verifier has reached, and their charges.

The lazy law of a path answers coins (:mod:`cactus_theory.verify._on_cpu`); this is the same law for
whoever measures: meters, ledgers, replays and schedules. On a CPU a policy's row is solved and
measured by compiled loops, and h is written only where a policy has no row, or somebody asks.
"""

import math
from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.base.arguments import normalised
from cactus_theory.base.tolerances import DECIDED
from cactus_theory.divergences import Divergence
from cactus_theory.emitted import raised_off_head
from cactus_theory.optimum.bands import Charge, charge_of
from cactus_theory.optimum.rows import NodeRow, loops
from cactus_theory.policies import FixedTarget, PerProposal, Policy
from cactus_theory.policies._decisions import PathState
from cactus_theory.policies.raised import Speculative

Rows = Float[Tensor, "rows vocab"]
PerRow = Float[Tensor, "rows"]
# most entries of laws that are written before they are measured: they stay near the core
ENTRIES = 2**15


class Emitted:
    """The laws h of the next token at rows (R, V) that one policy judges, solved when asked.

    ``path`` is how the rows were reached. ``law`` makes h, float64, of float64 rows that sum to 1
    and their paths; it need not be asked where h is the policy's own row at the node,
    ``of_policy``.
    """

    def __init__(
        self,
        policy: Policy,
        q: Rows,
        p: Rows,
        path: PathState,
        law: Callable[[Rows, Rows, PathState], Rows | None],
        of_policy: bool = False,
    ) -> None:
        self.policy, self.q, self.p, self.path = policy, q.detach(), p.detach(), path
        self._law, self.of_policy = law, of_policy

    @cached_property
    def target(self) -> Rows:
        return normalised(self.q)

    @cached_property
    def draft(self) -> Rows:
        return normalised(self.p)

    @cached_property
    def laws(self) -> Rows:
        """Return h, float64 (R, V): the target's own rows where the policy returns these."""
        law = self._law(self.target, self.draft, self.path)
        assert law is not None  # check() has seen the policy
        return law

    @cached_property
    def alive(self) -> list[float]:
        """Return P by row; a row that is reached with P = 0 never occurs, and has P = 1."""
        return [ratio or 1.0 for ratio in self.path.alive.tolist()]

    @cached_property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return q and p for compiled loops, in one precision; None where these do not walk."""
        if self.q.is_cuda or loops() is None:
            return None
        dtype = torch.promote_types(self.q.dtype, self.p.dtype)
        dtype = dtype if dtype in DECIDED else torch.float32
        q, p = (rows.to(dtype).numpy() for rows in (self.q, self.p))  # each row lies as it is
        return q, p

    @cached_property
    def _rows(self) -> list[NodeRow] | None:
        """Return the solved rows of a policy that answers row by row; lossless h is q as it is."""
        if self._arrays is None or not self.of_policy or self.path.raised is not None:
            return None
        if isinstance(self.policy, Speculative):
            return None
        rows = []
        for q, p, alive in zip(*self._arrays, self.alive, strict=True):
            if (row := self.policy.row(q, p, alive)) is None:
                return None
            row.upper_exceeds(math.inf)
            rows.append(row)
        return rows

    def charges(self, divergence: Divergence) -> Charge:
        """Return the charge of each row; where h is written, few rows at a time."""
        f, size = divergence.generator, max(1, ENTRIES // self.q.shape[-1])
        if self._arrays is not None and self._rows is None and len(self.q) > size:
            slices = (slice(at, at + size) for at in range(0, len(self.q), size))
            parts = (self._part(at).charges(divergence) for at in slices)
            return Charge(*map(torch.cat, zip(*parts, strict=True)))
        if self._arrays is None or f is None or not len(self.q):
            return self._charges_of_laws(divergence)
        rows = self.laws.numpy() if self._rows is None else self._rows
        own = [
            charge_of(f, q, p, alive, row)
            for q, p, alive, row in zip(*self._arrays, self.alive, rows, strict=True)
        ]
        spent, accepted, raised = torch.tensor(own, dtype=torch.float64, device="cpu").unbind(-1)
        if self._rows is None:
            accepted = self._accepted(accepted)
            if self.laws is self.target:  # seen, not claimed: exactly 0
                return Charge(torch.zeros_like(spent), accepted, torch.zeros_like(spent))
        return Charge(divergence.from_generator(spent), accepted, raised)

    def _part(self, at: slice) -> "Emitted":
        path = self.path.at(at)
        return Emitted(self.policy, self.q[at], self.p[at], path, self._law, self.of_policy)

    def _accepted(self, overlap: PerRow) -> PerRow:
        """Return Σ min(p, h) where the policy is lossless for what it emits, else Σ p φ."""
        if isinstance(self.policy, FixedTarget | PerProposal):
            return overlap
        return (self.draft * self.policy.acceptance_row(self.target, self.draft)).sum(-1)

    def _charges_of_laws(self, divergence: Divergence) -> Charge:
        ratio = torch.where(self.path.alive > 0, self.path.alive, 1.0).to(self.q.device)
        overlap = torch.minimum(self.draft / ratio[:, None], self.laws).sum(-1)
        accepted = self._accepted(overlap)
        if self.laws is self.target:
            return Charge(torch.zeros_like(overlap), accepted, torch.zeros_like(overlap))
        spent = divergence.value(self.laws, self.target).clamp(min=0.0)
        return Charge(spent, accepted, raised_off_head(self.laws, self.target))

    def at(self, ids: Int[Tensor, "rows"]) -> PerRow:
        """Return h of one token a row, float64."""
        if self._rows is None or self._arrays is None:
            return self.laws.gather(-1, ids[:, None])[:, 0]
        h_n = [
            row.law_at(int(token), q, p)
            for row, token, q, p in zip(self._rows, ids.tolist(), *self._arrays, strict=True)
        ]
        return torch.tensor(h_n, dtype=torch.float64, device="cpu")
