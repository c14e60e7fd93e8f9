"""A hard cap on the nats that an answer spends per token, wherever the answer ends."""

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

# number of prices on a policy's ladder, including the policy's price, and the ratio of each price
# to the price before: the highest is 8 times the lowest
RUNGS, STEP = 7, math.sqrt(2)
# credit in tokens below which prices rise: by STEP each time that the credit falls by STEP². On
# answers of 64 tokens of the shipped pair, 4 spends 93 to 98 % of caps from 0.02 to 0.1, 16 spends
# 82 to 97 % and 64 spends 49 to 89 %; tokens per call at equal KL are the same up to noise
PATIENCE = 4.0
# policy that keeps every drafted token that is not masked
KEEP = read_policy("regret:price=0")
# share of the cap that is held back, as the meter adds up the same charges in another order
ROUNDING = 1e-9


@dataclass(frozen=True)
class Account:
    """State of a ledger along one text: tokens emitted and nats spent."""

    inner: Any  # the state of the schedule that is capped
    emitted: int  # new tokens
    spent: float  # nats charged for the new tokens


class Ledger(Schedule):
    r"""Follow a policy under a hard cap on the nats per token of every answer.

    Where the policy would exceed the cap, decode losslessly.

    Guarantee: for every answer and every t, the meter's charge for the first t tokens is at most
    ``cap · t + burst`` nats, of KL or, for a policy of temperature 0, of regret. So the cap holds
    wherever the answer ends: at an end token, inside a draft or at a length limit. The guarantee
    holds for each text of a batch separately, under the verifiers ``chain``, ``block`` and
    ``tree``, and always, not on average.

    Why (the proof is THEORY.md, Theorem 17): the charge of a row under a policy is known before
    the row's token is judged. A policy is applied to a row only if the answer stays within the cap
    after the policy's charge. ``speculative``, or strict greedy decoding at temperature 0, is
    charged 0 and so always fits. Bonus tokens and tokens of rounds without a draft are charged only
    under a tilt or ``truncated``.

    A policy with a price is also tried at higher prices, up to 8 times the policy's price (the
    *ladder*). Prices rise as the credit falls. At token t the credit, in tokens, is
    c = (cap · t + burst − nats spent before)/cap. The first price tried is the policy's price times
    √(4/c), rounded up to the next price of the ladder. The rule is a heuristic: a steady price buys
    more tokens than spending the whole credit at once, and the policy's price need not be tuned to
    the cap. A policy without a price is followed where its charge fits.

    Along a deterministic draft in a block, ``regret`` keeps the first n tokens, where n maximises
    n − ν Σ ρ among the numbers n whose charges fit. ρ is a token's regret, and ν is the policy's
    price, raised in the same way (THEORY.md, Theorem 30). A token that lowers n − ν Σ ρ is kept
    only if later tokens that make up for the loss fit, too.

    Parameters
    ----------
    policy : a policy, a spec, or a schedule of policies (with ``Between(...)`` the cap holds for
        the whole answer, and nothing is spent outside the section).
    cap : nats per token of the answer, at least 0.
    burst : nats by which an answer may exceed ``cap`` times its number of tokens; at least 0.

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
        """Store ``inner``, the policies to try, and for each policy of ``inner`` its ladder."""
        policies, numbers = list[Policy](), []
        for followed in inner.policies:
            by_regret = followed.unit == REGRET
            strict = read_policy(defaults.STRICT if by_regret else defaults.POLICY)
            ladder = (*_ladder(followed), strict)  # ``strict`` charges 0, so a rung always fits
            if by_regret and KEEP not in policies:  # for :meth:`_planned`
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
        changed = copy.copy(self)  # keeps the class and attributes of a subclass
        changed._cap(inner)
        return changed

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
        """Return for each node the index of the first policy whose charge fits; and solved nodes.

        Nodes are visited from the root down. A charge fits if it is at most cap · t + burst, less
        the nats spent on all tokens before the node's token, which is token t of the answer.
        """
        of_inner, _ = self.inner.choose_by_nodes(state.inner, target_probs, draft, verifier)
        numbers, nodes = of_inner.tolist(), dict[int, Node]()
        planned = self._planned(state, numbers, target_probs, draft, verifier)
        spent, alive = [state.spent] * len(numbers), [1.0] * len(numbers)
        tilted_target = cache(lambda tilt: colder(target_probs, tilt))

        @cache
        def nodes_under(policy: Policy) -> Nodes:
            tilt = tilt_of(policy)
            target = target_probs if tilt else None
            # as :meth:`Assignment.seen` returns it; the rows of each tilt are made once
            without_tilt = Assignment((untilted(policy),), tilts=(tilt,), target=target)
            return Nodes(verifier, without_tilt, tilted_target(tilt), draft)

        for node in range(draft.lengths[0] + 1):
            if node:
                token = node - 1  # token i leads to node i + 1
                above = draft.above[0][token]
                spent[node] = spent[above] + nodes[above].charge().spent
                # P goes on below the token that is judged, and starts at 1 below other tokens
                if verifier.by_path and draft.judged(0, above) == token:
                    alive[node] = nodes[above].next_alive
            # Theorem 17: cap · tokens + burst, less the nats spent on the path
            allowed = self.cap * (state.emitted + draft.depths[0][node] + 1) * (1 - ROUNDING)
            allowed += self.burst - spent[node]

            def node_under(number: int, node: int = node) -> Node:
                return nodes_under(self.policies[number]).at(0, node, alive[node])

            ladder = self.numbers[numbers[node]] if planned is None else [planned[node]]
            numbers[node], nodes[node] = self._fitting(ladder, allowed, node_under)
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
        """Return each node's policy index if ``regret`` judges a deterministic block, else None.

        The first n nodes get the policy KEEP, which accepts every drafted token that is not masked;
        all later nodes get strict greedy decoding. n is the largest maximiser of n − ν Σ ρ among
        the numbers n whose charges fit the cap at every token; ρ are the regrets of the first n
        tokens, and ν is the price, raised as the credit falls.
        """
        policy = self.policies[self.numbers[numbers[0]][0]]
        one_path = isinstance(verifier, Block) and draft.is_chain and draft.probs is None
        regret = isinstance(policy, Regret) and policy.price is not None and policy.price < math.inf
        if not (regret and one_path and len({*numbers}) == 1):
            return None
        assert isinstance(policy, Regret) and policy.price is not None
        count = draft.lengths[0]
        ids = draft.token_ids[:1, :count]
        regrets = losses(target_probs[:, :count], ids)[0][0].cpu()
        caps = self.cap * (state.emitted + 1 + torch.arange(count, device="cpu")) * (1 - ROUNDING)
        fits = (regrets.cumsum(0) <= caps + self.burst - state.spent).long().cumprod(0)
        credit = self.cap * (state.emitted + 1) + self.burst - state.spent
        shortage = PATIENCE * self.cap / max(credit, ROUNDING)
        price = policy.price * math.sqrt(max(shortage, 1.0))
        gains = torch.where(fits > 0, 1 - price * regrets, -math.inf)
        worth = gains.nan_to_num(-math.inf).cumsum(0)  # n − ν Σ ρ for n = 1, 2, …
        best = float(worth.max()) if count else -math.inf
        kept = int((worth >= best).nonzero()[-1]) + 1 if best >= 0 else 0
        keep, strict = map(self.policies.index, (KEEP, read_policy(defaults.STRICT)))
        return [keep if node < kept else strict for node in range(count + 1)]

    def _fitting(
        self, ladder: Sequence[int], allowed: float, at: Callable[[int], Node]
    ) -> tuple[int, Node]:
        """Return the index of the first policy whose charge is at most ``allowed``, and its node.

        The search starts at the price that follows from the credit (see :class:`Ledger`), and goes
        up the ladder. Steps skip prices by a heuristic: a charge falls about as the inverse square
        of the price. The last policy of the ladder charges 0. So the search ends, and the cap holds
        whichever price the search began with. ``at`` maps a policy's index to the node under it.
        """
        # rung 0 with a credit of PATIENCE tokens or more
        rung, last = 0, len(ladder) - 1
        if allowed <= 0:
            rung = last
        elif last > 1 and allowed < PATIENCE * self.cap:  # last = 1: no price, one rung to try
            rungs_up = math.log(PATIENCE * self.cap / allowed) / (2 * math.log(STEP))
            rung = min(math.ceil(rungs_up), last)
        while True:
            node = at(ladder[rung])
            if rung == last or (charge := node.charge().spent) <= allowed:
                return ladder[rung], node
            # an infinite charge tells nothing about the distance: go up one rung
            finite = charge < math.inf
            rungs_up = math.log(charge / allowed) / (2 * math.log(STEP)) if finite else 0.0
            rung = min(rung + max(1, math.floor(rungs_up)), last)


def _ladder(policy: Policy) -> tuple[Policy, ...]:
    """Return a policy and, if the policy has a price, copies at prices up to 8 times as high."""
    price = getattr(policy, "price", None)
    if not isinstance(price, float) or not 0 < price < math.inf:
        return (policy,)
    prices = [price * STEP**rung for rung in range(1, RUNGS)]
    return (policy, *(replace(policy, price=higher) for higher in prices))  # type: ignore
