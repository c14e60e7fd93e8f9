r"""Verify a chain as FLy does: a refusal is deferred where the target is unsure, if all goes well.

Let a_j = φ(n_j) be the chance that the policy accepts drafted token j. A refusal at place i is
overridden, and n_i accepted, iff

1. :math:`−Σ q \ln q ≥ θ` over the k largest of q_i (not renormalised),
2. the policy accepts all of the next W drafted tokens,
3. q_i(n_i) > 0, and
4. i + W < K: so many tokens are there.

The first refusal that is not overridden ends the round; its token comes from the policy's
residual law. So with R_0 = 1 and A_i = a_{i+1}…a_{i+W}

.. math:: R_{i+1} \mathrel{+}= R_i a_i, \quad R_{i+W+1} \mathrel{+}= R_i (1−a_i) o_i A_i,
    \qquad \Pr(τ = i) = R_i (1−a_i)(1 − o_i A_i), \quad \Pr(τ = K) = R_K,

o_i = 1 where 1, 3 and 4 hold. Lossy whatever the policy: the law at i depends on rows after
tokens that were not drafted, and after an override the next W tokens are those that were accepted,
which is not the target's law either. Source: FLy, arXiv 2511.22972; vLLM's documentation
(``rejection_sample_method="fly"``) and ``vllm/v1/spec_decode/fly.py``.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.policies import Policy
from cactus_theory.policies._policy import one_hot
from cactus_theory.policies.accepted_sets import Relaxed, Thresholds
from cactus_theory.policies.raised import Speculative
from cactus_theory.verify.chain import Chain
from cactus_theory.verify.contract import VerdictLaw, Verifier, register_verifier
from cactus_theory.verify.draft import Assignment, Draft, Verdict
from cactus_theory.verify.draw import NO_TOKEN, pick

# tokens after a refusal that vLLM looks at, where the draft has as many
WINDOW = 6


@register_verifier("fly")
@dataclass(frozen=True)
class Fly(Verifier):
    """A chain whose refusals are overridden where the target is unsure and the draft goes on well.

    The policy is vLLM's lossless rule: ``speculative``, or ``relaxed:k=1,recover=argmax`` for a
    greedy target, on rows of the temperature that its gate sees.

    Attributes
    ----------
    window : W ≥ 1; None for min(6, K − 1), K the drafted tokens of the row. (vLLM takes the
        configured K, also for shorter drafts, as those before a length limit.)
    entropy : θ in nats; k : how many of the largest probabilities count.
    """

    window: int | None = None
    entropy: float = 0.3
    k: int = 3

    defers = True

    def __post_init__(self) -> None:
        if self.window is not None:
            object.__setattr__(self, "window", check.as_whole_number("window", self.window, 1))
        object.__setattr__(self, "entropy", check.number("entropy", self.entropy, 0))
        object.__setattr__(self, "k", check.as_whole_number("k", self.k, 1))

    def check(self, policy: Policy) -> None:
        """Raise ValueError for a policy other than vLLM's lossless ones.

        Raises
        ------
        ValueError
            Another policy.
        """
        greedy = isinstance(policy, Relaxed) and policy.k == 1 and policy.recover == "argmax"
        if not greedy and type(policy) is not Speculative and policy != Thresholds():
            raise ValueError(
                "verifier: fly overrides refusals of speculative, of thresholds and of "
                f"relaxed:k=1,recover=argmax; got {policy.spec}"
            )

    def verify(
        self,
        assigned: Assignment,
        target_probs: Float[Tensor, "batch K1 vocab"],
        draft: Draft,
        accept: Float[Tensor, "batch coins"],
        draw: Float[Tensor, "batch"],
    ) -> Verdict:
        """Return the verdict; every row is read."""
        chain_law, chances, window, overridable = self._conditions(assigned, target_probs, draft)
        passed, place = accept < chances, torch.arange(accept.shape[1], device=accept.device)
        on = place < torch.as_tensor(draft.counts, device=place.device)[:, None]
        stays = on & (passed | (overridable & (_ahead(passed.double(), window) > 0)))
        accepted = stays.long().cumprod(-1).sum(-1)
        batch = torch.arange(len(accepted), device=place.device)
        last = pick(chain_law.last[batch, accepted], draw)
        read = on & chances.isnan() & (place <= (accepted + window)[:, None])
        return Verdict(draft.token_ids, accepted, torch.where(read.any(-1), NO_TOKEN, last))

    def law(
        self,
        assigned: Assignment,
        target_probs: Float[Tensor, "batch K1 vocab"],
        draft: Draft,
    ) -> VerdictLaw:
        """Return the exact law of the verdict; ``emitted`` is None if the draft is sampled.

        A deterministic draft's later rows are known, so that the next token has a law at each row.
        """
        chain_law, chances, window, overridable = self._conditions(
            assigned, target_probs.double(), draft
        )
        ahead = torch.where(overridable, _ahead(chances, window), 0.0)
        rows = torch.arange(len(window), device=window.device)
        counts = torch.as_tensor(draft.counts, device=window.device)
        stop = torch.zeros_like(chain_law.stop)
        reached = stop.new_zeros(len(stop), stop.shape[1] + int(window.max()) + 1)
        reached[:, 0] = 1.0
        for place, accepted in enumerate(chances.T):
            on, refused = place < counts, reached[:, place] * (1 - accepted)
            reached[:, place + 1] += torch.where(on, reached[:, place] * accepted, 0.0)
            reached[rows, place + window + 1] += torch.where(on, refused * ahead[:, place], 0.0)
            stop[:, place] = torch.where(on, refused * (1 - ahead[:, place]), 0.0)
        stop[rows, counts] = reached[rows, counts]
        alive, emitted = stop.flip(-1).cumsum(-1).flip(-1), None
        if draft.probs is None:
            accepted = alive[:, 1:, None] * one_hot(draft.token_ids, chain_law.last)
            emitted = accepted + stop[:, :-1, None] * chain_law.last[:, :-1]
            emitted = (emitted / alive[:, :-1, None]).nan_to_num(nan=0.0)  # 0 where no draft gets
        return replace(chain_law, stop=stop, alive=alive, emitted=emitted)

    def windows(self, counts: Int[Tensor, "*batch"]) -> Int[Tensor, "*batch"]:
        """Return W for these numbers of drafted tokens; no W fits a draft of one token."""
        if self.window is None:
            return (counts - 1).clamp(1, WINDOW)
        return torch.full_like(counts, self.window)

    def unsure(self, q: Float[Tensor, "*batch vocab"]) -> Bool[Tensor, "*batch"]:
        """Return condition 1: whether the k largest probabilities of a row have an entropy ≥ θ."""
        largest = q.topk(min(self.k, q.shape[-1]), -1).values.double()
        return -torch.xlogy(largest, largest).sum(-1) >= self.entropy

    def _conditions(
        self, assigned: Assignment, q: Tensor, draft: Draft
    ) -> tuple[VerdictLaw, Float[Tensor, "batch K"], Int[Tensor, "batch"], Bool[Tensor, "batch K"]]:
        """Return the chain's law, φ, W, and where conditions 1 and 3 hold."""
        chain_law, ids = Chain().law(assigned, q, draft), draft.token_ids
        counts = torch.as_tensor(draft.counts, device=q.device)
        rows = q[:, : ids.shape[1]]
        overridable = self.unsure(rows) & (rows.gather(-1, ids[..., None])[..., 0] > 0)
        assert chain_law.turns is not None
        return chain_law, chain_law.turns, self.windows(counts), overridable


def _ahead(
    accepted: Float[Tensor, "batch K"], window: Int[Tensor, "batch"]
) -> Float[Tensor, "batch K"]:
    """Return the product of the W values after each place; 0 where fewer follow (condition 4)."""
    width = accepted.shape[1]
    place = torch.arange(width, device=accepted.device)
    after = place - place[:, None]  # distance of column j after row i
    inside = (after > 0) & (after <= window[:, None, None])
    values = torch.where(inside, accepted[:, None].nan_to_num(nan=0.0), 1.0)
    return values.prod(-1) * (place + window[:, None] < width)
