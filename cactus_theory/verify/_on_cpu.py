"""The law of drafted paths on a CPU, asked only where a coin asks.

A path answers whether a coin passes at one of its nodes, and what residual is drawn from there. A
chain asks forwards up to the first coin that does not pass, a block backwards for the last one
that does. Drafted entries answer most coins (:meth:`Policy.bounds`); where they do not, a policy
answers for one row as far as the coin needs (:meth:`Policy.row`), or else for all paths that wait
there, by its row h or by φ and g.

In a tree a path is a run of sampled tokens. Beside tokens that are deterministic h is that of their
selection law. The token drawn at the end of a run may be a child, and the walk goes on from it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.base.tolerances import DECIDED, LEAST
from cactus_theory.optimum.rows import NodeRow
from cactus_theory.optimum.selection import offered
from cactus_theory.policies import Policy
from cactus_theory.policies._decisions import PathState
from cactus_theory.policies._policy import one_hot
from cactus_theory.verify._residual import Residual
from cactus_theory.verify._runs import Index, Place, Run
from cactus_theory.verify.draft import Assignment, Draft
from cactus_theory.verify.draw import NO_TOKEN

# P h_n/p_n of some nodes, or φ, and what gives the residuals at entries of them
Answers = tuple[list[float], Callable[[list[int]], Tensor]]
# most entries of whole rows in one call: few calls on short rows, views of long ones
ENTRIES = 2**15


class Law:
    """The law of the verdicts on a batch of runs; a subclass walks it, forwards or backwards.

    ``q_n``, ``p_n`` (runs, K) float64 are entries of the drafted tokens; p_n is 1 for deterministic
    drafts. Of trees p is given, and not read where nothing is sampled. ``raised`` are the h_n of
    deterministic drafts, NaN where a policy does not look ahead.
    """

    in_blocks = False
    raised: Float[Tensor, "batch K"] | None = None

    def __init__(
        self,
        assigned: Assignment,
        q: Float[Tensor, "texts nodes vocab"],
        p: Float[Tensor, "texts rows vocab"] | None,
        draft: Draft,
        runs: Sequence[Run],
        index: Index,
    ) -> None:
        if p is not None and p.dtype != q.dtype:
            dtype = torch.promote_types(q.dtype, p.dtype)
            q, p = q.to(dtype), p.to(dtype)
        self.assigned, self.q, self.p, self.draft, self.runs = assigned, q, p, draft, runs
        self.index = index
        self.choice = None if assigned.choice is None else assigned.choice.tolist()
        self._q, self._p = _readable(q), None if p is None else _readable(p)
        q_n = _entries(self._q, index)
        p_n = np.ones_like(q_n) if self._p is None else _entries(self._p, index)
        self.q_n, self.p_n = torch.from_numpy(q_n), torch.from_numpy(p_n)
        entries = enumerate(zip(runs, q_n.tolist(), p_n.tolist(), strict=True))
        for number, (run, run.q_n, run.p_n) in entries:
            run.number = number
        if math.isnan(np.vdot(q_n, p_n)):
            for run, lawless in zip(runs, np.isnan(q_n + p_n), strict=True):
                if lawless[: run.count].any():
                    run.count, run.cut = int(lawless.argmax()), True

    def number(self, run: Run, place: int) -> int:
        return 0 if self.choice is None else self.choice[run.row][run.nodes[place]]

    def policy(self, run: Run, place: int) -> Policy:
        return self.assigned.policies[self.number(run, place)]

    def chosen(self, by_policy: Sequence[Tensor]) -> Shaped[Tensor, "runs K"]:
        """Return each token's entry by the policy that judges it, from entries by policy."""
        if self.assigned.choice is None:
            return by_policy[0]
        choice = self.assigned.choice[self.index[:2]][None]
        return torch.stack(list(by_policy)).gather(0, choice)[0]

    def rows(self, run: Run, place: int) -> tuple[np.ndarray, np.ndarray]:
        """Return q and p of a node, in one precision: float32 for half precision."""
        at = run.row, run.nodes[place]
        q = _row(self._q, at)
        if self._p is not None:
            return q, _row(self._p, at)
        p = np.zeros_like(q)
        p[run.ids[place]] = 1.0
        return q, p

    def exceeded(self, places: Sequence[Place], shares: Sequence[float]) -> list[bool]:
        """Return whether P h_n/p_n exceeds these shares of 1 at nodes; if not, they are solved.

        A share is the coin in a chain (of tokens that ``Chains.judge`` left open), 1 in a block, ∞
        where only what is left is asked for. The band sees r = share × p_n/q_n (Theorem 15). Of
        solved nodes ``residuals`` has (P h − p)₊. ``ratio`` is P h_n/p_n or 1 for a share of 1.
        """
        exceeded, together = [False] * len(places), {}
        for entry, ((run, place), share) in enumerate(zip(places, shares, strict=True)):
            number, token = self.number(run, place), run.ids[place]
            (q, p), q_n, p_n = self.rows(run, place), run.q_n[place], run.p_n[place]
            if self.raised is not None and self.assigned.policies[number].look_ahead is not None:
                run.residuals[place] = self._residual_ahead(run, place, q, p)
                continue
            fixed = run.deterministic.get(place, ())
            offers = offered(q, p, fixed) if fixed else p
            row = self.assigned.policies[number].row(q, offers, run.alive[place])
            if row is None:
                together.setdefault(number, []).append(entry)
                continue
            if fixed:
                row.upper_exceeds(math.inf)
                h_n = row.raised(token, q_n, offers[token]) * q_n
                run.ratio = h_n / p_n if p_n > 0 else math.inf if h_n > 0 else 0.0
                exceeded[entry] = share < run.ratio
            elif row.exceeds(token, share * p_n / q_n if q_n >= LEAST else math.inf):
                exceeded[entry], run.ratio = True, 1.0
            elif share == 1:
                run.ratio = row.ratio_of(token, q_n, p_n)
            if not exceeded[entry]:
                run.residuals[place] = _residual(row, q, p, offers, fixed)
        at_once = max(1, ENTRIES // self.q.shape[-1])
        for number, entries in together.items():
            for first in range(0, len(entries), at_once):
                some = entries[first : first + at_once]
                own = [places[entry] for entry in some]
                ratios, residuals = self._ask(self.assigned.policies[number], own)
                for entry, (run, _), run.ratio in zip(some, own, ratios, strict=True):
                    exceeded[entry] = shares[entry] < run.ratio
                if below := [at for at, entry in enumerate(some) if not exceeded[entry]]:
                    for at, row in zip(below, residuals(below).numpy(), strict=True):
                        run, place = own[at]
                        run.residuals[place] = Residual(row)
        return exceeded

    def _residual_ahead(self, run: Run, place: int, q: np.ndarray, p: np.ndarray) -> Residual:
        """Return the rest where the policy looked ahead: q is scaled but at the boxes."""
        look_ahead, token = self.policy(run, place).look_ahead, run.ids[place]
        assert look_ahead is not None
        fixed = {other: float(q[other]) for other in look_ahead.boxes.ids if other != token}
        whole, alive = 1 - math.fsum(fixed.values()), run.alive[place]
        rest = whole - run.q_n[place]
        scale = alive * (whole - run.low[place]) / rest if rest > 0 else 0.0
        return Residual(q, p, scale, dict.fromkeys(fixed, alive))

    def _ask(self, policy: Policy, places: Sequence[Place]) -> Answers:
        """Ask a policy for its rows h at nodes: for P h_n/p_n, and for (P h − p)₊ of some."""
        q, p, ids = self._together(places)
        q, p = check.normalised(q), check.normalised(p)  # as h sums to 1
        mass = self._masses(policy, places, q, p)
        ratios = mass.gather(-1, ids).double() / p.gather(-1, ids)
        return (
            ratios.nan_to_num(nan=0.0)[:, 0].tolist(),
            lambda some: (mass[some].double() - p[some]).clamp_(min=0.0),
        )

    def _masses(self, policy: Policy, places: Sequence[Place], q: Tensor, p: Tensor) -> Tensor:
        """Return P h at nodes, written out; of the selection law where tokens are deterministic."""
        if any(place in run.deterministic for run, place in places):
            p = p.clone()  # the residual is over p itself
            for (run, place), q_row, offers in zip(places, q, p, strict=True):
                if place in run.deterministic:
                    offers[:] = self.draft.offers(run.row, run.nodes[place], q_row)
        alive = [run.alive[at] for run, at in places] if self.in_blocks else [1.0]
        path = PathState(torch.tensor(alive, dtype=torch.float64, device="cpu"))
        h = policy.target(q, p, path if self.in_blocks else None)
        assert h is not None  # check() has seen the policy
        return path.alive[:, None] * h.detach() if self.in_blocks else h.detach()

    def _together(self, places: Sequence[Place]) -> tuple[Tensor, Tensor, Int[Tensor, "rows 1"]]:
        """Return q, p and the drafted tokens of nodes: views of one, else copies."""
        texts, nodes = zip(*((run.row, run.nodes[place]) for run, place in places), strict=True)
        at: Any = texts[0], slice(nodes[0], nodes[0] + 1)
        if len(places) > 1:
            at = torch.tensor(texts, device="cpu"), torch.tensor(nodes, device="cpu")
        ids = torch.tensor([[run.ids[place]] for run, place in places], device="cpu")
        q = self.q[at]
        return q, one_hot(ids[:, 0], q) if self.p is None else self.p[at], ids

    def end(self, run: Run) -> None:
        """End a run after its accepted tokens, with one from the residual (P h − p)₊ there.

        Where rounding leaves nothing, and where nothing is drafted, it is drawn from q; NaN is no
        rounding.
        """
        if (place := run.accepted) == run.count:
            if not run.cut:
                run.last = self._whole(run).draw(run.draw)
            return
        residual = run.residuals[place]
        run.last = residual.draw(run.draw)
        if run.last == NO_TOKEN and residual.mass <= 0:
            run.last = Residual(_row(self._q, (run.row, run.nodes[place]))).draw(run.draw)

    def _whole(self, run: Run) -> Residual:
        """Return h after a whole run up to a factor: q, where nothing is deterministic."""
        place = run.count
        at, fixed = (run.row, run.nodes[place]), run.deterministic.get(place)
        q = _row(self._q, at)
        if not fixed:
            return Residual(q)
        policy, offers = self.policy(run, place), offered(q, None, fixed)
        if (row := policy.row(q, offers, run.alive[place])) is None:
            rows = check.normalised(self.q[run.row, at[1] : at[1] + 1])
            return Residual(self._masses(policy, [(run, place)], rows, rows)[0].double().numpy())
        row.upper_exceeds(math.inf)
        return _residual(row, q, None, offers, fixed)

    def accepted_and_last(self) -> tuple[Int[Tensor, "batch"], Int[Tensor, "batch"]]:
        """Return the accepted count of each run and the token after it, both (B,)."""
        accepted = np.array([run.accepted for run in self.runs], np.int64)
        last = np.array([run.last for run in self.runs], np.int64)
        return torch.from_numpy(accepted), torch.from_numpy(last)


def _residual(
    row: NodeRow, q: np.ndarray, p: np.ndarray | None, offers: np.ndarray, fixed: Sequence[int]
) -> Residual:
    """Return the rest of a solved row, at deterministic tokens by their selection law."""
    levels = {token: row.raised(token, q[token], offers[token]) for token in fixed}
    return Residual(q, p, row.left, row.levels | levels)


def _readable(rows: Tensor) -> np.ndarray | Tensor:
    """Return rows as numpy's, where it has their precision."""
    return rows.detach().numpy() if rows.dtype in DECIDED else rows.detach()


def _row(rows: np.ndarray | Tensor, at: tuple[int, int]) -> np.ndarray:
    row = rows[at]
    return row if isinstance(row, np.ndarray) else row.float().numpy()


def _entries(rows: np.ndarray | Tensor, index: Index) -> Float[np.ndarray, "runs K"]:
    if isinstance(rows, np.ndarray):
        return rows[index].astype(np.float64, copy=False)
    return rows[tuple(map(torch.from_numpy, index))].double().numpy()
