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

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.policies import Policy
from cactus_theory.policies._decisions import PathState
from cactus_theory.policies._policy import normalised_or
from cactus_theory.verify._checks import verify_tensors
from cactus_theory.verify._dense import Walk, block_on_device, raised_entries
from cactus_theory.verify._emitted import Emitted, Rows
from cactus_theory.verify._on_cpu import Law
from cactus_theory.verify._residual import Residual
from cactus_theory.verify._runs import Place, Run, chains
from cactus_theory.verify.contract import VerdictLaw, Verifier, register_verifier
from cactus_theory.verify.draft import Accept, Assignment, Draft, Draws, Targets, Verdict
from cactus_theory.verify.draw import Coins, Generators, pick


@register_verifier("block")
class Block(Verifier):
    """A drafted path is verified as a whole, towards a row h of the policy at each node.

    Policies with a row of their own (``FixedTarget``) are followed as they are; per-proposal
    policies, such as Cactus, by the law that they emit.
    """

    reaches_all_it_can = True

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
        self, assigned: Assignment, target_probs: Targets, draft: Draft, accept: Accept, draw: Draws
    ) -> Verdict:
        """Return the verdict; on a CPU whole rows are read only where a decision needs them."""
        ids = draft.token_ids
        if not ids.shape[1]:
            last = pick(target_probs[:, 0], draw)
            return Verdict(ids, torch.zeros_like(last), last)
        if ids.is_cuda:
            return block_on_device(assigned, target_probs, draft, accept, draw)
        law = Blocks(assigned, target_probs, draft.probs, draft, *chains(draft, accept, draw))
        law.judge()
        alive = [(run.alive + [0.0] * len(accept[0]))[: len(accept[0])] for run in law.runs]
        ratios = torch.tensor(alive, dtype=torch.float64, device="cpu")
        return Verdict(ids, *law.accepted_and_last(), None, None, ratios, law.raised)

    def emitted(
        self, policy: Policy, target_probs: Rows, draft_probs: Rows, path: PathState
    ) -> Emitted:
        """Return h at charged rows."""
        return Emitted(policy, target_probs, draft_probs, path, policy.target, of_policy=True)

    def raised_entries(
        self, policy: Policy, target_probs: Targets, draft: Draft
    ) -> Float[Tensor, "batch K"] | None:
        """Return h_n of deterministic tokens; None where the policy does not look ahead."""
        return raised_entries(Assignment((policy,)), target_probs, draft)

    def law(self, assigned: Assignment, target_probs: Targets, draft: Draft) -> VerdictLaw:
        """Return the exact law of the verdict on chains.

        Raises
        ------
        NotImplementedError
            A tree.
        """
        if not draft.is_chain:
            return super().law(assigned, target_probs, draft)
        walk = Walk(assigned, target_probs.double(), draft)
        after = (1 - walk.value[:, 1:]).flip(-1).cumprod(-1).flip(-1)
        stop = walk.value * torch.cat([after, torch.ones_like(walk.value[:, :1])], -1)
        last = normalised_or(walk.last, torch.zeros_like(walk.last))
        return VerdictLaw(stop, last, walk.alive, walk.emitted)


class Blocks(Law):
    """The law of runs that are judged as blocks.

    Forwards, the alive ratio P is followed from token to token as far as any later coin could still
    pass. Backwards, the last token that passes is found: P = 1 always does and a coin above P
    never, so few residuals are summed.
    """

    in_blocks = True

    def judge(self) -> None:
        """Set the accepted count of each run, and the token after it."""
        if self.p is None:
            draft = replace(self.draft, counts=[run.count for run in self.runs])
            self.raised = raised_entries(self.assigned, self.q, draft)
        bounds = [policy.bounds(self.q_n, self.p_n) for policy in self.assigned.policies]
        low, high = map(self.chosen, zip(*bounds, strict=True))
        if self.raised is not None:
            ahead = self.raised.isfinite()
            low, high = (torch.where(ahead, self.raised, bound) for bound in (low, high))
        for run, run.low, run.high in zip(self.runs, low.tolist(), high.tolist(), strict=True):
            for place in run.deterministic:
                self._widen(run, place)
        waiting = self.runs
        while waiting:
            waiting = [run for run in waiting if run.advance()]
            self.exceeded([(run, len(run.alive) - 1) for run in waiting], [1.0] * len(waiting))
            for run in waiting:
                run.alive.append(min(1.0, run.ratio))
        ends = [(run, len(run.alive) - 1) for run in self.runs]
        while ends:
            ends = [(run, run.last_below(place)) for run, place in ends]
            passed = self.passes(ends)
            ends = [(run, at - 1) for (run, at), on in zip(ends, passed, strict=True) if not on]
        for run in self.runs:  # a path of ratio 0 ends before the row of NaN
            if run.cut and run.alive[-1]:
                run.accepted = run.count
            self.end(run)

    def _widen(self, run: Run, place: int) -> None:
        """Widen a drafted token's bounds where it, or a token beside it, is deterministic.

        There a band has the bounds of tokens that are sampled alone.
        """
        if place == run.count:
            return
        policy, q_n, p_n = self.policy(run, place), run.q_n[place], run.p_n[place]
        if policy.row(*self.rows(run, place), run.alive[0]) is None:
            run.low[place], run.high[place] = 0.0, math.inf
        elif run.ids[place] in run.deterministic[place]:
            run.high[place] = policy.highest * q_n / p_n if p_n > 0 else math.inf

    def passes(self, places: Sequence[Place]) -> list[bool]:
        """Return whether paths may end at nodes whose coin is below P; what is left there then."""
        passed = [self._may_end(*at) for at in places]
        asked = [
            (run, place)
            for (run, place), on in zip(places, passed, strict=True)
            if on and place < run.count and place not in run.residuals
        ]
        self.exceeded(asked, [math.inf] * len(asked))
        for entry, (run, place) in enumerate(places):
            sure = place == run.count or not place or run.alive[place] == 1
            if passed[entry] and not sure:
                passed[entry] = run.passes(place, run.residuals[place].mass)
            run.accepted = place
        return passed

    def _may_end(self, run: Run, place: int) -> bool:
        """Return whether a run could end at a node with the largest scale, P.

        Where not, the node need not be solved; of policies with h between q and p.
        """
        if place == run.count or place in run.residuals or run.alive[place] == 1 or not place:
            return True
        policy = self.policy(run, place)
        if not policy.between or policy.highest <= 1 or place in run.deterministic:
            return True
        return run.passes(place, Residual(*self.rows(run, place), run.alive[place]).mass)


def verify_block(
    policy: str | Policy | Sequence[str | Policy],
    target_probs: Tensor,
    draft_probs: Tensor | None,
    draft_token_ids: Tensor,
    *,
    generator: Generators = None,
    coins: Coins | None = None,
    validate: bool = True,
) -> Verdict:
    """Verify each row's drafted path as a whole, then emit one more token per row.

    Accepts at least as many tokens as :func:`verify_chain` in expectation, for the same row h
    at every node. The next token has the law h wherever it does under the chain, too; the law of
    whole texts differs from the chain's unless h = q, since bonus tokens, which come from the
    target, fall at other places.

    Parameters
    ----------
    policy : one policy or its spec, or one per row; each with a row of its own (``FixedTarget``),
        or per proposal (followed by its emitted law).
    target_probs, draft_probs, draft_token_ids, generator, coins, validate : as for
        :func:`verify_chain`.

    Raises
    ------
    ValueError
        As :func:`verify_chain`; a policy without a row of its own.
    TypeError
        As :func:`verify_chain`.

    Examples
    --------
    >>> q = torch.tensor([[[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]]])
    >>> p = torch.tensor([[[0.9, 0.1], [0.1, 0.9]]])
    >>> coins = torch.tensor([[0.6, 0.9]]), torch.tensor([0.7])
    >>> ids = torch.tensor([[0, 0]])
    >>> ct.verify_block("speculative", q, p, ids, coins=coins).output_token_ids
    tensor([[0, 0, 1]])
    >>> ct.verify_chain("speculative", q, p, ids, coins=coins).output_token_ids
    tensor([[ 1, -1, -1]])
    """
    return verify_tensors(
        Block(), policy, target_probs, draft_probs, draft_token_ids, generator, coins, validate
    )
