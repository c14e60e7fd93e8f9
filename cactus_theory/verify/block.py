r"""Verify a drafted path as a whole, so that one unlucky token does not end it.

With h the row that is to be emitted at each node and P_0 = 1, for i = 1..K

.. math:: P_i = \min\{1, P_{i-1} h(x_i)/p(x_i)\}, \qquad R_i = Σ_x (P_i h(x) − p(x))_+

where R_i is of the row after x_i. Each i has a coin; it passes below
R_i/(R_i + 1 − P_i) for i < K and below P_K for i = K. The last i that passes is how many
tokens are accepted (none need pass). After i < K accepted tokens the next one comes from
(P_i h − p)₊ normalised, after K from the target's own row.

The token after a node that is reached has exactly the law h there, and node x_1..x_i is reached
with probability p(x_1..x_i) P_i, the most that any verifier of one drafted path can have for
this h. Source: Sun et al. 2024 (arXiv 2403.10444) for h = q; any h that depends on the text
and P alone will do (THEORY.md, Theorem 12).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.policies import Policy
from cactus_theory.policies._decisions import Path
from cactus_theory.policies._policy import accept_probability, normalised_or, one_hot
from cactus_theory.verify._checks import verify_tensors
from cactus_theory.verify._cpu import chains, workable
from cactus_theory.verify._tree_walk import Blocks, entries_as_assigned, raised_entries
from cactus_theory.verify.contract import VerdictLaw, Verifier, register_verifier
from cactus_theory.verify.draft import Assignment, Draft, Verdict, rows_by_choice
from cactus_theory.verify.draw import NO_TOKEN, Coins, Generators, pick


@register_verifier("block")
@dataclass(frozen=True)
class Block(Verifier):
    """A drafted path is verified as a whole, towards a row h of the policy at each node.

    Policies with a row of their own (``FixedTarget``) are followed as they are; per-proposal
    policies, such as Cactus, by the law that they emit.

    Attributes
    ----------
    bonus : where the token after a wholly accepted draft comes from. ``target``: its own row,
        which costs no divergence. ``policy``: the policy's row h, which is charged: then every
        token of a round has the law h, and whole rounds that of h where h depends on the text
        alone. It takes the draft's row after its last token, and deterministic drafts, which have
        none, get the target's.
    """

    bonus: str = "target"

    reaches_all_it_can = True

    def __post_init__(self) -> None:
        check.one_of("bonus", self.bonus, ("target", "policy"))

    @property
    def needs_next_draft_row(self) -> bool:
        """Return whether the bonus comes from the policy's row."""
        return self.bonus == "policy"

    def check(self, policy: Policy) -> None:
        """Raise for a policy without a row at each node.

        Raises
        ------
        ValueError
            A policy that is neither a ``FixedTarget`` nor a ``PerProposal``.
        """
        if type(policy).target is Policy.target:
            raise ValueError(
                f"verifier: {self.name} needs a policy with a row of its own, which "
                f"{policy.spec} has not: write it as f(q, p), which returns the row to emit, or "
                "let chain verify it"
            )

    def verify(
        self,
        assigned: Assignment,
        target_probs: Float[Tensor, "batch K1 vocab"],
        draft: Draft,
        accept: Float[Tensor, "batch coins"],
        draw: Float[Tensor, "batch"],
    ) -> Verdict:
        """Return the verdict; on a CPU whole rows are read only where a decision needs them."""
        ids = draft.token_ids
        if not ids.shape[1]:
            last = pick(target_probs[:, 0], draw)
            return Verdict(ids, torch.zeros_like(last), last)
        bonus = self._bonus(assigned, target_probs, draft)
        if ids.is_cuda:
            return _on_device(assigned, target_probs, draft, accept, draw, bonus)
        return _on_host(assigned, target_probs, draft, accept, draw, bonus)

    def _bonus(
        self, assigned: Assignment, target_probs: Tensor, draft: Draft
    ) -> Float[Tensor, "batch vocab"] | None:
        """Return h after the last drafted token of each row; None for the target's own row."""
        if self.bonus == "target" or draft.probs is None:
            return None
        if draft.probs.shape[1] != target_probs.shape[1]:
            raise ValueError(
                "draft_probs: bonus='policy' needs the row after the last drafted token, too: "
                f"{target_probs.shape[1]} rows; got {draft.probs.shape[1]}"
            )
        counts = torch.as_tensor(draft.counts, device=target_probs.device)
        batch = torch.arange(len(counts), device=counts.device)
        q, p = target_probs[batch, counts], draft.probs[batch, counts]
        start = Path(q.new_ones(len(q), dtype=torch.float64))
        rows = [policy.target(q.double(), p.double(), start) for policy in assigned.policies]
        if assigned.choice is None:
            return rows[0]
        return rows_by_choice(rows, assigned.choice[batch, (counts - 1).clamp(min=0)])

    def emitted(
        self,
        policy: Policy,
        target_probs: Float[Tensor, "rows vocab"],
        draft_probs: Float[Tensor, "rows vocab"],
        path: Path,
    ) -> Float[Tensor, "rows vocab"]:
        """Return h at charged rows, float64."""
        row = policy.target(target_probs, draft_probs, path)
        assert row is not None  # check() has seen the policy
        return row

    def looked_ahead(
        self, policy: Policy, target_probs: Float[Tensor, "batch K1 vocab"], draft: Draft
    ) -> Float[Tensor, "batch K"] | None:
        """Return h_n of deterministic drafts' tokens; None where the policy does not look ahead."""
        return raised_entries(Assignment((policy,)), target_probs, draft.probs, draft)[0]

    def law(
        self,
        assigned: Assignment,
        target_probs: Float[Tensor, "batch K1 vocab"],
        draft: Draft,
    ) -> VerdictLaw:
        """Return the exact law of the verdict."""
        probs = None if draft.probs is None else draft.probs.double()
        exact = replace(draft, probs=probs)
        walk = Walk(assigned, target_probs.double(), exact)
        bonus = self._bonus(assigned, target_probs.double(), exact)
        if bonus is not None:
            walk.charge(bonus)
        after = (1 - walk.value[:, 1:]).flip(-1).cumprod(-1).flip(-1)
        stop = walk.value * torch.cat([after, torch.ones_like(walk.value[:, :1])], -1)
        last = normalised_or(walk.last, torch.zeros_like(walk.last))
        return VerdictLaw(stop, last, walk.alive, walk.emitted, raised=walk.raised)


def _on_host(
    assigned: Assignment,
    target_probs: Tensor,
    draft: Draft,
    accept: Tensor,
    draw: Tensor,
    bonus: Tensor | None,
) -> Verdict:
    rows = workable(target_probs, draft.probs)
    runs, index = chains(draft, accept, draw)
    walk = Blocks(assigned, *rows, draft, runs, index)
    walk.bonus = bonus
    walk.judge()
    width = accept.shape[1]
    alive = [(run.alive + [0.0] * width)[:width] for run in runs]
    ratios = torch.tensor(alive, dtype=torch.float64, device="cpu")
    raised = entries_as_assigned(walk.raised, assigned)
    ends = walk.accepted_and_last()
    return Verdict(draft.token_ids, *ends, None, None, ratios, raised, bonus is not None)


def _on_device(
    assigned: Assignment,
    target_probs: Tensor,
    draft: Draft,
    accept: Tensor,
    draw: Tensor,
    bonus: Tensor | None,
) -> Verdict:
    """Return the verdict of paths on a device, from tensors alone.

    Nothing is read on the host, but by policies that solve their rows there: the root of a band of
    p/P, a round trip for each of its steps.
    """
    ids = draft.token_ids
    walk = Walk(assigned, target_probs, draft)
    if bonus is not None:
        walk.charge(bonus)
    place = torch.arange(1, ids.shape[1] + 1, device=ids.device)
    accepted = torch.where(accept < walk.value[:, 1:], place, 0).amax(-1)
    last = pick(walk.last[torch.arange(len(ids), device=ids.device), accepted], draw)
    alive = walk.alive[:, :-1]
    undecided = ((walk.alive > 0) & walk.value.isnan()).any(-1)  # NaN rows: no coin decides there
    last = torch.where(undecided, NO_TOKEN, last)
    return Verdict(ids, accepted, last, None, None, alive, walk.raised, bonus is not None)


class Walk:
    """Alive ratios, thresholds and laws of a batch of paths, node after node.

    ``alive`` (B, K + 1) is P, 0 beyond a row's drafted tokens, ``value`` (B, K + 1) what each coin
    is compared with, 1 at 0, and ``emitted`` (B, K, V) h. Rows of ``last`` (B, K + 1, V) are
    proportional to the law of the next token if the path ends there.
    """

    def __init__(
        self, assigned: Assignment, q: Float[Tensor, "batch K1 vocab"], draft: Draft
    ) -> None:
        ids = draft.token_ids
        self.assigned, self.q, self.p, self.ids = assigned, q, draft.probs, ids
        self.counts = counts = torch.as_tensor(draft.counts, device=ids.device)
        shape = (len(ids), ids.shape[1] + 1)
        self.alive = torch.zeros(shape, dtype=torch.float64, device=ids.device)
        self.value = torch.zeros_like(self.alive)
        self.last = torch.zeros_like(q)
        self.emitted = torch.zeros(q[:, 1:].shape, dtype=torch.float64, device=ids.device)
        self.alive[:, 0] = 1.0
        batch = torch.arange(len(ids), device=ids.device)
        self.raised_by_policy = raised_entries(assigned, q, draft.probs, draft)
        self.raised = entries_as_assigned(self.raised_by_policy, assigned)
        for place in range(ids.shape[1]):
            self._step(place, counts)
        self.last[batch, counts] = q[batch, counts]
        self.value[batch, counts] = self.alive[batch, counts]
        self.value[:, 0] = 1.0

    def charge(self, bonus: Float[Tensor, "batch vocab"]) -> None:
        """Set the rows (B, V) that bonus tokens are drawn from, and charge them as emitted rows."""
        batch = torch.arange(len(bonus), device=bonus.device)
        self.last[batch, self.counts] = bonus.to(self.last.dtype)
        self.emitted = torch.cat([self.emitted, torch.zeros_like(self.emitted[:, :1])], 1)
        self.emitted[batch, self.counts] = bonus

    def _step(self, place: int, counts: Tensor) -> None:
        """Fill in the entries of the node after ``place`` tokens, and P of the next one."""
        on = (place < counts)[:, None]
        alive, q, ids = self.alive[:, place], self.q[:, place].double(), self.ids[:, place]
        p = one_hot(ids, q) if self.p is None else self.p[:, place].double()
        h = self._target(place, q, p, alive)
        mass = alive[:, None] * h
        residual = (mass - p).clamp(min=0.0)
        total = residual.sum(-1)
        value = torch.where(alive == 1, 1.0, total / (total + (1 - alive)))
        following = accept_probability(*(row.gather(-1, ids[:, None])[:, 0] for row in (mass, p)))
        law = torch.where((total <= 0)[:, None], q, residual)  # NaN stays NaN
        self.value[:, place] = torch.where(on[:, 0], value, 0.0)
        self.last[:, place] = torch.where(on, law, 0.0).to(self.last.dtype)
        self.emitted[:, place] = torch.where(on, h, 0.0)
        self.alive[:, place + 1] = torch.where(on[:, 0], following, 0.0)

    def _target(self, place: int, q: Tensor, p: Tensor, alive: Tensor) -> Tensor:
        policies, choice = self.assigned.policies, self.assigned.choice
        rows = []
        for policy, entries in zip(policies, self.raised_by_policy, strict=True):
            raised = None if entries is None else entries[:, place]
            rows.append(policy.target(q, p, Path(alive, raised)))
        return rows_by_choice(rows, None if choice is None else choice[:, place]).double()


def verify_block(
    policy: Policy | Sequence[Policy],
    target_probs: Tensor,
    draft_probs: Tensor | None,
    draft_token_ids: Tensor,
    *,
    generator: Generators = None,
    coins: Coins | None = None,
    bonus: str = "target",
    validate: bool = True,
) -> Verdict:
    """Verify each row's drafted path as a whole, then emit one more token per row.

    Accepts at least as many tokens as :func:`verify_chain` in expectation, for the same row h
    at every node. The next token has the law h wherever it does under the chain, too; the law of
    whole texts differs from the chain's unless h = q, since bonus tokens, which come from the
    target, fall at other places.

    Parameters
    ----------
    policy : one policy, or one per row; each with a row of its own (``FixedTarget``), or per
        proposal (followed by its emitted law).
    target_probs : (B, K + 1, V) target rows, the last one for the bonus token.
    draft_probs : (B, K, V) draft rows, or None if the draft was deterministic;
        (B, K + 1, V) with ``bonus="policy"``.
    draft_token_ids : (B, K) int64; −1 ends a row's draft, and rows after it are not read.
    generator : one torch.Generator, or one per row (a row then behaves as if alone).
    coins : (accept (B, K), draw (B,)) in [0, 1) instead of a generator: every choice fixed.
    bonus : where the token after a wholly accepted draft comes from; see :class:`Block`.
    validate : check values and divide rows by their float64 sum; False does neither, but where
        a token is to be decided by a row with NaN or drawn from one without mass it raises (on
        CUDA, where nothing is read on the host, that token is −1).

    Raises
    ------
    ValueError
        Shapes that do not match, rows that are not distributions, ids outside the vocabulary,
        coins and a generator, a policy without a row of its own.
    TypeError
        Ids that are not int64, a policy that is none.

    Examples
    --------
    >>> q = torch.tensor([[[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]]])
    >>> p = torch.tensor([[[0.9, 0.1], [0.1, 0.9]]])
    >>> coins = torch.tensor([[0.6, 0.9]]), torch.tensor([0.7])
    >>> ids = torch.tensor([[0, 0]])
    >>> ct.verify_block(ct.policy("speculative"), q, p, ids, coins=coins).output_token_ids
    tensor([[0, 0, 1]])
    >>> ct.verify_chain(ct.policy("speculative"), q, p, ids, coins=coins).output_token_ids
    tensor([[ 1, -1, -1]])
    """
    return verify_tensors(
        Block(bonus), policy, target_probs, draft_probs, draft_token_ids, generator, coins, validate
    )
