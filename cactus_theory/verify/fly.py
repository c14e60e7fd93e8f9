r"""Verify a chain as FLy does: a refusal is deferred where the target is unsure, if all goes well.

Let a_j = φ(n_j) be the chance that the policy keeps drafted token j. A refusal at place i is
overridden, and n_i kept, iff

1. :math:`−Σ q \ln q ≥ θ` over the k largest of q_i (not renormalised),
2. the policy keeps all of the next W drafted tokens,
3. q_i(n_i) > 0, and
4. i + W < K: so many tokens are there.

The first refusal that is not overridden ends the round; its token comes from the policy's
recovery law. So with R_0 = 1 and A_i = a_{i+1}…a_{i+W}

.. math:: R_{i+1} \mathrel{+}= R_i a_i, \quad R_{i+W+1} \mathrel{+}= R_i (1−a_i) o_i A_i,
    \qquad \Pr(τ = i) = R_i (1−a_i)(1 − o_i A_i), \quad \Pr(τ = K) = R_K,

o_i = 1 where 1, 3 and 4 hold. Lossy whatever the policy: the law at i depends on rows after
tokens that were not drafted, and after an override the next W tokens are those that were kept,
which is not the target's law either. Source: FLy, arXiv 2511.22972; vLLM's documentation
(``rejection_sample_method="fly"``) and ``vllm/v1/spec_decode/fly.py``.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cactus_theory import _arguments as check
from cactus_theory.policies import Policy
from cactus_theory.policies._base import one_hot
from cactus_theory.policies.relaxed import Relaxed
from cactus_theory.policies.sample_and_match import SampleAndMatch
from cactus_theory.policies.speculative import Speculative
from cactus_theory.policies.top_k import whole
from cactus_theory.verify.contract import Assignment, Draft, Verdict, VerdictLaw, Verifier
from cactus_theory.verify.draw import NO_TOKEN, pick
from cactus_theory.verify.registry import register_verifier

# vLLM looks at so many tokens after a refusal where the draft has as many
WINDOW = 6


@register_verifier("fly")
@dataclass(frozen=True)
class Fly(Verifier):
    """A chain whose refusals are overridden where the target is unsure and the draft goes on well.

    The policy is vLLM's lossless rule: ``speculative``, or ``relaxed:k=1,recover=argmax`` with
    ``bonus=argmax`` for a greedy target, on rows of the temperature that its gate sees.

    Attributes
    ----------
    window : W ≥ 1; None for min(6, K − 1), K the tokens that the row's draft could have had.
        (vLLM takes the configured K, also for the shorter drafts before a length limit.)
    entropy : θ in nats; k : how many of the largest probabilities count.
    bonus : where the token after a wholly accepted draft comes from: ``target``, or ``argmax``.

    Examples
    --------
    >>> find_verifier("fly:window=2,entropy=0.3").spec
    'fly:window=2'
    """

    window: int | None = None
    entropy: float = 0.3
    k: int = 3
    bonus: str = "target"

    looks_ahead = True

    def __post_init__(self) -> None:
        if self.window is not None:
            object.__setattr__(self, "window", whole("window", self.window))
        object.__setattr__(self, "entropy", check.number("entropy", self.entropy, 0))
        object.__setattr__(self, "k", whole("k", self.k))
        check.one_of("bonus", self.bonus, ("target", "argmax"))

    @property
    def spec(self) -> str:
        """Return the string that ``find_verifier`` takes."""
        knobs = [f"{name}={value}" for name, value in vars(self).items() if value != DEFAULTS[name]]
        return ":".join(filter(None, [self.name, ",".join(knobs)]))

    def check(self, policy: Policy) -> None:
        """Raise for a policy that is not the lossless rule whose refusals are overridden.

        Raises
        ------
        ValueError
            Another policy.
        """
        greedy = isinstance(policy, Relaxed) and policy.k == 1 and policy.recover == "argmax"
        if not greedy and not isinstance(policy, Speculative | SampleAndMatch):
            raise ValueError(
                "verifier: fly overrides refusals of speculative, of sample_and_match and of "
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
        """Return what is emitted."""
        step = _Native(assigned, target_probs, draft)
        native = accept < step.kept
        window, able = self._overridable(target_probs, draft)
        overridden = able & (_ahead(native.double(), window) > 0)
        stays = (native | overridden) & step.on
        accepted = stays.long().cumprod(-1).sum(-1)
        last = pick(step.after(accepted, self._bonus(target_probs)), draw)
        place = torch.arange(native.shape[1], device=native.device)
        read = step.on & step.kept.isnan() & (place <= (accepted + window)[:, None])
        return Verdict(draft.token_ids, accepted, torch.where(read.any(-1), NO_TOKEN, last))

    def law(
        self,
        assigned: Assignment,
        target_probs: Float[Tensor, "batch K1 vocab"],
        draft: Draft,
    ) -> VerdictLaw:
        """Return the exact law of the verdict given the draft; ``emitted`` is None."""
        q = target_probs.double()
        step = _Native(assigned, q, draft)
        window, able = self._overridable(q, draft)
        ahead = torch.where(able, _ahead(step.kept, window), 0.0)
        batch, width = step.kept.shape
        rows = torch.arange(batch, device=q.device)
        free = q.new_zeros(batch, width + int(window.max()) + 2)
        free[:, 0] = 1.0
        stop = q.new_zeros(batch, width + 1)
        for place in range(width):
            here, kept = free[:, place], step.kept[:, place]
            on, refused = step.on[:, place], here * (1 - step.kept[:, place])
            free[:, place + 1] += torch.where(on, here * kept, 0.0)
            free[rows, place + window + 1] += torch.where(on, refused * ahead[:, place], 0.0)
            stop[:, place] = torch.where(on, refused * (1 - ahead[:, place]), 0.0)
        stop[rows, step.counts] = free[rows, step.counts]
        places = torch.arange(width + 1, device=q.device).expand(batch, -1)
        bonus = self._bonus(q)
        last = torch.stack([step.after(own, bonus) for own in places.T], 1)
        last = torch.where((places <= step.counts[:, None])[..., None], last, 0.0)
        alive = stop.flip(-1).cumsum(-1).flip(-1)
        return VerdictLaw(stop, last, alive, None, step.kept)

    def _overridable(
        self, q: Float[Tensor, "batch K1 vocab"], draft: Draft
    ) -> tuple[Int[Tensor, "batch"], Bool[Tensor, "batch K"]]:
        """Return W of each row, and where a refusal may be overridden: 1, 3 and 4 hold."""
        ids, device = draft.token_ids, q.device
        planned = torch.as_tensor(draft.planned, device=device)
        window = (planned - 1).clamp(max=WINDOW)
        if self.window is not None:
            window = torch.full_like(window, self.window)
        rows = q[:, : ids.shape[1]]
        largest = rows.topk(min(self.k, rows.shape[-1]), -1).values.double()
        unsure = -torch.xlogy(largest, largest).sum(-1) >= self.entropy
        possible = rows.gather(-1, ids[..., None])[..., 0] > 0
        place = torch.arange(ids.shape[1], device=device)
        counts = torch.as_tensor(draft.counts, device=device)
        room = (place + window[:, None] < counts[:, None]) & (window >= 1)[:, None]
        return window.clamp(min=1), unsure & possible & room

    def _bonus(self, q: Float[Tensor, "batch K1 vocab"]) -> Float[Tensor, "batch K1 vocab"]:
        """Return the rows that bonus tokens come from."""
        return q if self.bonus == "target" else one_hot(q.argmax(-1), q)


DEFAULTS = vars(Fly())


class _Native:
    """What the policies decide of each drafted token, by itself.

    Attributes
    ----------
    kept : (B, K) float64, φ of the drafted tokens. ``on`` : (B, K) which places have one.
    counts : (B,) drafted tokens.
    """

    def __init__(
        self, assigned: Assignment, q: Float[Tensor, "batch K1 vocab"], draft: Draft
    ) -> None:
        self.assigned, self.q, self.ids = assigned, q, draft.token_ids
        self.p = one_hot(self.ids, q) if draft.probs is None else draft.probs.to(q.dtype)
        self.counts = torch.as_tensor(draft.counts, device=q.device)
        width = self.ids.shape[1]
        self.on = torch.arange(width, device=q.device) < self.counts[:, None]
        self.kept = q.new_zeros(self.ids.shape, dtype=torch.float64)
        for number, policy in enumerate(assigned.policies):
            own = self.on & self._judged_by(number)
            rows = q[:, :width][own], self.p[own], self.ids[own][:, None]
            self.kept[own] = policy.acceptance(*rows)[:, 0]

    def after(
        self, accepted: Int[Tensor, "batch"], bonus: Float[Tensor, "batch K1 vocab"]
    ) -> Float[Tensor, "batch vocab"]:
        """Return the law of the token after so many accepted ones, the bonus after all."""
        batch = torch.arange(len(accepted), device=accepted.device)
        found = bonus[batch, accepted].double()
        refused = accepted < self.counts
        for number, policy in enumerate(self.assigned.policies):
            own = batch[refused]
            own = own[self._judged_by(number)[own, accepted[own]]]
            at = own, accepted[own]
            found[own] = policy.recovery(self.q[at], self.p[at], self.ids[at]).double()
        return found

    def _judged_by(self, number: int) -> Bool[Tensor, "batch K"]:
        choice = self.assigned.choice
        return torch.ones_like(self.on) if choice is None else choice == number


def _ahead(
    kept: Float[Tensor, "batch K"], window: Int[Tensor, "batch"]
) -> Float[Tensor, "batch K"]:
    """Return the product of the next W values after each place; 0 where there are fewer."""
    width = kept.shape[1]
    place = torch.arange(width, device=kept.device)
    after = place - place[:, None]  # how far column j is after row i
    inside = (after > 0) & (after <= window[:, None, None])
    values = torch.where(inside, kept[:, None].nan_to_num(nan=0.0), 1.0)
    return values.prod(-1) * (place + window[:, None] < width)
