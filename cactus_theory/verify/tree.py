r"""Verify a tree of drafted tokens: one walk for chains, blocks, certain trees and both at once.

Every node has certain children T, fixed by what stands above them, and at most one child that
was drawn from a row r. The sampled child is judged towards a row h, token by token or as a block
along a run of sampled children; whatever token comes out, if it is a child, the walk goes on
there, else the round ends. Where nothing follows the token comes from the target, free.

The policy's h is computed from the node's selection law p° (:func:`cactus_theory.selection_law`)
in place of the draft's row, and from nothing that was drawn there: the next token then has the
law h at every node that is reached, and is a child as often as any rule for these drafts can make
it (THEORY.md, Theorems 21 and 22). Without certain children this is the chain or the block,
without sampled ones it is sampling from h and looking the token up.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory import _arguments as check
from cactus_theory.policies import Policy
from cactus_theory.policies._base import keep_probability
from cactus_theory.policies._path import Path
from cactus_theory.verify._declared import declared
from cactus_theory.verify._tensors import verify_tensors
from cactus_theory.verify.block import Block
from cactus_theory.verify.chain import Chain
from cactus_theory.verify.contract import Assignment, Draft, Verdict, VerdictLaw, Verifier
from cactus_theory.verify.draw import NO_TOKEN, Coins, Generators, pick
from cactus_theory.verify.registry import register_verifier

RUNS = {"block": Block(), "chain": Chain()}


@register_verifier("tree")
@dataclass(frozen=True)
class Tree(Verifier):
    """Walks down a tree of certain and sampled tokens; chains are verified as ``runs`` says.

    Attributes
    ----------
    runs : how a run of sampled tokens is judged: as a ``block``, or token by token (``chain``).

    Examples
    --------
    >>> Tree().spec, Tree("chain").spec, Tree().draws(3)
    ('tree', 'tree:runs=chain', 4)
    """

    runs: str = "block"

    needs_fixed_target = True
    drafts = ("chain", "tree")

    def __post_init__(self) -> None:
        check.one_of("runs", self.runs, tuple(RUNS))

    @property
    def spec(self) -> str:
        """Return the string that ``find_verifier`` takes."""
        return self.name if self.runs == "block" else f"{self.name}:runs={self.runs}"

    def draws(self, depth: int) -> int:
        """Return one more than the depth: every caught token asks for another one."""
        return depth + 1

    def check(self, policy: Policy) -> None:
        """Raise for a policy without a row at each node.

        Raises
        ------
        ValueError
            A policy that is neither a ``FixedTarget`` nor a ``PerProposal``; token by token one
            whose row depends on the path, too.
        """
        RUNS["block"].check(policy)
        RUNS[self.runs].check(policy)

    def verify(
        self,
        assigned: Assignment,
        target_probs: Float[Tensor, "batch K1 vocab"],
        draft: Draft,
        accept: Float[Tensor, "batch coins"],
        draw: Float[Tensor, "batch *draws"],
    ) -> Verdict:
        """Return what is emitted; rows are read where the walk comes by, float64.

        Raises
        ------
        ValueError
            A tree that does not declare the law of its nodes, or has two sampled children.
        """
        draws = draw[:, None] if draw.ndim == 1 else draw
        if is_chain(draft):
            return RUNS[self.runs].verify(assigned, target_probs, draft, accept, draws[:, 0])
        if draft.sampled is None:
            raise ValueError(
                f"draft: a tree for verifier={self.spec!r} must declare which tokens were sampled; "
                "got sampled=None"
            )
        steps = [
            Steps(self, assigned, target_probs, draft, row, coins, own).walk()
            for row, (coins, own) in enumerate(zip(accept.tolist(), draws.cpu(), strict=True))
        ]
        return _verdict(draft, steps, target_probs.device)

    def emitted(
        self,
        policy: Policy,
        target_probs: Float[Tensor, "rows vocab"],
        draft_probs: Float[Tensor, "rows vocab"],
        path: Path,
    ) -> Float[Tensor, "rows vocab"]:
        """Return h at charged rows, float64; ``draft_probs`` are selection laws."""
        return RUNS["block"].emitted(policy, target_probs, draft_probs, path)

    def law(
        self, assigned: Assignment, target_probs: Float[Tensor, "batch K1 vocab"], draft: Draft
    ) -> VerdictLaw:
        """Return the exact law of the verdict on chains.

        Raises
        ------
        NotImplementedError
            A tree.
        """
        judge = RUNS[self.runs] if is_chain(draft) else super()
        return judge.law(assigned, target_probs, draft)


def is_chain(draft: Draft) -> bool:
    """Return whether a draft declares nothing but sampled tokens, each after the one before."""
    if draft.sampled is None:
        return draft.parents is None
    place = torch.arange(draft.sampled.shape[1], device=draft.sampled.device)
    lone = draft.sampled if draft.certain is None else draft.sampled & ~draft.certain
    if draft.parents is not None:
        lone = lone & (draft.parents == place - 1)
    return bool((lone | (place >= place.new_tensor(draft.lengths)[:, None])).all())


class Steps:
    """The walk down one row's tree.

    Attributes
    ----------
    path, charged : places of the accepted tokens, and the nodes where a token was emitted that
        anything was drafted after, in order.
    alive : the alive ratio at each charged node.
    last : the token that ends the round.
    """

    def __init__(
        self,
        tree: Tree,
        assigned: Assignment,
        q: Float[Tensor, "batch K1 vocab"],
        draft: Draft,
        row: int,
        accept: list[float],
        draws: Float[Tensor, "draws"],
    ) -> None:
        self.tree, self.assigned, self.draft, self.row = tree, assigned, draft, row
        self.q, self.accept, self.draws, self.drawn = q[row], accept, draws, 0
        self.ids, self.children = draft.token_ids[row].tolist(), draft.children(row)
        self.fixed, self.left = draft.fixed(row), draft.left(row)
        assert draft.sampled is not None
        flags = draft.sampled[row].tolist()
        self.next = [self._sampled(own, flags) for own in self.children]
        self.path: list[int] = []
        self.charged: list[int] = []
        self.alive: list[float] = []
        self.last = NO_TOKEN
        self.rows: dict[int, Tensor] = {}  # of nodes that were visited, float64
        self.raised = [math.nan] * len(self.ids)
        for policy in assigned.policies:
            if type(policy).certain_tree is not Policy.certain_tree:
                self._look_ahead(policy)

    def _look_ahead(self, policy: Policy) -> None:
        """Set h_n of certain tokens beside which none was sampled, where a policy looks ahead."""
        sure = [
            [] if follows is not None else [place for place in own if self.ids[place] in fixed]
            for own, fixed, follows in zip(self.children, self.fixed, self.next, strict=True)
        ]
        above = {place: node for node, own in enumerate(self.children) for place in own}
        places = range(len(above))
        q_n = self.q[[above[place] for place in places], self.ids[: len(above)]].double()
        found = policy.certain_tree(q_n.tolist(), sure)
        for place in places if found is not None else ():
            if place in sure[above[place]] and self._policy(above[place]) is policy:
                self.raised[place] = found[place]  # type: ignore[index]

    def _sampled(self, places: Sequence[int], flags: list[bool]) -> int | None:
        """Return the sampled one among the children of a node."""
        found = [place for place in places if flags[place]]
        if len(found) > 1:
            raise ValueError(
                f"draft: at most one token may be sampled after a node; got {found} in row "
                f"{self.row}"
            )
        return found[0] if found else None

    def walk(self) -> "Steps":
        """Return itself at the end of the walk."""
        node: int | None = 0
        judged = self._block if self.tree.runs == "block" else self._chain
        while node is not None:
            node = self._go_on(*judged(node))
        return self

    def _go_on(self, node: int, law: Tensor) -> int | None:
        """Draw a token at a node; return the node that it leads to, None at the end."""
        self.last = int(pick(law[None], self.draws[self.drawn : self.drawn + 1].to(law.device)))
        self.drawn += 1
        places = [place for place in self.children[node] if self.ids[place] == self.last]
        # what was refused does not come back but by rounding, and what is below it is biased
        if not places or places[0] == self.next[node]:
            return None
        self.path.append(places[0])
        return places[0] + 1

    def _chain(self, node: int) -> tuple[int, Tensor]:
        """Judge a run token by token; return where it ends and the law of the token there."""
        while True:
            self._visit(node, 1.0)
            place, q = self.next[node], self._row(node)
            if place is None:
                return node, self._target(node, q, 1.0)
            r, token, coin = self._drawn_from(node), self.ids[place], self.accept[place]
            if not self.fixed[node]:
                policy, n = self._policy(node), torch.tensor([token], device=q.device)
                phi = policy.acceptance(q[None], r[None], n[:, None])[0, 0]
                left = None if coin < float(phi) else policy.recovery(q[None], r[None], n)[0]
            else:
                h = self._target(node, q, 1.0)
                kept = coin < float(keep_probability(h[token], r[token]))
                left = None if kept else _positive(h - r, q)
            if left is not None:
                return node, left
            self.path.append(place)
            node = place + 1

    def _block(self, node: int) -> tuple[int, Tensor]:
        """Judge a run as a block; return where it ends and the law of the token there.

        Forward the alive ratios, backward the last coin that passes.
        """
        nodes, ratios, masses = [node], [1.0], []
        while True:
            masses.append(ratios[-1] * self._target(nodes[-1], self._row(nodes[-1]), ratios[-1]))
            place = self.next[nodes[-1]]
            if place is None:
                break
            raised = masses[-1][self.ids[place]]
            drawn = self._drawn_from(nodes[-1])[self.ids[place]]
            if bool((raised + drawn).isnan()):  # no coin decides at such a node
                return self._arrived(nodes, ratios, masses[-1] * math.nan)
            if raised <= 0:
                break
            ratios.append(float(keep_probability(raised, drawn)))
            nodes.append(place + 1)
        for at in range(len(nodes) - 1, 0, -1):
            coin, lost = self.accept[nodes[at] - 1], 1 - ratios[at]
            if coin >= ratios[at]:  # the value is P at most
                continue
            left = self._residual(nodes[at], masses[at])
            total = float(left.sum())
            if not lost or coin < total / (total + lost):
                return self._arrived(nodes[: at + 1], ratios, left)
        return self._arrived(nodes[:1], ratios, self._residual(node, masses[0]))

    def _arrived(self, nodes: list[int], ratios: list[float], law: Tensor) -> tuple[int, Tensor]:
        """Charge the nodes of a run; return the last one, and the law there."""
        for node, alive in zip(nodes, ratios, strict=False):
            self._visit(node, alive)
        self.path += [node - 1 for node in nodes[1:]]
        return nodes[-1], _positive(law, self._row(nodes[-1]))

    def _visit(self, node: int, alive: float) -> None:
        """Charge a node, if tokens were drafted after it."""
        if self.children[node]:
            self.charged.append(node)
            self.alive.append(alive)

    def _residual(self, node: int, mass: Tensor) -> Tensor:
        """Return (P h − r)₊, P h where nothing was sampled."""
        if self.next[node] is None:
            return mass
        return (mass - self._drawn_from(node)).clamp(min=0.0)

    def _row(self, node: int) -> Float[Tensor, "vocab"]:
        if node not in self.rows:
            self.rows[node] = check.normalised(self.q[node])
        return self.rows[node]

    def _drawn_from(self, node: int) -> Float[Tensor, "vocab"]:
        """Return the row that the sampled child of a node was drawn from."""
        assert self.draft.probs is not None
        return check.normalised(self.draft.probs[self.row, node])

    def _policy(self, node: int) -> Policy:
        choice = self.assigned.choice
        return self.assigned.policies[0 if choice is None else int(choice[self.row, node])]

    def _target(self, node: int, q: Float[Tensor, "vocab"], alive: float) -> Tensor:
        """Return h at a node: from its selection law, whatever was drawn there."""
        if self.next[node] is None and not self.fixed[node]:
            return q
        own, mass = [place for place in self.children[node] if self.raised[place] > 0], None
        if own:  # the policy has looked ahead, and NaN is not above 0
            values = q.new_tensor([self.raised[place] for place in own])
            offers, mass = torch.zeros_like(q)[None], values.sum()[None]
            offers[0, [self.ids[place] for place in own]] = values / mass
        else:
            offers = self.draft.offers(self.row, [node], q[None])
        left = torch.tensor([self.left[node]], device=q.device)
        path = Path(offers.new_tensor([alive]), left, mass)
        found = self._policy(node).target_in_block(q[None], offers, path)
        assert found is not None  # check() has seen the policy
        return found[0].double()


def _positive(law: Tensor, fallback: Tensor) -> Tensor:
    """Return the positive part of a row, or ``fallback`` where rounding leaves none of it."""
    left = law.clamp(min=0.0)
    return fallback if float(left.sum()) <= 0 else left  # NaN stays NaN


def _verdict(draft: Draft, steps: Sequence[Steps], device: torch.device) -> Verdict:
    """Return the verdict of a batch."""
    path = torch.full_like(draft.token_ids, -1)
    alive = torch.zeros(draft.token_ids.shape, dtype=torch.float64, device=device)
    for row, own in enumerate(steps):
        path[row, : len(own.path)] = path.new_tensor(own.path)
        alive[row, own.charged] = alive.new_tensor(own.alive)
    accepted = path.new_tensor([len(own.path) for own in steps])
    last = path.new_tensor([own.last for own in steps])
    charged = [own.charged for own in steps]
    raised = alive.new_tensor([own.raised for own in steps])
    ahead = None if bool(raised.isnan().all()) else raised
    return Verdict(draft.token_ids, accepted, last, path, charged, alive, ahead)


def verify_tree(
    rule: Policy | Sequence[Policy],
    target_probs: Tensor,
    draft_probs: Tensor | None,
    draft_token_ids: Int[Tensor, "batch K"],
    parents: Int[Tensor, "batch K"],
    *,
    sampled: Tensor | None = None,
    certain: Tensor | None = None,
    runs: str = "block",
    generator: Generators = None,
    coins: Coins | None = None,
    validate: bool = True,
) -> Verdict:
    """Walk down each row's tree of drafted tokens, then emit one more token per row.

    Node 0 of a row is its text, node i + 1 the text with drafted token i after those that it
    follows. At every node that is reached the next token has the policy's law h, for the draft
    row that stands for all tokens drafted there (:func:`selection_law`).

    Parameters
    ----------
    rule : one policy, or one per row, as for :func:`verify_block`; for ``runs="chain"`` none
        whose row depends on the path.
    target_probs : (B, K + 1, V) target rows by node.
    draft_probs : (B, K, V) by node, the row that its sampled child was drawn from; not read
        where there is none, and None if nothing was sampled.
    draft_token_ids : (B, K) int64; −1 ends a row's tree. Siblings are different tokens: one that
        was sampled and is certain, too, is one node.
    parents : (B, K) int64, the earlier drafted token that each one follows, −1 for the text.
    sampled : (B, K) bool, the tokens drawn from their node's row, at most one a node; by default
        all of them if there are rows, else none.
    certain : (B, K) bool, the tokens that were fixed before the one beside them was drawn; by
        default all that were not sampled. Tokens that are neither may be walked to, and change
        no law.
    runs : a run of sampled tokens is judged as a ``block``, or token by token (``chain``).
    generator : one torch.Generator, or one per row (a row then behaves as if alone).
    coins : (accept (B, K), draw (B, D + 1)) in [0, 1) for trees of depth D: a coin for each
        drafted token, and one for each token that is drawn from a row, in order.
    validate : check values and divide rows by their float64 sum; False does neither, but where
        a token is to be drawn from what is no distribution it raises.

    Raises
    ------
    ValueError
        As :func:`verify_block`; parents that do not come before their children, equal siblings,
        two sampled ones, sampled tokens without rows.
    TypeError
        Ids or parents that are not int64, flags that are not bool, a rule that is not a Policy.

    Examples
    --------
    >>> q = torch.tensor([[[0.3, 0.3, 0.4], [0.2, 0.2, 0.6], [0.2, 0.2, 0.6]]])
    >>> ids, parents = torch.tensor([[0, 1]]), torch.tensor([[-1, -1]])  # two certain tokens
    >>> step = ct.verify_tree(ct.policy("speculative"), q, None, ids, parents,
    ...     coins=(torch.zeros(1, 2), torch.tensor([[0.5, 0.1]])))
    >>> step.output_token_ids, step.path  # 1 is drawn from the first row, then 0 from the third
    (tensor([[ 1,  0, -1]]), tensor([[ 1, -1]]))
    """
    tree = declared(draft_token_ids, parents, draft_probs, sampled, certain, validate)
    shared = rule, target_probs, draft_probs, draft_token_ids, generator, coins, validate
    return verify_tensors(Tree(runs), *shared, tree=tree)
