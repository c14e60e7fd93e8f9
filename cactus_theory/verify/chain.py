"""Verify one chain of drafted tokens per row, token by token; on a device all tokens at once.

On a CPU, where reading flags on the host is free, whole rows are read only where a coin asks
(:mod:`cactus_theory.verify._on_cpu`).
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.base.tolerances import ROW_SUM_TOLERANCE
from cactus_theory.policies import Entrywise, FixedTarget, Policy
from cactus_theory.policies._policy import accept_probability, one_hot
from cactus_theory.verify._checks import verify_tensors
from cactus_theory.verify._dense import by_choice
from cactus_theory.verify._on_cpu import Answers, Law
from cactus_theory.verify._residual import Residual
from cactus_theory.verify._runs import Place, Run, chains
from cactus_theory.verify.contract import VerdictLaw, Verifier, register_verifier
from cactus_theory.verify.draft import Accept, Assignment, Draft, Draws, Targets, Verdict
from cactus_theory.verify.draw import NO_TOKEN, Coins, Generators, pick


@register_verifier("chain")
class Chain(Verifier):
    """Token n at place i is accepted iff its coin < φ(n), up to the first rejection.

    After it one token comes from the policy's residual law; if all were accepted, from the target
    row that follows them. Needs only φ and g of a policy.
    """

    def verify(
        self, assigned: Assignment, target_probs: Targets, draft: Draft, accept: Accept, draw: Draws
    ) -> Verdict:
        """Return the verdict; whole rows are read only where a decision needs them."""
        ids = draft.token_ids
        if not ids.shape[1]:
            last = pick(target_probs[:, 0], draw)
            return Verdict(ids, torch.zeros_like(last), last)
        if ids.is_cuda:
            return Verdict(ids, *chain_on_device(assigned, target_probs, draft, accept, draw))
        law = Chains(assigned, target_probs, draft.probs, draft, *chains(draft, accept, draw))
        law.judge()
        return Verdict(ids, *law.accepted_and_last())

    def law(self, assigned: Assignment, target_probs: Targets, draft: Draft) -> VerdictLaw:
        """Return the exact law of the verdict: φ and g of every token."""
        q, ids = target_probs.double(), draft.token_ids
        width = ids.shape[1]
        p = one_hot(ids, q) if draft.probs is None else draft.probs.double()
        counts = torch.as_tensor(draft.counts, device=ids.device)
        on = torch.arange(width, device=ids.device) < counts[:, None]
        accepted = q.new_zeros(ids.shape)
        recovered, emitted = torch.zeros_like(q[:, :width]), torch.zeros_like(q[:, :width])
        for number, policy in enumerate(assigned.policies):
            judged = on if assigned.choice is None else on & (assigned.choice == number)
            rows = q[:, :width][judged], p[judged], ids[judged]
            accepted[judged] = policy.acceptance(rows[0], rows[1], rows[2][:, None])[:, 0]
            recovered[judged] = policy.residual(*rows)
            emitted[judged] = policy.emitted(*rows[:2])
        start = torch.ones_like(q[:, :1, 0])
        alive = torch.cat([start, accepted.cumprod(-1)], -1)
        stop = alive * torch.cat([1 - accepted, start], -1)  # no token is accepted beyond the draft
        last = torch.cat([recovered, torch.zeros_like(q[:, :1])], 1)
        batch = torch.arange(len(ids), device=ids.device)
        last[batch, counts] = q[batch, counts]
        return VerdictLaw(stop, last, alive, emitted)


class Chains(Law):
    """The law of runs whose tokens are accepted one by one, up to the first rejection."""

    def judge(self) -> None:
        """Set the accepted count of each run, and the token after it."""
        # entrywise policies by number, with their c
        self.entrywise: dict[int, tuple[Entrywise, Tensor]] = {}
        least = [self._least(number) for number in range(len(self.assigned.policies))]
        for run, run.low in zip(self.runs, self.chosen(least).tolist(), strict=True):
            run.alive = [1.0] * (run.count + 1)
        waiting = self.runs
        while waiting:
            ends = []
            for run in waiting:
                place, coins, low = run.accepted, run.coins, run.low
                # below this bound a coin is below φ; at others ``passing`` asks for φ, or solves h
                while place < run.count and coins[place] < low[place]:
                    place += 1
                run.accepted = place
                if place < run.count:
                    ends.append((run, place))
            waiting = self.passing(ends)
            for run in waiting:
                run.accepted += 1
        for run in self.runs:
            self.end(run)

    def _least(self, number: int) -> Float[Tensor, "runs K"]:
        """Return the least acceptance of each sampled token by entries: φ, of entrywise ones."""
        policy = self.assigned.policies[number]
        if isinstance(policy, Entrywise):
            ceiling = policy.ceiling(self.q_n, self.p_n)
            self.entrywise[number] = policy, ceiling
            return accept_probability(ceiling, self.p_n)
        low, high = policy.bounds(self.q_n, self.p_n)
        # a row's sum may miss 1 and move a bound as far: close calls are the policy's
        return low if high is low else low * (1 - 2 * ROW_SUM_TOLERANCE[self.q.dtype])

    @cached_property
    def scales(self) -> dict[int, list[list[float]]]:
        """Return s of the residuals of entrywise policies, by policy number."""
        return {
            number: policy.scale(self.q_n, ceiling).tolist()
            for number, (policy, ceiling) in self.entrywise.items()
        }

    def passing(self, places: Sequence[Place]) -> list[Run]:
        """Return the runs whose coins pass where no bound answered; solve what the others leave."""
        asked = []
        for run, place in places:
            number = self.number(run, place)
            if number in self.entrywise:  # the bound was φ
                scale = self.scales[number][run.number][place]
                run.residuals[place] = Residual(*self.rows(run, place), scale)
            else:
                asked.append((run, place))
        passed = self.exceeded(asked, [run.coins[place] for run, place in asked])
        return [run for (run, _), on in zip(asked, passed, strict=True) if on]

    def _ask(self, policy: Policy, places: Sequence[Place]) -> Answers:
        """Ask a policy without a row h for φ, and for g of some tokens."""
        if isinstance(policy, FixedTarget):
            return super()._ask(policy, places)
        q, p, ids = self._together(places)
        return (
            policy.acceptance(q, p, ids)[:, 0].tolist(),
            lambda some: policy.residual(q[some], p[some], ids[some, 0]).detach().double(),
        )


def verify_chain(
    policy: str | Policy | Sequence[str | Policy],
    target_probs: Tensor,
    draft_probs: Tensor | None,
    draft_token_ids: Tensor,
    *,
    generator: Generators = None,
    coins: Coins | None = None,
    validate: bool = True,
) -> Verdict:
    """Accept drafted tokens up to the first rejection, then emit one more token per row.

    Token n at position i is accepted iff its coin < φ(n). After the first rejection the token
    comes from the policy's residual law; if all were accepted, from the target row after them.

    Parameters
    ----------
    policy : one policy or its spec, or one per row.
    target_probs : (B, K + 1, V) target rows, the last one for the bonus token.
    draft_probs : (B, K, V) draft rows, or None if the draft was deterministic.
    draft_token_ids : (B, K) int64; −1 ends a row's draft, and rows after it are not read.
    generator : one torch.Generator, or one per row (a row then behaves as if alone).
    coins : (accept (B, K), draw (B,)) in [0, 1) instead of a generator: every choice fixed.
    validate : check values and divide rows by their float64 sum; False does neither, but where
        a token is to be decided by a row with NaN or drawn from one without mass it raises (on
        CUDA, where nothing is read on the host, that token is −1).

    Raises
    ------
    ValueError
        Shapes that do not match, rows that are not distributions, ids outside the vocabulary,
        coins and a generator.
    TypeError
        Ids that are not int64, a policy that is none.

    Examples
    --------
    >>> q = torch.tensor([[[0.5, 0.5], [0.2, 0.8], [0.5, 0.5]]])
    >>> p = torch.tensor([[[0.5, 0.5], [0.9, 0.1]]])
    >>> coins = torch.tensor([[0.3, 0.5]]), torch.tensor([0.7])  # φ is 1, then 2/9
    >>> step = ct.verify_chain("speculative", q, p, torch.tensor([[0, 0]]), coins=coins)
    >>> step.output_token_ids, step.num_accepted
    (tensor([[ 0,  1, -1]]), tensor([1]))
    """
    return verify_tensors(
        Chain(), policy, target_probs, draft_probs, draft_token_ids, generator, coins, validate
    )


def chain_on_device(
    assigned: Assignment, q: Targets, draft: Draft, accept: Accept, draw: Draws
) -> tuple[Int[Tensor, "batch"], Int[Tensor, "batch"]]:
    """Return accepted counts and the token after them, both (B,), from one residual a row."""
    ids, p, choice = draft.token_ids, draft.probs, assigned.choice
    width = ids.shape[1]
    lengths = torch.as_tensor(draft.counts, device=ids.device)
    q_n = q[:, :width].gather(-1, ids[..., None])[..., 0].double()
    p_n = torch.ones_like(q_n) if p is None else p.gather(-1, ids[..., None])[..., 0].double()
    phi = [_acceptance(one, q[:, :width], p, ids, (q_n, p_n)) for one in assigned.policies]
    lawful = ~(q_n + p_n).isnan()
    drafted = torch.arange(width, device=ids.device) < lengths[:, None]
    passed = (accept < by_choice(phi, choice)) & lawful & drafted
    accepted = passed.long().cumprod(-1).sum(-1)
    batch = torch.arange(len(ids), device=ids.device)
    at = (batch, accepted.clamp(max=width - 1))
    tokens, q_rows = ids[at], q[at]
    p_rows = one_hot(tokens, q_rows) if p is None else p[at]
    residuals = [policy.residual(q_rows, p_rows, tokens) for policy in assigned.policies]
    recovered = by_choice(residuals, None if choice is None else choice[at][:, None])
    law = torch.where((accepted < lengths)[:, None], recovered, q[batch, accepted])
    undecided = (accepted < lengths) & ~lawful[at]
    return accepted, torch.where(undecided, NO_TOKEN, pick(law, draw))


def _acceptance(
    policy: Policy, q: Tensor, p: Tensor | None, ids: Tensor, entries: tuple[Tensor, Tensor]
) -> Float[Tensor, "batch K"]:
    """Return φ of drafted tokens; an entrywise policy needs their entries of q and p alone."""
    if isinstance(policy, Entrywise):
        return policy.acceptance_of(*entries)
    p = one_hot(ids, q) if p is None else p
    return policy.acceptance(q, p, ids[..., None])[..., 0]
