"""Verification of a batch on a CPU: rows are read where a decision needs them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.base.reused_memory import scratch
from cactus_theory.base.tolerances import DECIDED
from cactus_theory.optimum.rows import loops
from cactus_theory.policies import Policy
from cactus_theory.policies._decisions import UNSCALED, Node, Path
from cactus_theory.policies._policy import one_hot
from cactus_theory.policies._shortcuts import ByRow
from cactus_theory.verify.draft import Assignment, Draft
from cactus_theory.verify.draw import BLOCKED_FROM, NO_TOKEN, pick, pick_one

# (P h − p)₊ of a node: a row, or the scale s of (s q − p)₊ and that at deterministic tokens
Left = Tensor | tuple[float, float | None]
# indices of entries of rows: of the batch, of nodes, of tokens
Index = tuple[np.ndarray, np.ndarray, np.ndarray]

# most entries of whole rows in one call: few calls on short rows, and views instead of copies of
# long rows
ENTRIES = 2**15
# least number of rows that are faster together than one by one
MANY = 12


class Run:
    """Drafted tokens of one text, each after the one before: a chain, or a path down a tree.

    Token i follows node ``nodes[i]`` and leads to the next one; ``row`` is that of the batch.
    ``deterministic`` has by place i the ids that are deterministic there, where they matter to h,
    and ``ahead`` the h_n of those at the last node, where the policy looked ahead. ``draw`` draws
    the token that ends the run.

    ``count`` is how many tokens have a law to judge them by, ``cut`` whether the next one has none:
    its row of probabilities is NaN there, and the path ends before it. NaN that is elsewhere shows
    where a row is drawn from. ``accepted`` and ``last`` are how many tokens are accepted and the
    one that follows them, as far as they are known.
    """

    deterministic: Mapping[int, Sequence[int]] = MappingProxyType({})
    ahead: Mapping[int, float] = MappingProxyType({})
    cut = False
    accepted = 0
    last = NO_TOKEN
    # index among the runs, and the entries of q and p at the tokens
    number: int
    q_n: list[float]
    p_n: list[float]
    # bounds on h_n/p_n of the tokens, in blocks
    low: list[float]
    high: list[float]
    # P h_n/p_n at the last node that was followed
    ratio: float

    def __init__(
        self,
        row: int,
        nodes: Sequence[int],
        draw: float,
        ids: Sequence[int] = (),
        coins: Sequence[float] = (),
    ) -> None:
        self.row, self.nodes, self.draw, self.ids, self.coins = row, nodes, draw, ids, coins
        self.count = len(nodes) - 1
        self.alive = [1.0]  # P at the nodes, as far as it is known
        self.left: dict[int, Left] = {}  # (P h − p)₊ where the run may end, once known

    def advance(self) -> bool:
        """Follow P from token to token as far as entries suffice; return whether a row is needed.

        A ratio of 0 stays 0: such a path is not followed any further.
        """
        alive, low, high = self.alive, self.low, self.high
        while alive[-1] and (place := len(alive) - 1) < self.count:
            least, most = alive[-1] * low[place], alive[-1] * high[place]
            if least >= 1 or least == most:
                alive.append(min(1.0, least))
            else:
                return self.cut or self._may_pass(place)
        return False

    def _may_pass(self, place: int) -> bool:
        """Return whether any coin from this drafted token on could pass."""
        most = self.alive[-1]
        for later in range(place, self.count):
            most = min(1.0, most * self.high[later])
            if self.coins[later] < most:
                return True
        return False

    def last_below(self, place: int) -> int:
        """Return the last node up to a place with a coin below P: no other node can pass."""
        while place and self.coins[place - 1] >= self.alive[place]:
            place -= 1
        return place

    def passes(self, place: int, mass: float) -> bool:
        """Return whether the run ends at a node with R = Σ (P h − p)₊ = ``mass``: coin < R/(R+1−P).

        P = 1 does, whatever rounding makes of R: what is below such a node is biased.
        """
        missing = 1 - self.alive[place]
        return not place or not missing or self.coins[place - 1] < mass / (mass + missing)


class Scaled(NamedTuple):
    """The residual (s q − p)₊ of a node, which is walked by compiled loops."""

    loops: Any
    q: np.ndarray
    p: np.ndarray
    scale: float

    @property
    def mass(self) -> float:
        """Return its sum."""
        return self.loops.left_mass(self.q, self.p, self.scale)

    def draw(self, draw: float) -> int:
        """Return the token that a coin draws, NO_TOKEN where nothing is left."""
        return self.loops.draw_left(self.q, self.p, self.scale, draw)


Place = tuple[Run, int]


class Nodes:
    """The nodes of a batch of runs, with h there, its ratios h_n/p_n and its residuals.

    Flags are read on the host. ``q_n``, ``p_n`` (runs, K) float64 are entries of the drafted
    tokens; p_n is 1 for deterministic drafts. Of trees p is given, and not read where nothing is
    sampled. ``raised`` are the h_n of deterministic drafts by policy, ``bonus`` the rows that
    wholly accepted chains end with, if not those of q.
    """

    bonus: Float[Tensor, "batch vocab"] | None = None

    def __init__(
        self,
        assigned: Assignment,
        q: Float[Tensor, "texts nodes vocab"],
        p: Float[Tensor, "texts rows vocab"] | None,
        draft: Draft,
        runs: Sequence[Run],
        index: Index,
    ) -> None:
        self.assigned, self.q, self.p, self.draft, self.runs = assigned, q, p, draft, runs
        self.index = index
        self.choice = None if assigned.choice is None else assigned.choice.tolist()
        self.raised: list[Tensor | None] = [None] * len(assigned.policies)
        q_n = _entries(q, index)
        p_n = np.ones_like(q_n) if p is None else _entries(p, index)
        self.q_n, self.p_n = torch.from_numpy(q_n), torch.from_numpy(p_n)
        entries = enumerate(zip(runs, q_n.tolist(), p_n.tolist(), strict=True))
        for number, (run, run.q_n, run.p_n) in entries:
            run.number = number
        if math.isnan(np.vdot(q_n, p_n)):
            for run, lawless in zip(runs, np.isnan(q_n + p_n), strict=True):
                if lawless[: run.count].any():
                    run.count, run.cut = int(lawless.argmax()), True
        self.at_once = max(1, ENTRIES // q.shape[-1])
        # q and p as numpy rows; None unless both have one precision that numpy has
        self.rows = None
        if p is not None and p.dtype == q.dtype and q.dtype in DECIDED:
            self.rows = q.detach().numpy(), p.detach().numpy()

    def number(self, run: Run, place: int) -> int:
        """Return the number of the policy that judges the tokens after a node."""
        return 0 if self.choice is None else self.choice[run.row][run.nodes[place]]

    def chosen(self, by_policy: Sequence[Tensor]) -> Shaped[Tensor, "runs K"]:
        """Return each token's entry by the policy that judges it, from entries by policy."""
        if self.assigned.choice is None:
            return by_policy[0]
        choice = self.assigned.choice[self.index[:2]][None]
        return torch.stack(list(by_policy)).gather(0, choice)[0]

    def by_policy(self, places: Sequence[Place]) -> Iterator[tuple[int, Sequence[Place]]]:
        """Yield the places of each policy with its number."""
        if self.choice is None:
            yield 0, places
            return
        for number in range(len(self.assigned.policies)):
            yield number, [at for at in places if self.number(*at) == number]

    def chunks(self, places: Sequence[Place]) -> Iterator[Sequence[Place]]:
        """Yield places in chunks of at most ``at_once``."""
        for first in range(0, len(places), self.at_once):
            yield places[first : first + self.at_once]

    def one_by_one(self, count: int) -> bool:
        """Return whether ``count`` rows are faster one by one: few rows, or long ones."""
        return min(count, self.at_once) < MANY

    def draw_each(
        self, runs: Sequence[Run], laws: Sequence[Float[Tensor, "vocab"]] | Tensor
    ) -> None:
        """Draw the token that ends each run."""
        if self.one_by_one(len(runs)):
            for run, law in zip(runs, laws, strict=True):
                run.last = pick_one(law, run.draw)
            return
        draws = torch.tensor([run.draw for run in runs], dtype=torch.float64, device="cpu")
        rows = laws if isinstance(laws, Tensor) else torch.stack(list(laws))
        for run, token in zip(runs, pick(rows, draws).tolist(), strict=True):
            run.last = token

    def policy(self, run: Run, place: int) -> Policy:
        """Return the policy that judges the tokens after a node."""
        return self.assigned.policies[self.number(run, place)]

    def settle(self, places: Sequence[Place]) -> set[Place]:
        """Draw from (P h − p)₊ after the nodes whose coin passes; return the other nodes."""
        places, failed = self._settle_by_loops(places)
        rows = scratch("host.residual", (len(places), self.q.shape[-1]), self.q.dtype)
        passed = []
        for law, (run, place) in zip(rows, places, strict=True):
            self.leave(law, run, place, run.left[place])
            if run.alive[place] == 1 or run.passes(place, float(law.sum())):
                passed.append((run, place, law))
            else:
                failed.add((run, place))
        self.draw_each([run for run, *_ in passed], [law for *_, law in passed])
        for run, place, law in passed:
            self.end_if_empty(run, place, law)
        return failed

    def _settle_by_loops(self, places: Sequence[Place]) -> tuple[list[Place], set[Place]]:
        """Settle nodes whose residual is (s q − p)₊; return the others, and nodes that failed."""
        others, failed = [], set()
        for run, place in places:
            if (row := self.scaled(run, place, run.left[place])) is None:
                others.append((run, place))
            elif run.alive[place] == 1 or run.passes(place, row.mass):
                run.last = row.draw(run.draw)
                if run.last == NO_TOKEN and row.mass <= 0:
                    run.last = pick_one(self.q[run.row, run.nodes[place]], run.draw)
            else:
                failed.add((run, place))
        return others, failed

    def scaled(self, run: Run, place: int, left: Left) -> "Scaled | None":
        """Return (s q − p)₊ of a node to be walked by loops, None if it is another row."""
        compiled = loops()
        if self.rows is None or compiled is None or isinstance(left, Tensor):
            return None
        if run.deterministic.get(place):
            return None
        at = run.row, run.nodes[place]
        return Scaled(compiled, self.rows[0][at], self.rows[1][at], left[0])

    def end_if_empty(self, run: Run, place: int, law: Float[Tensor, "vocab"]) -> None:
        """Draw from q where rounding leaves nothing of (P h − p)₊; NaN is no rounding."""
        if run.last == NO_TOKEN and float(law.max()) <= 0:
            run.last = pick_one(self.q[run.row, run.nodes[place]], run.draw)

    def leave(self, out: Float[Tensor, "vocab"], run: Run, place: int, left: Left) -> None:
        """Write (P h − p)₊ of a node to ``out``."""
        at = run.row, run.nodes[place]
        if isinstance(left, Tensor):
            out.copy_(left).clamp_(min=0.0)
            return
        scale, level = left
        if self.rows is None:  # p is None
            torch.mul(self.q[at], scale, out=out)
            out[run.ids[place]] -= 1.0
            out.clamp_(min=0.0)
            return
        q, p, row = self.rows[0][at], self.rows[1][at], out.numpy()
        residual(q, p, scale, row)
        if fixed := run.deterministic.get(place):
            row[fixed] = np.maximum(level * q[fixed] - p[fixed], 0.0)

    def last_row(self, run: Run) -> Float[Tensor, "vocab"]:
        """Return h after a whole run up to a factor: q, where nothing is deterministic."""
        if self.bonus is not None:
            return self.bonus[run.row]
        place = run.count
        q = self.q[run.row, run.nodes[place]]
        fixed = run.deterministic.get(place)
        if not fixed or run.cut:
            return q
        if run.ahead:  # the other tokens in proportion to q
            law = q.index_fill(0, torch.tensor([*run.ahead], device="cpu"), 0.0)
            rest = float(law.sum(dtype=torch.float64))
            law *= (1 - math.fsum(run.ahead.values())) / rest if rest > 0 else 0.0
            law[[*run.ahead]] = law.new_tensor([*run.ahead.values()])
            return law
        policy, alive = self.policy(run, place), run.alive[place]
        by_row = policy.shortcuts
        if not isinstance(by_row, ByRow):
            return self._row(policy, run, place)
        row = q.numpy()
        node = Node(row, np.zeros_like(row), 0.0, 0.0, alive=alive, ends=True, deterministic=fixed)
        _, scale, level = by_row.follow(node)
        assert scale is not None and level is not None  # the run ends there
        law = q * scale
        law[fixed] = q[fixed] * level
        return law

    def follow(self, places: Sequence[Place], ends: bool = False) -> None:
        """Compute P h_n/p_n and the residual (P h − p)₊ at nodes, and store both in the runs."""
        for number, own in self.by_policy(places):
            policy, raised = self.assigned.policies[number], self.raised[number]
            by_row = policy.shortcuts
            if raised is not None:
                for run, place in own:  # q is scaled at all tokens but the one raised to h_n
                    rest = 1 - run.q_n[place]
                    mass = run.alive[place] * (1 - run.low[place])
                    run.left[place] = mass / rest if rest > 0 else 0.0, None
            elif self.rows is not None and isinstance(by_row, ByRow):
                for run, place in own:
                    self._follow_row(by_row, run, place, ends)
            else:
                for run, place in own:
                    if place in run.deterministic:
                        self._follow_law(policy, run, place)
                for chunk in self.chunks([at for at in own if at[1] not in at[0].deterministic]):
                    self._follow_chunk(policy, chunk)

    def _follow_row(self, by_row: ByRow, run: Run, place: int, ends: bool) -> None:
        assert self.rows is not None
        at, fixed = (run.row, run.nodes[place]), run.deterministic.get(place, ())
        node = Node(
            self.rows[0][at],
            self.rows[1][at],
            run.q_n[place],
            run.p_n[place],
            alive=run.alive[place],
            ends=ends,
            deterministic=fixed,
            joint=run.ids[place] in fixed,
        )
        run.ratio, scale, level = by_row.follow(node)
        if scale is not None:
            run.left[place] = scale, level

    def _follow_law(self, policy: Policy, run: Run, place: int) -> None:
        """Compute the ratio and the residual of a node from h of its selection law."""
        assert self.p is not None
        token, r = run.ids[place], check.normalised(self.p[run.row, run.nodes[place]])
        mass = run.alive[place] * self._row(policy, run, place)
        run.ratio = float((mass[token] / r[token]).nan_to_num(nan=0.0))
        run.left[place] = mass - r

    def _row(self, policy: Policy, run: Run, place: int) -> Float[Tensor, "vocab"]:
        """Return h at a node from its selection law."""
        at = rows_at([(run, place)])
        q = self.q[at]
        law = self.draft.offers(run.row, [run.nodes[place]], q)
        target = policy.target(check.normalised(q), law, self._path([(run, place)]))
        assert target is not None  # check() has seen the policy
        return target[0].double()

    def _follow_chunk(self, policy: Policy, places: Sequence[Place]) -> None:
        at, ids = (
            rows_at(places),
            torch.tensor([run.ids[place] for run, place in places], device="cpu"),
        )
        q = self.q[at]
        p = one_hot(ids, q) if self.p is None else self.p[at]
        step = policy.follow(q, p, ids, self._path(places))
        ratios, left = step.ratio.tolist(), step.residual
        for entry, (run, place) in enumerate(places):
            run.ratio = ratios[entry]
            if left.rows is None:
                run.left[place] = left.scale_at(entry), None
            else:
                run.left[place] = left.rows[entry]

    def _path(self, places: Sequence[Place]) -> Path:
        alive = [run.alive[place] for run, place in places]
        return Path(torch.tensor(alive, dtype=torch.float64, device="cpu"))

    def accepted_and_last(self) -> tuple[Int[Tensor, "batch"], Int[Tensor, "batch"]]:
        """Return the accepted count of each run and the token after it, both (B,)."""
        accepted = np.array([run.accepted for run in self.runs], np.int64)
        last = np.array([run.last for run in self.runs], np.int64)
        return torch.from_numpy(accepted), torch.from_numpy(last)


def chains(draft: Draft, accept: Tensor, draw: Tensor) -> tuple[list[Run], Index]:
    """Return each text's drafted chain as a run, with the indices of its tokens."""
    batch, width = draft.token_ids.shape
    ids, draws, coins = (part.tolist() for part in (draft.token_ids, draw, accept))
    runs = [
        Run(row, range(count + 1), draws[row], ids[row], coins[row])
        for row, count in enumerate(draft.lengths)
    ]
    return runs, (np.arange(batch)[:, None], np.arange(width), draft.token_ids.numpy())


def index_of(runs: Sequence[Run]) -> Index:
    """Return the indices of the tokens of runs; those beyond a run's last one are arbitrary."""
    nodes, ids = np.zeros((2, len(runs), max(run.count for run in runs)), dtype=np.int64)
    for number, run in enumerate(runs):
        nodes[number, : run.count] = run.nodes[:-1]
        ids[number, : run.count] = run.ids
    return np.array([[run.row] for run in runs]), nodes, ids


def _entries(rows: Float[Tensor, "texts nodes vocab"], index: Index) -> Float[np.ndarray, "runs K"]:
    if rows.dtype not in DECIDED:
        return rows[tuple(map(torch.from_numpy, index))].double().numpy()
    return rows.detach().numpy()[index].astype(np.float64, copy=False)


def rows_at(places: Sequence[Place]) -> Any:
    """Return an index of rows (B, K + 1, V) at the nodes of places: a view of one, else copies."""
    return _at([(run.row, run.nodes[place]) for run, place in places])


def entries_at(places: Sequence[Place]) -> Any:
    """Return an index of tensors (runs, K) at places: a view of one, else copies."""
    return _at([(run.number, place) for run, place in places])


def _at(pairs: Sequence[tuple[int, int]]) -> Any:
    if len(pairs) == 1:
        row, column = pairs[0]
        return row, slice(column, column + 1)
    rows, columns = zip(*pairs, strict=True)
    return torch.tensor(rows, device="cpu"), torch.tensor(columns, device="cpu")


def residual(q: np.ndarray, p: np.ndarray, scale: float, out: np.ndarray) -> None:
    """Write (``scale`` q − p)₊ of a row to ``out``."""
    if scale == UNSCALED:
        np.subtract(q, p, out=out)
    else:
        with np.errstate(invalid="ignore"):  # of ∞, which a draw refuses
            np.multiply(q, scale, out=out)
        np.subtract(out, p, out=out)
    if len(out) < BLOCKED_FROM:
        np.maximum(out, 0.0, out=out)
    else:  # half of numpy's time for a long row, twice numpy's for a short one
        torch.from_numpy(out).clamp_(min=0.0)


def workable(q: Tensor, p: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return q and p in one precision that numpy can read: float32 for half precision."""
    dtype = q.dtype if p is None else torch.promote_types(q.dtype, p.dtype)
    dtype = dtype if dtype in DECIDED else torch.float32
    return q.to(dtype), None if p is None else p.to(dtype)
