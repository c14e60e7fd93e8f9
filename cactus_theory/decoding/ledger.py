"""A hard cap on what an answer spends: so many nats a token, at every length it may end at."""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.base import defaults
from cactus_theory.decoding.schedule import OnePolicy, Schedule, Spec
from cactus_theory.divergences.regret import REGRET
from cactus_theory.optimum.regret import losses
from cactus_theory.policies import Policy, read_policy
from cactus_theory.policies.regret import Regret
from cactus_theory.policies.tilt import colder, tilt_of, untilted
from cactus_theory.verify.block import Block
from cactus_theory.verify.contract import Verifier
from cactus_theory.verify.draft import Assignment, Draft
from cactus_theory.verify.node import Node, Nodes
from cactus_theory.verify.tree import Tree

# prices on a policy's ladder, its own among them, and the ratio of each to the one before
RUNGS, STEP = 7, math.sqrt(2)
# credit, in tokens, below which prices rise, by STEP whenever it falls by STEP². On answers
# of 64 tokens of the shipped pair, 4 spends 93 to 98 % of caps from 0.02 to 0.1, 16 spends 82 to
# 97 % and 64 spends 49 to 89 %; tokens per call at equal KL are the same up to noise
PATIENCE = 4.0
# keeps every drafted token that is not masked
KEEP = read_policy("regret:price=0")
# share of the cap that is held back: the meter adds up the same numbers in another order
ROUNDING = 1e-9


@dataclass(frozen=True)
class Account:
    """The books of one text."""

    inner: Any  # the state of the schedule that is capped
    emitted: int  # new tokens
    spent: float  # nats charged for them


class Ledger(Schedule):
    r"""Follow a policy as far as the answer's allowance goes, and be lossless beyond it.

    Guarantee: for every answer and every t, what the meter charges for its first t tokens is at
    most ``cap · t + burst`` nats of KL, or of regret for a policy of temperature 0, so that an
    answer may end anywhere, by itself, inside a draft or by a limit. It holds for each text of a
    batch, by itself, under the verifiers ``chain``, ``block`` and ``tree``, and not on average but
    always.

    Why (the proof is THEORY.md, Theorem 17): what a row is charged under a policy is known before
    its token is judged, and a row is given only a policy with whose charge the answer stays within
    the cap, which ``speculative``, or strict greedy decoding, charged 0, always does. Tokens that
    were not drafted cost nothing.

    A policy with a price is also tried at higher prices, up to 8 times its own, and the price
    rises as credit runs out: a row is first offered the price times √(4/c), where c is the
    credit in tokens' worth, (cap · t + burst − spent)/cap. A steady price buys more tokens than
    spending all at once, and the price of the policy, its lowest, need not be tuned to the cap.
    Any other policy is followed where its charge fits. Along a deterministic draft in a block
    ``regret`` keeps the n tokens that maximise n − ν Σ ρ among those whose charges fit, with ν
    raised likewise (THEORY.md, Theorem 30): tokens that only pay with one that does not fit are
    not kept.

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
        policies, numbers = list[Policy](), []
        for own in inner.policies:
            strict = read_policy(defaults.STRICT if own.unit == REGRET else defaults.POLICY)
            ladder = (*_ladder(own), strict)
            if own.unit == REGRET and KEEP not in policies:
                policies.append(KEEP)
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
        return Account(self.inner.begin(prompt), 0, 0.0)

    def advance(self, state: Account, new_ids: Sequence[int]) -> Account:
        inner = self.inner.advance(state.inner, new_ids)
        return replace(state, inner=inner, emitted=state.emitted + len(new_ids))

    def choose(self, state: Account, drafted: Int[Tensor, "K"]) -> Int[Tensor, "K"]:
        """Raise NotImplementedError: a ledger chooses by rows and paths (``choose_by_nodes``)."""
        raise NotImplementedError("choose: a ledger needs rows and paths; call choose_by_nodes")

    def choose_by_nodes(
        self,
        state: Account,
        target_probs: Float[Tensor, "1 K1 vocab"],
        draft: Draft,
        verifier: Verifier,
    ) -> tuple[Int[Tensor, "nodes"], dict[int, Node]]:
        """Return for each node the first policy of its ladder that the allowance has room for."""
        of_inner, _ = self.inner.choose_by_nodes(state.inner, target_probs, draft, verifier)
        numbers, nodes = of_inner.tolist(), dict[int, Node]()
        planned = self._planned(state, numbers, target_probs, draft, verifier)
        spent, alive = [state.spent] * len(numbers), [1.0] * len(numbers)
        seen = cache(lambda tilt: colder(target_probs, tilt))

        @cache
        def rows(own: Policy) -> Nodes:
            tilt = tilt_of(own)
            rung = Assignment(
                (untilted(own),), tilts=(tilt,), target=target_probs if tilt else None
            )
            return Nodes(verifier, rung, seen(tilt), draft)

        for node in range(draft.lengths[0] + 1):
            if node:
                above = draft.above[0][node - 1]
                spent[node] = spent[above] + nodes[above].charge().spent
                # P begins anew after tokens that were not sampled
                if verifier.by_path and draft.judged(0, above) == node - 1:
                    alive[node] = nodes[above].next_alive
            allowed = self.cap * (state.emitted + draft.depths[0][node] + 1) * (1 - ROUNDING)
            allowed += self.burst - spent[node]

            def at(number: int, node: int = node) -> Node:
                return rows(self.policies[number]).at(0, node, alive[node])

            ladder = self.numbers[numbers[node]] if planned is None else [planned[node]]
            numbers[node], nodes[node] = self._fitting(ladder, allowed, at)
        return of_inner.new_tensor(numbers), nodes

    def observe(self, state: Account, nodes: Sequence[Node]) -> Account:
        spent = state.spent + sum(node.charge().spent for node in nodes)
        inner = self.inner.observe(state.inner, self.inner.shown(nodes))
        return replace(state, inner=inner, spent=spent)

    def _planned(
        self,
        state: Account,
        numbers: Sequence[int],
        target_probs: Float[Tensor, "1 K1 vocab"],
        draft: Draft,
        verifier: Verifier,
    ) -> list[int] | None:
        """Return the policy of each node where the best stop within the cap is known, else None."""
        own = self.policies[self.numbers[numbers[0]][0]]
        one_path = isinstance(verifier, Block) and draft.is_chain and draft.probs is None
        regret = isinstance(own, Regret) and own.price is not None and own.price < math.inf
        if not (regret and one_path and len({*numbers}) == 1):
            return None
        assert isinstance(own, Regret) and own.price is not None
        count = draft.lengths[0]
        ids = draft.token_ids[:1, :count]
        lost = losses(target_probs[:, :count], ids)[0][0].cpu()
        room = self.cap * (state.emitted + 1 + torch.arange(count, device="cpu")) * (1 - ROUNDING)
        fits = (lost.cumsum(0) <= room + self.burst - state.spent).long().cumprod(0)
        credit = self.cap * (state.emitted + 1) + self.burst - state.spent
        short = PATIENCE * self.cap / max(credit, ROUNDING)
        price = own.price * math.sqrt(max(short, 1.0))
        worth = torch.where(fits > 0, 1 - price * lost, -math.inf).nan_to_num(-math.inf).cumsum(0)
        best = float(worth.max()) if count else -math.inf
        kept = int((worth >= best).nonzero()[-1]) + 1 if best >= 0 else 0
        keep, strict = map(self.policies.index, (KEEP, read_policy(defaults.STRICT)))
        return [keep if node < kept else strict for node in range(count + 1)]

    def _fitting(
        self, ladder: Sequence[int], allowed: float, at: Callable[[int], Node]
    ) -> tuple[int, Node]:
        """Return the first policy from the suggested rung on whose charge fits, and its node."""
        # the first to try: 0 with PATIENCE tokens' worth of credit or more
        rung, last = 0, len(ladder) - 1
        if allowed <= 0:
            rung = last
        elif last > 1 and allowed < PATIENCE * self.cap:
            short = math.log(PATIENCE * self.cap / allowed) / (2 * math.log(STEP))
            rung = min(math.ceil(short), last)
        while True:
            node = at(ladder[rung])
            if rung == last or (charge := node.charge().spent) <= allowed:
                return ladder[rung], node
            # a charge falls about as the square of the price, so that STEP² fits the excess
            over = math.log(charge / allowed) / (2 * math.log(STEP)) if charge < math.inf else 0.0
            rung = min(rung + max(1, math.floor(over)), last)


def _ladder(policy: Policy) -> tuple[Policy, ...]:
    """Return a policy and, if it has a price, the policy at RUNGS − 1 higher prices."""
    price = getattr(policy, "price", None)
    if not isinstance(price, float) or not 0 < price < math.inf:
        return (policy,)
    prices = [price * STEP**rung for rung in range(1, RUNGS)]
    return (policy, *(replace(policy, price=higher) for higher in prices))  # type: ignore
