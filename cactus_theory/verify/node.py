"""Nodes of drafted paths: the rows q and p, the alive ratio P and the emitted law h of each node.

A node computes h at most once, when h is first needed. The verifier reads from a node whether a
coin passes, and the residual; meter, schedules and replays read the node's charge. On a CPU the
policy may return a compiled row (``NodeRow``), whose compiled loops solve h and measure its
charge. h is written out as a row only if there is no compiled row, or if ``law`` is read.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import repeat
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.base.tensors import as_list, from_numpy, normalised
from cactus_theory.base.tolerances import DECIDED, LEAST
from cactus_theory.divergences import Divergence, read_divergence
from cactus_theory.divergences.regret import REGRET
from cactus_theory.emitted import directions, raised_off_head
from cactus_theory.optimum.band_row import NodeRow, loops
from cactus_theory.optimum.bands import EMPTY, NO_BAND, Charge, charge_of
from cactus_theory.optimum.regret import OneTokenRow, RegretPath
from cactus_theory.optimum.selection import offered
from cactus_theory.policies import Entrywise, FixedTarget, PerProposal, Policy
from cactus_theory.policies.policy import PathState
from cactus_theory.verify.draft import Assignment, Draft
from cactus_theory.verify.draw import pick_one
from cactus_theory.verify.on_device import raised_entries

# a numpy array on a CPU, a tensor on a device
Row = Any
# most row entries that a policy computes in one call, so that the rows stay in the CPU's cache
ENTRIES = 2**15
UNCHARGED = Charge(0.0, 0.0, 0.0)
KL = read_divergence("kl")


class Residual:
    """The unnormalised row (s q − p)₊ that a recovered token is drawn from.

    ``scale`` is s. ``levels`` maps some token ids to other values of s. Without ``p`` the row is
    s q, as for a bonus token.
    """

    def __init__(
        self, q: np.ndarray, p: np.ndarray | None = None, scale: float = 1.0,
        levels: dict[int, float] | None = None,
    ) -> None:  # fmt: skip
        if levels:  # write out s q with all values of s, so that the one scale left is 1
            ids, levelled = [*levels], q[[*levels]] * np.array([*levels.values()])
            q = np.multiply(q, scale, dtype=np.float64)
            q[ids], scale = levelled, 1.0
        self.q, self.p, self.scale = q, q[:0] if p is None else p, scale

    @property
    def row(self) -> Float[np.ndarray, "vocab"]:
        """Return the row (s q − p)₊, float64."""
        with np.errstate(invalid="ignore"):  # ∞ gives NaN, and a draw from NaN returns NO_TOKEN
            row = self.q.astype(np.float64) * self.scale
            return np.maximum(row - self.p if len(self.p) else row, 0.0)

    @property
    def mass(self) -> float:
        """Return the sum of the row (s q − p)₊."""
        if (compiled := loops()) is None:
            return float(self.row.sum())
        return compiled.left_mass(self.q, self.p, self.scale)

    def draw(self, draw: float) -> int:
        """Return the token that the coin ``draw`` draws; −1 if the row's sum is 0, NaN or ∞."""
        if (compiled := loops()) is None:
            return pick_one(from_numpy(self.row), draw)
        return compiled.draw_left(self.q, self.p, self.scale, draw)


class Node:
    """A node of a drafted path, with the law h that one policy emits there, solved on demand.

    Rows are views of the round's rows, in one precision: numpy arrays on a CPU, tensors on a
    device. To keep a node beyond the round, take a :meth:`copy`.

    Attributes
    ----------
    verifier, policy : the verifier and the policy that decide at the node.
    q : (V,), the target's row; if the policy verifies against tilted rows, q^θ ∝ q^(1+θ).
    p : (V,), the row that ``token`` was drawn from; None if ``token`` is deterministic or None.
    token : the drafted token that is judged at the node; None if nothing was drafted, or if a tree
        has only deterministic tokens there.
    alive : the alive ratio P: the probability, given the tokens before the node, that block
        verification accepts them all (averaged over the tokens drafted later); 1 in a chain.
    raised : h of ``token`` if h also depends on later tokens of a deterministic draft, else NaN.
    fixed : the deterministic tokens drafted after a node of a tree.
    untilted : (V,), the target's row if ``q`` is its tilted row (Theorem 28), else None.
    """

    def __init__(
        self, verifier: Any, policy: Policy, q: Row, p: Row | None, token: int | None = None,
        alive: float = 1.0, raised: float = math.nan, fixed: Sequence[int] = (),
        untilted: Row | None = None,
    ) -> None:  # fmt: skip
        self.verifier, self.policy, self.q, self.p, self.token = verifier, policy, q, p, token
        self.alive, self.raised, self.fixed, self.untilted = alive, raised, fixed, untilted
        # the child kept in a deterministic tree under regret, −1 for none; None elsewhere
        self.chosen: int | None = None
        self.last_charge: tuple[Divergence | None, Charge] = None, UNCHARGED

    def copy(self) -> "Node":
        """Return this node with copies of its rows, which stay valid after the round."""
        rows = self.q, self.p, self.untilted
        q, p, untilted = (None if row is None else row * 1 for row in rows)
        path = self.token, self.alive, self.raised, self.fixed
        return Node(self.verifier, self.policy, q, p, *path, untilted)

    @property
    def drafted(self) -> bool:
        """Return whether anything was drafted after this node."""
        return self.token is not None or bool(self.fixed)

    @property
    def is_known(self) -> bool:
        """Return whether h is already computed: by the compiled row, or stored as ``law``."""
        return self.solved.is_solved if self.solved is not None else "law" in self.__dict__

    @property
    def is_written(self) -> bool:
        """Return whether a method of the policy has to compute h.

        If not, the compiled row solves h, or h is the target's row.
        """
        by_policy = self.drafted or self.policy.moves_undrafted or self.untilted is not None
        return self.solved is None and by_policy

    @property
    def lossless(self) -> bool:
        """Return whether h is the target's row itself, so that the node is charged exactly 0.

        This depends on the row h, not on what the policy declares.
        """
        if self.untilted is not None:
            return False
        if self.solved is not None:
            return type(self.solved) is NodeRow
        return not self.is_written or self.law is self.target

    @cached_property
    def drawn_from(self) -> Any:
        """Return the row that the judged token was drawn from, one-hot if it is deterministic."""
        if self.p is not None:
            return self.p
        row = self.q * 0
        row[self.token] = 1
        return row

    @cached_property
    def offers(self) -> Any:
        """Return the draft row that policies read, which stands for all tokens drafted here.

        It is :attr:`drawn_from`, or with deterministic tokens in a tree their selection law
        (:func:`cactus_theory.optimum.selection.offered`). Where nothing was drafted, it is q.
        """
        if not self.fixed:
            return self.q if self.token is None else self.drawn_from
        if not isinstance(self.q, Tensor):
            return offered(self.q, self.p, self.fixed)
        sampled = None if self.p is None else self.p.cpu().numpy()
        return from_numpy(offered(self.q.cpu().numpy(), sampled, self.fixed)).to(self.q)

    @cached_property
    def solved(self) -> NodeRow | None:
        """Return the compiled row that solves h on a CPU, or None where ``law`` computes h.

        None also if nothing was drafted.
        """
        if not (
            self.drafted and self.verifier.emits_policy_rows and not isinstance(self.q, Tensor)
        ):
            return None
        if self.chosen is not None and self.fixed:  # a deterministic tree under regret
            kept = self.chosen >= 0
            token = self.chosen if kept else int(self.q.argmax())
            row = OneTokenRow(self.q, token, kept, self.alive)
            return None if math.isnan(row.chance) else row  # with NaN, draws from the law fail
        if self.token is not None and not math.isnan(self.raised):
            assert self.policy.look_ahead is not None
            return self.policy.look_ahead.row(self.q, self.token, self.raised, self.alive)
        p = self.offers if self.policy.highest > 1 else self.q  # else h = q, whatever is drafted
        alive = self.alive if self.verifier.by_path else 1.0
        # a node with P = 0 is never reached; bands are not defined at P = 0
        return self.policy.row(self.q, p, alive or 1.0)

    @cached_property
    def target(self) -> Float[Tensor, "vocab"]:
        """Return the target's row without tilt, float64, with sum 1."""
        return normalised(_tensor(self.q if self.untilted is None else self.untilted))

    @cached_property
    def law(self) -> Float[Tensor, "vocab"]:
        """Return h, float64, with sum 1; the tensor ``target`` if the policy returns that row."""
        if self.solved is None or (self.solved.compiled and loops() is None):
            write_laws([self])
            return self.__dict__["law"]
        q, p = (row.astype(np.float64) for row in (self.q, self.offers))
        self.solved.write(q, p, h := np.empty(len(self.q)))
        return normalised(from_numpy(h))

    @property
    def accepts_by_phi(self) -> bool:
        """Return whether the verifier judges the token by φ, so that h need not be known."""
        by_row = isinstance(self.policy, FixedTarget) and not isinstance(self.policy, Entrywise)
        return not self.verifier.by_path and not by_row

    def exceeds(self, share: float) -> bool:
        """Return whether P h_n/p_n of the drafted token n (:attr:`ratio`) exceeds ``share``.

        In a chain ``share`` is the coin, in a block 1. For a band it is first tested whether the
        upper edge exceeds share × p_n/q_n (Theorem 15), and the row is solved only if this test
        does not decide. After a result of False the row is solved, so that h can be read.
        """
        row = self.solved
        # under a selection law p° the edges are those of p°/q, but r is made of another row, p
        of_selection_law = self.fixed and self.policy.highest > 1
        if row is None or isinstance(row, OneTokenRow) or of_selection_law:
            return share < self.ratio
        assert (token := self.token) is not None
        p_n, q_n = float(self.drawn_from[token]), float(self.q[token])
        if row.exceeds(token, share * p_n / q_n if q_n >= LEAST else math.inf):
            return True
        # a row that ignores P is solved for P = 1 (``factor`` is P): its False may mean unknown
        return row.factor != 1 and share < self.ratio

    @cached_property
    def ratio(self) -> float:
        """Return P h_n/p_n of the drafted token n, where P is ``alive``, after solving h.

        If the verifier decides by the policy's acceptance probability φ, return φ(n).
        """
        assert (token := self.token) is not None  # no other node is judged
        row, p = self.solved, self.drawn_from
        if row is None and self.accepts_by_phi:
            ask_phi([self])
            return self.__dict__["ratio"]
        p_n, q_n = float(p[token]), float(self.q[token])
        if row is None:
            p_n /= float(_tensor(p).sum(dtype=torch.float64))  # as ``law`` has the sum 1
            h_n = self.alive * float(self.law[token])
        else:
            row.upper_exceeds(math.inf)  # solves the row
            if not self.fixed or self.policy.highest <= 1:
                return row.ratio_of(token, q_n, p_n)
            h_n = row.raised(token, q_n, self.offers[token]) * q_n
        if not h_n > 0:
            return 0.0
        return h_n / p_n if p_n > 0 else math.inf

    @property
    def next_alive(self) -> float:
        """Return the alive ratio of the node after the token: min(1, P h_n/p_n)."""
        return min(1.0, self.ratio)

    def residual(self) -> Residual:
        """Return the row that the recovered or bonus token is drawn from if the path ends here.

        The row is (P h − p)₊. If the verifier judges by φ and not by h, the row is the policy's
        residual distribution g. At the end of a draft that was accepted as a whole, and where
        nothing was drafted, the row is h.
        """
        p, row = None if self.token is None else self.drawn_from, self.solved
        if row is not None:
            row.upper_exceeds(math.inf)  # solves the row
            levels = dict(row.levels)
            if self.policy.highest > 1:  # else h = q, whatever is drafted
                for token in self.fixed:  # the selection law, and so h, may exceed p here
                    levels[token] = row.raised(token, self.q[token], self.offers[token])
            return Residual(self.q, p, row.left, levels)
        if p is None:
            return Residual(self.q if self.lossless else self.law.numpy())
        if not self.accepts_by_phi:
            return Residual(self.law.numpy(), p / p.sum(dtype=np.float64), self.alive)
        if "recovered" not in self.__dict__:
            ask_recovered([self])
        return self.__dict__["recovered"]

    def h(self, token: int) -> float:
        """Return h of one token."""
        if self.lossless:
            return float(self.target[token])
        if self.solved is None or (self.solved.compiled and loops() is None):
            return float(self.law[token])
        self.solved.upper_exceeds(math.inf)  # solves the row
        return self.solved.law_at(token, self.q, self.offers)

    @cached_property
    def directions(self) -> tuple[float, float, float]:
        """Return entropy, surprise and agreement of h (:func:`cactus_theory.emitted.directions`).

        Like charges, each of the three may be summed over the tokens of a text.
        """
        q, solved = self.q, NodeRow(1.0) if self.lossless else self.solved
        if loops() is None or isinstance(q, Tensor):
            return _directions_in_torch(self)
        if solved is not None:
            solved.upper_exceeds(math.inf)  # solves the row
        band = None if solved is None else solved.band
        band, h = (NO_BAND, self.law.numpy()) if band is None else (band, EMPTY)
        target = q if self.untilted is None else self.untilted
        q, p, h, target = map(np.ascontiguousarray, (q, self.offers, h, target))
        # Σ h ln t, Σ t ln t, Σ h t, Σ t t with t the target's row; h is read only without a band
        h_log_t, t_log_t, h_t, t_t, outside = loops().directions_of(q, p, band, h, target)
        if outside:  # h > 0 where t = 0, and ln t = −∞
            return _directions_in_torch(self)
        entropy = -h_log_t - self.charge(KL).spent  # −Σ h ln h = −Σ h ln t − KL(h‖t)
        return (entropy, 0.0, 0.0) if self.lossless else (entropy, t_log_t - h_log_t, h_t - t_t)

    def charge(self, divergence: Divergence | None = None) -> Charge:
        """Return D(h‖q), the acceptance, and the mass that h adds to tokens unlikely under q.

        The divergence D is the policy's ``unit`` by default. The result for the last D is kept.
        """
        divergence = divergence or self.policy.unit
        if self.last_charge[0] != divergence:
            charge_nodes([self], divergence)
        return self.last_charge[1]


class Nodes:
    """The nodes of a round's drafts, from the target's rows (B, K + 1, V) and the draft's.

    Rows are kept in one precision, and half precision is read as float32. ``q`` holds the rows that
    policies read: q^θ for a policy that verifies against tilted rows. ``target`` holds the rows
    without tilt; None if there is no tilt.
    """

    def __init__(
        self, verifier: Any, assigned: Assignment, q: Float[Tensor, "texts nodes vocab"],
        draft: Draft,
    ) -> None:  # fmt: skip
        p = draft.probs
        if p is not None and p.dtype != q.dtype:
            dtype = torch.promote_types(q.dtype, p.dtype)
            q, p = q.to(dtype), p.to(dtype)
        self.assigned, self.rows = assigned.seen(q)
        self.verifier, self.draft, self.q = verifier, draft, _readable(self.rows)
        target = None if self.assigned.target is None else self.assigned.target.to(q.dtype)
        self.p, self.target = (None if rows is None else _readable(rows) for rows in (p, target))

    @cached_property
    def raised(self) -> list[list[float]] | None:
        """Return h_n by text and node if h depends on later deterministic tokens, else None."""
        if not self.verifier.by_path:
            return None
        entries = raised_entries(self.assigned, self.rows, self.draft)
        return None if entries is None else as_list(entries)

    @cached_property
    def chosen(self) -> dict[int, list[int]]:
        """Return by text the child that ``regret`` keeps at each node of a deterministic tree."""
        draft, kept = self.draft, dict[int, list[int]]()
        if draft.sampled is None or isinstance(self.q, Tensor):
            return kept
        for row, count in enumerate(draft.lengths):
            policies = [self.assigned.policy(row, node) for node in range(count + 1)]
            ahead = policies[0].look_ahead  # which weighs whole paths, so all nodes must share it
            is_shared = all(policy is policies[0] for policy in policies)
            if is_shared and isinstance(ahead, RegretPath) and not draft.sampled[row].any():
                rows = self.rows[row].double()
                kept[row] = ahead.descent(rows, draft.above[row], draft.ids[row][:count])
        return kept

    def at(self, row: int, node: int, alive: float = 1.0, place: int | None = None) -> Node:
        """Return a node of text ``row``: the node that a schedule has made, if any, or a new one.

        In a declared tree the token that is verified at the node is the sampled token. Elsewhere it
        is the drafted token at ``place``, or the first token after the node if ``place`` is None.
        """
        if self.assigned.nodes is not None and (row, node) in self.assigned.nodes:
            return self.assigned.nodes[row, node]
        draft, p, token, raised = self.draft, None, None, math.nan
        fixed = () if draft.sampled is None else draft.fixed[row][node]
        if place is None or draft.sampled is not None:
            place = draft.judged(row, node)
        if place is not None:
            token, p = draft.ids[row][place], None if self.p is None else _row(self.p, row, node)
            raised = math.nan if self.raised is None else self.raised[row][node]
        q, policy, untilted = _row(self.q, row, node), self.assigned.policy(row, node), None
        if self.target is not None and self.assigned.tilts[self.assigned.number(row, node)]:
            untilted = _row(self.target, row, node)
        made = Node(self.verifier, policy, q, p, token, alive, raised, fixed, untilted)
        if row in self.chosen:
            made.chosen = self.chosen[row][node]
        return made


def nodes_of_rows(
    verifier: Any, policy: Policy, q: Tensor, p: Tensor, alive: Sequence[float] | None = None
) -> list[Node]:
    """Return R nodes with rows q and p (R, V), at each of which one token was sampled from p."""
    ids = torch.zeros(len(q), 1, dtype=torch.int64, device=q.device)
    draft = Draft(ids, [1] * len(q), p[:, None])
    nodes = Nodes(verifier, Assignment((policy,)), q[:, None], draft)
    return [nodes.at(row, 0, 1.0 if alive is None else alive[row]) for row in range(len(q))]


def _readable(rows: Tensor) -> Row:
    """Return rows as numpy arrays if on a CPU and in a precision of numpy, else as they are."""
    rows = rows.detach()
    return rows.numpy() if rows.dtype in DECIDED and not rows.is_cuda else rows


def _row(rows: Row, text: int, node: int) -> Row:
    row = rows[text, node]
    return row.float().numpy() if isinstance(row, Tensor) and not row.is_cuda else row


def _tensor(row: Row) -> Tensor:
    return row if isinstance(row, Tensor) else from_numpy(row)


def _together(nodes: Iterable[Node], kind: Callable[[Node], Any]) -> Iterator[list[Node]]:
    """Yield groups of nodes that one call of a policy can compute together.

    Nodes of a group have the same policy, verifier and ``kind(node)``. On a CPU a group is small
    enough for its rows to stay in the cache.
    """
    groups: dict[Any, list[Node]] = {}
    for node in nodes:
        groups.setdefault((id(node.policy), id(node.verifier), kind(node)), []).append(node)
    for group in groups.values():
        size = len(group) if _tensor(group[0].q).is_cuda else max(1, ENTRIES // len(group[0].q))
        yield from (group[at : at + size] for at in range(0, len(group), size))


def stacked(nodes: Sequence[Node], name: str) -> Float[Tensor, "nodes vocab"]:
    """Return the rows that nodes have under the attribute ``name``, (nodes, V)."""
    rows = [_tensor(getattr(node, name)) for node in nodes]
    return torch.stack(rows) if len(rows) > 1 else rows[0][None]


def ask_together(nodes: Sequence[Node]) -> Sequence[Node]:
    """Compute φ or h at nodes without a compiled row, in one call per policy; return all nodes."""
    asked = [node for node in nodes if node.solved is None and not node.is_known]
    if len(asked) > 1:  # a single node computes φ or h when either is read
        ask_phi(node for node in asked if node.accepts_by_phi)
        write_laws(node for node in asked if not node.accepts_by_phi)
    return nodes


def ask_phi(nodes: Iterable[Node]) -> None:
    """Compute φ of the tokens verified at nodes, one call per policy; store it as ``ratio``."""
    for group in _together(nodes, lambda node: None):
        q, p = (stacked(group, name) for name in ("q", "drawn_from"))
        ids = torch.tensor([[node.token] for node in group], device=q.device)
        phi = as_list(group[0].policy.acceptance(q, p, ids)[:, 0])
        for node, ratio in zip(group, phi, strict=True):
            node.__dict__["ratio"] = ratio


def ask_recovered(nodes: Iterable[Node]) -> None:
    """Compute the residuals at nodes that accept by φ, one call per policy; store them."""
    for group in _together(nodes, lambda node: None):
        q, p = (stacked(group, name) for name in ("q", "drawn_from"))
        ids = torch.tensor([node.token for node in group], device="cpu")
        rows = group[0].policy.residual(q, p, ids).detach().double()
        for node, row in zip(group, rows.numpy(), strict=True):
            node.__dict__["recovered"] = Residual(row)


def write_laws(nodes: Iterable[Node]) -> None:
    """Compute the laws h of nodes, one call per policy; store each as ``law``."""
    for group in _together(nodes, lambda node: (node.drafted, math.isnan(node.raised))):
        q, first = normalised(stacked(group, "q")), group[0]
        if first.drafted:
            alive, raised = q.new_tensor([[node.alive, node.raised] for node in group]).T
            path = PathState(alive, None if math.isnan(first.raised) else raised)
            h = first.verifier.emitted(first.policy, q, normalised(stacked(group, "offers")), path)
        else:
            h = first.policy.undrafted(q)
        laws = q if h is q else h.detach().double()  # q itself: the node is ``lossless``
        for node, target, law in zip(group, q, laws, strict=True):
            if node.untilted is None:
                node.__dict__["target"] = target
            node.__dict__["law"] = target if h is q else law


def charge_nodes(nodes: Sequence[Node], divergence: Divergence) -> None:
    """Compute and store the charges in ``divergence`` of nodes that have not stored theirs yet."""
    nodes = [node for node in nodes if node.last_charge[0] != divergence]
    if divergence == REGRET:  # a row with h = 1 at one token has its charge at hand
        for node in nodes:
            if isinstance(row := node.solved, OneTokenRow):
                node.last_charge = divergence, row.charge
        nodes = [node for node in nodes if node.last_charge[0] != divergence]
    write_laws(node for node in nodes if node.is_written and not node.is_known)
    f = divergence.generator
    if nodes and (f is None or loops() is None or isinstance(nodes[0].q, Tensor)):
        charges = _charges_in_torch(nodes, divergence)
    else:
        charges = map(_charge_in_loops, nodes, repeat(divergence))
    for node, charge in zip(nodes, charges, strict=True):
        if not node.drafted:
            charge = charge._replace(accepted=0.0)
        elif not isinstance(node.policy, FixedTarget | PerProposal):
            # such a policy's φ need not reach Σ min(p, h), the acceptance that was computed
            q, p = (normalised(_tensor(row)) for row in (node.q, node.offers))
            accepted = (p * node.policy.acceptance_row(q, p)).sum(-1)
            charge = charge._replace(accepted=float(accepted))
        if node.lossless:
            charge = Charge(0.0, charge.accepted, 0.0)
        node.last_charge = divergence, charge


def _charge_in_loops(node: Node, divergence: Divergence) -> Charge:
    """Return a node's charge from its solved band; h is written out only if there is no band."""
    if not node.drafted and node.lossless:
        return UNCHARGED
    f, solved, q = divergence.generator, node.solved, node.q
    if node.untilted is not None:  # the band was solved for the tilted row
        solved, q = None, node.untilted
    if solved is not None:
        solved.upper_exceeds(math.inf)  # solves the row
    h = node.law.numpy() if solved is None or solved.band is None else solved
    assert f is not None  # :func:`charge_nodes` leaves other divergences to torch
    charge = charge_of(f, q, node.offers, node.alive or 1.0, h)
    if divergence is f:  # else a function of the f-divergence, such as Rényi's
        return charge
    spent = torch.tensor(charge.spent, dtype=torch.float64, device="cpu")
    return charge._replace(spent=float(divergence.from_generator(spent)))


def _directions_in_torch(node: Node) -> tuple[float, float, float]:
    entropy, surprise, agreement = map(float, directions(node.law, node.target))
    return entropy, surprise, agreement


def _charges_in_torch(nodes: Sequence[Node], divergence: Divergence) -> list[Charge]:
    q, h = (torch.stack([getattr(node, name) for node in nodes]) for name in ("target", "law"))
    p = normalised(stacked(nodes, "offers"))
    alive = q.new_tensor([[node.alive or 1.0] for node in nodes])
    columns = (  # in the order of Charge
        divergence.value(h, q).clamp(min=0.0),
        torch.minimum(p / alive, h).sum(-1),
        raised_off_head(h, q),
    )
    return [Charge(*row) for row in as_list(torch.stack(columns, -1))]
