"""Verify one chain of drafted tokens per row, token by token; on a device all tokens at once.

On a CPU, where reading flags on the host is free, whole rows are read only where a decision needs
them. A token is accepted without reading its rows if its policy decides from the drafted entries,
or if lossless sampling accepts it and the policy accepts whatever lossless sampling does. Among the
others, the policy is called for the first undecided token of each row only.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cactus_theory.base.reused_memory import scratch
from cactus_theory.base.tolerances import ROW_SUM_TOLERANCE
from cactus_theory.policies import Entrywise, Policy
from cactus_theory.policies._decisions import Residual, ratio_in
from cactus_theory.policies._policy import accept_probability, one_hot
from cactus_theory.policies._shortcuts import ByRow
from cactus_theory.verify._checks import verify_tensors
from cactus_theory.verify._cpu import Nodes, Place, Run, chains, entries_at, rows_at
from cactus_theory.verify.contract import VerdictLaw, Verifier, register_verifier
from cactus_theory.verify.draft import Assignment, Draft, Verdict, rows_by_choice
from cactus_theory.verify.draw import NO_TOKEN, Coins, Generators, pick, pick_one


@register_verifier("chain")
class Chain(Verifier):
    """Token n at place i is accepted iff its coin < φ(n), up to the first refusal.

    After it one token comes from the policy's residual law; if all were accepted, from the target
    row that follows them. Needs only φ and g of a policy.
    """

    def verify(
        self,
        assigned: Assignment,
        target_probs: Float[Tensor, "batch K1 vocab"],
        draft: Draft,
        accept: Float[Tensor, "batch coins"],
        draw: Float[Tensor, "batch"],
    ) -> Verdict:
        """Return the verdict; whole rows are read only where a decision needs them."""
        ids = draft.token_ids
        if not ids.shape[1]:
            last = pick(target_probs[:, 0], draw)
            return Verdict(ids, torch.zeros_like(last), last)
        if ids.is_cuda:
            return Verdict(ids, *chain_on_device(assigned, target_probs, draft, accept, draw))
        tokens = Tokens(assigned, target_probs, draft.probs, draft, *chains(draft, accept, draw))
        tokens.coins = accept
        tokens.judge()
        return Verdict(ids, *tokens.accepted_and_last())

    def law(
        self,
        assigned: Assignment,
        target_probs: Float[Tensor, "batch K1 vocab"],
        draft: Draft,
    ) -> VerdictLaw:
        """Return the exact law of the verdict: φ and g of every token."""
        q, ids = target_probs.double(), draft.token_ids
        width = ids.shape[1]
        p = one_hot(ids, q) if draft.probs is None else draft.probs.double()
        counts = torch.as_tensor(draft.counts, device=ids.device)[:, None]
        on = torch.arange(width, device=ids.device) < counts
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
        refused = torch.where(
            on, 1 - accepted, (torch.arange(width, device=ids.device) == counts) * 1.0
        )
        full = (counts == width).double()
        stop = alive * torch.cat([refused, full], -1)
        last = torch.cat([recovered, torch.zeros_like(q[:, :1])], 1)
        batch = torch.arange(len(ids), device=ids.device)
        last[batch, counts[:, 0]] = q[batch, counts[:, 0]]
        return VerdictLaw(stop, last, alive, emitted, accepted)


def verify_chain(
    policy: Policy | Sequence[Policy],
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
    policy : one policy, or one per row.
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
    >>> step = ct.verify_chain(ct.policy("speculative"), q, p, torch.tensor([[0, 0]]), coins=coins)
    >>> step.output_token_ids, step.num_accepted
    (tensor([[ 0,  1, -1]]), tensor([1]))
    """
    return verify_tensors(
        Chain(), policy, target_probs, draft_probs, draft_token_ids, generator, coins, validate
    )


def chain_on_device(
    assigned: Assignment,
    q: Float[Tensor, "batch K1 vocab"],
    draft: Draft,
    accept: Float[Tensor, "batch K"],
    draw: Float[Tensor, "batch"],
) -> tuple[Int[Tensor, "batch"], Int[Tensor, "batch"]]:
    """Return accepted counts and the token after them, both (B,), from one residual a row."""
    ids, p, choice = draft.token_ids, draft.probs, assigned.choice
    width = ids.shape[1]
    lengths = torch.as_tensor(draft.counts, device=ids.device)
    passed = [_passed(policy, q[:, :width], p, ids, accept) for policy in assigned.policies]
    flags = passed[0] if choice is None else torch.stack(passed).gather(0, choice[None])[0]
    lawful = _lawful(q[:, :width], p, ids)
    flags = flags & lawful & (torch.arange(width, device=ids.device) < lengths[:, None])
    accepted = flags.long().cumprod(-1).sum(-1)
    batch = torch.arange(len(ids), device=ids.device)
    at = (batch, accepted.clamp(max=width - 1))
    rows = [_recovered(policy, q, p, ids, accept, at) for policy in assigned.policies]
    recovered = rows_by_choice(rows, None if choice is None else choice[at])
    law = torch.where((accepted < lengths)[:, None], recovered, q[batch, accepted])
    undecided = (accepted < lengths) & ~lawful[at]
    return accepted, torch.where(undecided, NO_TOKEN, pick(law, draw))


def _lawful(q: Tensor, p: Tensor | None, ids: Tensor) -> Bool[Tensor, "batch K"]:
    """Return the drafted tokens that rows can judge, (B, K): no entry of theirs is NaN."""
    at = ids[..., None]
    entries = q.gather(-1, at) if p is None else q.gather(-1, at) + p.gather(-1, at)
    return ~entries[..., 0].isnan()


def _passed(
    policy: Policy, q: Tensor, p: Tensor | None, ids: Tensor, accept: Tensor
) -> Bool[Tensor, "batch K"]:
    if isinstance(policy, Entrywise):
        at = ids[..., None]
        q_n = q.gather(-1, at)[..., 0].double()
        p_n = torch.ones_like(q_n) if p is None else p.gather(-1, at)[..., 0].double()
        return accept < accept_probability(policy.ceiling(q_n, p_n), p_n)
    p = one_hot(ids, q) if p is None else p
    return accept < policy.acceptance(q, p, ids[..., None])[..., 0]


def _recovered(
    policy: Policy,
    q: Tensor,
    p: Tensor | None,
    ids: Tensor,
    accept: Tensor,
    at: tuple[Tensor, Tensor],
) -> Float[Tensor, "batch vocab"]:
    """Return rows (B, V) proportional to the residual law at one place a row."""
    q_rows, tokens = q[at], ids[at]
    p_rows = one_hot(tokens, q_rows) if p is None else p[at]
    residual = policy.decide(q_rows, p_rows, tokens, accept[at]).residual
    if residual is None:  # all tokens are accepted: the result is not used
        return q_rows
    return residual.law(q_rows, None if p is None else p_rows, tokens).to(q.dtype)


class Tokens(Nodes):
    """The nodes of runs whose tokens are accepted one by one, up to the first refusal."""

    def judge(self) -> None:
        """Set the accepted count of each run, and the token after it."""
        self.ids = torch.from_numpy(self.index[2])
        self.ceilings: dict[int, Tensor] = {}  # entrywise policies' c, by policy number
        at_once = [self._accepted_at_once(number) for number in range(len(self.assigned.policies))]
        accepted, waiting = self.chosen(at_once).tolist(), self.runs
        refused: list[Place] = []
        for run in waiting:
            run.alive = [1.0] * (run.count + 1)
        while waiting:
            undecided = []
            for run in waiting:
                place, deterministic = run.accepted, run.deterministic
                flags = accepted[run.number]
                while place < run.count:
                    if not (
                        self._accepts_beside(run, place) if place in deterministic else flags[place]
                    ):
                        break
                    place += 1
                run.accepted = place
                if place < run.count and place not in deterministic:
                    entrywise = self.number(run, place) in self.ceilings
                    (refused if entrywise else undecided).append((run, place))
            waiting = self._decide(undecided) if undecided else ()
        for number, own in self.by_policy(refused):
            policy = self.assigned.policies[number]
            for places in self.chunks(own):
                assert isinstance(policy, Entrywise)
                at = entries_at(places)
                entries = self.q_n[at], self.ceilings[number][at]
                self._replace(policy.residual_entries(*entries), places)
        passed = [run for run in self.runs if run.accepted == run.count and not run.cut]
        self.draw_each(passed, [self.last_row(run) for run in passed])

    @cached_property
    def coins(self) -> Float[Tensor, "runs K"]:
        """Return the coins of all tokens, 0 beyond a run's last one."""
        coins = torch.zeros_like(self.q_n)
        for run, own in zip(self.runs, coins.numpy(), strict=True):
            own[: len(run.coins)] = run.coins
        return coins

    def _accepted_at_once(self, number: int) -> Bool[Tensor, "runs K"]:
        """Return the sampled tokens that a policy accepts without reading their rows."""
        policy = self.assigned.policies[number]
        if isinstance(policy, Entrywise):
            self.ceilings[number] = ceiling = policy.ceiling(self.q_n, self.p_n)
            return self.coins < accept_probability(ceiling, self.p_n)
        # a row's sum may miss 1 and move the lossless test as far: close calls are the policy's
        shrink = 1 - 2 * ROW_SUM_TOLERANCE[self.q.dtype]
        return policy.shortcuts.accepted(self.q_n * shrink, self.p_n, self.coins)

    def _accepts_beside(self, run: Run, place: int) -> bool:
        """Decide a token beside deterministic ones; draw the recovered token if it is refused."""
        at = [(run, place)]
        self.follow(at)
        if run.coins[place] < run.ratio:
            return True
        self.follow([] if place in run.left else at, ends=True)
        self.settle(at)
        return False

    def _decide(self, undecided: Sequence[Place]) -> list[Run]:
        """Decide each run's first undecided token by its policy; return the runs that go on."""
        going_on = []
        for number, own in self.by_policy(undecided):
            policy = self.assigned.policies[number]
            by_row = policy.shortcuts
            if isinstance(by_row, ByRow) and self.rows is not None:
                going_on += [place[0] for place in own if self._accepts(by_row, *place)]
            else:
                for places in self.chunks(own):
                    going_on += self._decide_chunk(policy, places)
        return going_on

    def _accepts(self, by_row: ByRow, run: Run, place: int) -> bool:
        """Return whether the token at a place is accepted; if not, draw the recovered token."""
        assert self.rows is not None
        q, p = (rows[run.row, run.nodes[place]] for rows in self.rows)
        coin, q_n, p_n = run.coins[place], run.q_n[place], run.p_n[place]
        accepted, scale = by_row.decide(q, p, ratio_in(coin * p_n, q_n))
        if accepted:
            run.accepted += 1
        else:
            self._replace_row(scale, run, place)
        return accepted

    def _decide_chunk(self, policy: Policy, places: Sequence[Place]) -> list[Run]:
        at, entries = rows_at(places), entries_at(places)
        q, ids = self.q[at], self.ids[entries]
        p = one_hot(ids, q) if self.p is None else self.p[at]
        decision = policy.decide(q, p, ids, self.coins[entries])
        accepted = decision.accepted.tolist()
        going_on = [run for (run, _), stays in zip(places, accepted, strict=True) if stays]
        for run in going_on:
            run.accepted += 1
        stopped = [entry for entry, stays in enumerate(accepted) if not stays]
        if stopped and decision.residual is not None:
            every = len(stopped) == len(places)
            rows = torch.tensor(stopped, device="cpu")
            residual = decision.residual if every else decision.residual.at(rows)
            self._replace(residual, [places[entry] for entry in stopped])
        return going_on

    def _replace(self, residual: Residual, places: Sequence[Place]) -> None:
        """Draw the recovered tokens of refused ones from their residuals."""
        if self.rows is not None and residual.rows is None and self.one_by_one(len(places)):
            for entry, (run, place) in enumerate(places):
                self._replace_row(residual.scale_at(entry), run, place)
            return
        at = rows_at(places)
        q, p = self.q[at], None if self.p is None else self.p[at]
        out = scratch("chain.residual", tuple(q.shape), q.dtype)
        laws = residual.law(q, p, self.ids[entries_at(places)], out)
        self.draw_each([run for run, _ in places], laws)

    def _replace_row(self, scale: float, run: Run, place: int) -> None:
        run.left[place] = scale, None
        if not self._settle_by_loops([(run, place)])[0]:
            return
        self.leave(self._buffer, run, place, (scale, None))
        run.last = pick_one(self._buffer, run.draw)
        self.end_if_empty(run, place, self._buffer)

    @cached_property
    def _buffer(self) -> Float[Tensor, "vocab"]:
        return scratch("chain.residual", self.q.shape[-1:], self.q.dtype)
