"""A hard cap on what an answer spends: so many nats a token, at every length it may end at."""

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.decoding._verification import path_to, rows_at
from cactus_theory.decoding.result import VerifiedRows
from cactus_theory.decoding.schedule import OnePolicy, Schedule, Spec
from cactus_theory.divergences import read_divergence
from cactus_theory.policies import Policy, read_policy
from cactus_theory.policies._decisions import PathState
from cactus_theory.policies._policy import accept_probability
from cactus_theory.verify._emitted import Emitted
from cactus_theory.verify.contract import Verifier
from cactus_theory.verify.draft import Assignment, Draft, Verdict, Verified
from cactus_theory.verify.tree import Tree

KL = read_divergence("kl")
LOSSLESS = "speculative"
# prices on a policy's ladder, its own among them, and the ratio of each to the one before
RUNGS, STEP = 7, math.sqrt(2)
# credit, in tokens, below which prices rise, by STEP whenever it falls by STEP². On answers
# of 64 tokens of the shipped pair, 4 spends 93 to 98 % of caps from 0.02 to 0.1, 16 spends 82 to
# 97 % and 64 spends 49 to 89 %; tokens per call at equal KL are the same up to noise
PATIENCE = 4.0
# share of the cap that is held back: the meter adds up the same numbers in another order
ROUNDING = 1e-9


@dataclass(frozen=True)
class Account:
    """The books of one text.

    ``offered`` is what a node of this round is charged if it is reached, by the drafted tokens
    above it; entered by ``choose_by_nodes``, booked by ``observe``.
    """

    inner: Any  # the state of the schedule that is capped
    emitted: int  # new tokens
    spent: float  # nats charged for them
    offered: dict[tuple[int, ...], float]


class Ledger(Schedule):
    r"""Follow a policy as far as the answer's allowance goes, and be lossless beyond it.

    Guarantee: for every answer and every t, what the meter charges for its first t tokens is at
    most ``cap · t + burst`` nats of KL, so that an answer may end anywhere, by itself, inside a
    draft or by a limit. It holds for each text of a batch, by itself, under the verifiers
    ``chain``, ``block`` and ``tree``, and not on average but always.

    Proof (THEORY.md, Theorem 17). Let a round begin after t tokens of which S nats were charged.
    The meter charges row i of the round only if token t + i is emitted, once, and then rows
    1..i − 1 as well. The charge D_i of row i under a policy is a function of its rows q_i and
    p_i and, in blocks, of the path above: of the alive ratio there, which the drafted tokens and
    rows above and the policies chosen there give, no coin among them. Along a deterministic draft
    it may depend on rows below, too, a function of the text as well. So it is known before token i
    is judged. The ledger assigns to row i a policy with
    S + D_1 + … + D_i ≤ cap · (t + i) + burst, which ``speculative``, D_i = 0, always is, as the
    sum before it kept within cap · (t + i − 1) + burst. So the claim holds after each token of
    the round; bonus tokens and tokens that were not drafted cost nothing. In a tree row i is that
    of the i-th node of a path, its p_i the node's selection law. ∎

    A policy with a price is also tried at higher prices, up to 8 times its own, and the price
    rises as credit runs out: a row is first offered the price times √(4/c), where c is the
    credit in tokens' worth, (cap · t + burst − spent)/cap. A steady price buys more tokens than
    spending all at once, and the price of the policy, its lowest, need not be tuned to the cap.
    Any other policy is followed where its charge fits.

    Parameters
    ----------
    policy : a policy, its spec, or a schedule of policies (``Between(...)``: the cap then holds
        for the whole answer, and nothing is spent outside the section).
    cap : nats per token of the answer, at least 0.
    burst : nats that may be spent ahead of the tokens, at least 0.

    Raises
    ------
    ValueError
        A number below 0 or not finite.

    Examples
    --------
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> capped = Ledger("band:price=0.2", 0.05)
    >>> result = ct.generate(pair.target, pair.draft, ids, policy=capped, max_new_tokens=16)
    >>> bool((result.token_charges.cumsum(-1) <= 0.05 * torch.arange(1, 17) + 1e-9).all())
    True
    """

    def __init__(self, policy: Spec | Schedule, cap: float, *, burst: float = 0.0) -> None:
        self.cap, self.burst = check.finite("cap", cap, 0), check.finite("burst", burst, 0)
        self._cap(policy if isinstance(policy, Schedule) else OnePolicy(policy))

    def _cap(self, inner: Schedule) -> None:
        """Take the schedule to follow, and the ladders of its policies, by number."""
        strict, policies, numbers = read_policy(LOSSLESS), list[Policy](), []
        for own in inner.policies:
            ladder = (*_ladder(own), strict)
            policies += [policy for policy in ladder if policy not in policies]
            numbers.append([policies.index(policy) for policy in ladder])
        self.inner, self.policies, self.numbers = inner, tuple(policies), numbers

    @property
    def spec(self) -> str:
        ahead = f" + {self.burst:g}" if self.burst else ""
        return f"{self.inner.spec}, at most {self.cap:g} nats a token{ahead}"

    def check(self, verifier: Verifier) -> None:
        super().check(verifier)
        self.inner.check(verifier)
        if verifier.drafts != ("chain",) and not isinstance(verifier, Tree):
            raise ValueError(
                "verifier: Ledger needs one that verifies one drafted path, or tree; got "
                f"{verifier.spec!r}"
            )

    def at_ends(self, token_ids: Iterable[int]) -> "Ledger":
        if (inner := self.inner.at_ends(token_ids)) is self.inner:
            return self
        own = copy.copy(self)  # of a subclass, too
        own._cap(inner)
        return own

    def begin(self, prompt: Sequence[int]) -> Account:
        return Account(self.inner.begin(prompt), 0, 0.0, {})

    def advance(self, state: Account, new_ids: Sequence[int]) -> Account:
        inner = self.inner.advance(state.inner, new_ids)
        return replace(state, inner=inner, emitted=state.emitted + len(new_ids), offered={})

    def choose(self, state: Account, drafted: Int[Tensor, "K"]) -> Int[Tensor, "K"]:
        """Raise NotImplementedError: a ledger chooses by rows and paths (``choose_by_nodes``)."""
        raise NotImplementedError("choose: a ledger needs rows and paths; call choose_by_nodes")

    def choose_by_nodes(
        self,
        state: Account,
        target_probs: Float[Tensor, "1 K1 vocab"],
        draft: Draft,
        verifier: Verifier,
    ) -> tuple[Int[Tensor, "K"], Float[Tensor, "K"]]:
        """Return for each node the first policy of its ladder that the allowance has room for."""
        of_inner, _ = self.inner.choose_by_nodes(state.inner, target_probs, draft, verifier)
        numbers, ids = of_inner.tolist(), draft.token_ids[0].tolist()
        charges = _Charges(self.policies, target_probs, draft, verifier)
        # of each node: the tokens above it, what is spent there, P
        above: list[tuple[int, ...]] = [()] * (len(ids) + 1)
        spent, alive = [state.spent] * len(above), [1.0] * len(above)
        laws: dict[int, Emitted] = {}
        state.offered.clear()
        for place, node in enumerate(draft.above[0]):
            if node not in laws:
                tokens = state.emitted + len(above[node]) + 1
                allowed = self.cap * tokens * (1 - ROUNDING) + self.burst - spent[node]
                at = charges, node, alive[node]
                chosen = self._fitting(self.numbers[numbers[node]], allowed, *at)
                numbers[node], charge, laws[node] = chosen
                state.offered[above[node]] = charge
                spent[node] += charge
            above[place + 1], spent[place + 1] = (*above[node], ids[place]), spent[node]
            alive[place + 1] = charges.alive_after(place, alive[node], laws[node])
        ratios = torch.tensor(alive[:-1], dtype=torch.float64, device=of_inner.device)
        return of_inner.new_tensor(numbers), ratios

    def observe(self, state: Account, rows: VerifiedRows) -> Account:
        above = tuple(rows.draft_token_ids.tolist())
        booked = (state.offered.get(above[:place], 0.0) for place in range(len(above)))
        spent = state.spent + sum(booked)
        return replace(state, inner=self.inner.observe(state.inner, rows), spent=spent, offered={})

    def _fitting(
        self, ladder: Sequence[int], allowed: float, charges: "_Charges", node: int, alive: float
    ) -> tuple[int, float, Emitted]:
        """Return the first policy that fits, from the rung on that credit suggests; charge, law."""
        rung, last = self._first_rung(allowed, len(ladder)), len(ladder) - 1
        while True:
            charge, law = charges.of(ladder[rung], node, alive)
            if rung == last or charge <= allowed:
                return ladder[rung], charge, law
            # a charge falls about as the square of the price, so that STEP² fits the excess
            over = math.log(charge / allowed) / (2 * math.log(STEP)) if charge < math.inf else 0.0
            rung = min(rung + max(1, math.floor(over)), last)

    def _first_rung(self, allowed: float, rungs: int) -> int:
        """Return the rung to try first: 0 with PATIENCE tokens' worth of credit or more."""
        if allowed <= 0:
            return rungs - 1
        if rungs <= 2 or allowed >= PATIENCE * self.cap:
            return 0
        short = math.log(PATIENCE * self.cap / allowed) / (2 * math.log(STEP))
        return min(math.ceil(short), rungs - 1)


class _Charges:
    """Emitted laws at the nodes of one text's draft under policies, and their charges."""

    def __init__(
        self, policies: Sequence[Policy], target_probs: Tensor, draft: Draft, verifier: Verifier
    ) -> None:
        self.policies, self.verifier = policies, verifier
        self.target_probs, self.draft = target_probs, draft
        nodes = range(max(draft.above[0], default=-1) + 1)
        self.nodes: Any = slice(0, len(nodes)) if draft.is_chain else list(nodes)
        rows = rows_at(0, self.nodes, self._verified(None))
        # rows without a law end a draft, and are never charged
        real = (rows[0].sum(-1) > 0) & (rows[1].sum(-1) > 0)
        laws = (torch.where(real[:, None], row.double(), 1.0) for row in rows)
        self.q, self.p = map(check.normalised, laws)
        self.by_policy: dict[int, PathState | None] = {}

    def of(self, number: int, node: int, alive: float) -> tuple[float, Emitted]:
        """Return the charge of a node that is reached with P = ``alive``, and its law."""
        policy = self.policies[number]
        if number not in self.by_policy:
            raised = self.verifier.raised_entries(policy, self.target_probs, self.draft)
            self.by_policy[number] = path_to(0, self.nodes, self._verified(raised))
        path = self.by_policy[number]
        assert path is not None
        at = slice(node, node + 1)
        here = replace(path.at(at), alive=path.alive.new_tensor([alive]))
        law = self.verifier.emitted(policy, self.q[at], self.p[at], here)
        return float(law.charges(KL).spent), law

    def alive_after(self, place: int, alive: float, law: Emitted) -> float:
        """Return P after a drafted token, from P and the law at its node."""
        node, token = self.draft.above[0][place], self.draft.token_ids[0, place]
        drawn_from = self.p[node]
        if self.draft.sampled is not None:
            if not self.draft.flags[0][0][place]:
                return 1.0  # the walk begins anew there
            assert self.draft.probs is not None
            drawn_from = check.normalised(self.draft.probs[0, node])
        return float(accept_probability(alive * law.at(token[None])[0], drawn_from[token]))

    def _verified(self, raised: Tensor | None) -> Verified:
        """Return a round in which every node was reached, with P = 1, as the meter sees it."""
        ids = self.draft.token_ids
        none, alive = ids.new_zeros(1), torch.ones_like(ids).double()
        verdict = Verdict(ids, none, none, alive=alive, raised=raised)
        return Verified(Assignment(()), self.target_probs, self.draft, verdict)


def _ladder(policy: Policy) -> tuple[Policy, ...]:
    """Return a policy and, if it has a price, the policy at RUNGS − 1 higher prices."""
    price = getattr(policy, "price", None)
    if not isinstance(price, float) or not 0 < price < math.inf:
        return (policy,)
    prices = [price * STEP**rung for rung in range(1, RUNGS)]
    return (policy, *(replace(policy, price=higher) for higher in prices))  # type: ignore
