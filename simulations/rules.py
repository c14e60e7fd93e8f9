r"""Lossy rules of engines and papers, as policies; ``FIELD`` lists all of them with their settings.

After ``import simulations.rules`` a rule's name is a spec, such as ``cascade_opt:alpha=0.5``. On
the command line the same rule is ``--policy simulations/rules.py:cascade_opt:alpha=0.5``. If a rule
equals a policy of this package under another name, ``FIELD`` names that policy, and the rule has no
function here. paper_figures/results/engines.md has the list as a table, with each rule's cost.

Left out are rules that rows of probabilities do not decide: MARS (raw logits), ASD (a budget for
each request), and vLLM's ``synthetic`` (accepts at given rates, whatever was drafted).
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import cactus_theory as ct
from cactus_theory.base import arguments as check
from cactus_theory.policies import SharedResidual
from cactus_theory.policies.accepted_sets import TopK
from cactus_theory.policies.knob_values import Count, NotNegative
from cactus_theory.policies.policy import accept_probability, normalised_or, one_hot
from cactus_theory.verify import Assignment, Chain, Draft, Verdict, VerdictLaw, Verifier
from cactus_theory.verify.draw import pick

# slack of a comparison with a sum over the vocabulary, so that rounding of the sum decides no tie
SLACK = 1e-12
# a cascade emits either p or q at a row; in the paper alpha ≥ 0, and at −2 q is always emitted
CASCADE: dict[str, Any] = {
    "vectorised": True, "direction": 1, "strict": -2.0, "knob_range": (-2.0, 2.0), "between": True,
    "at_least_speculative": True, "continuous": False, "support": "free",
}  # fmt: skip
# a token rule may accept less at a larger alpha, and may accept less than lossless sampling
TOKENS: dict[str, Any] = {
    "vectorised": True, "strict": -1.0, "knob_range": (-1.0, 1.0), "continuous": False,
    "support": "free",
}  # fmt: skip


def top(row: Tensor) -> Tensor:
    """Return the largest probability of each row, (..., 1)."""
    return row.double().amax(-1, keepdim=True)


@ct.rule(**CASCADE)
def cascade_chow(q, p, *, alpha=0.2):
    """Emit p where the draft is confident, max p ≥ 1 − α, else q (arXiv 2405.19261, Chow)."""
    return torch.where(top(p) < 1 - alpha, q, p)


@ct.rule(**CASCADE)
def cascade_diff(q, p, *, alpha=0.2):
    """Emit p where max p ≥ max q − α, else q (arXiv 2405.19261, equation 5)."""
    return torch.where(top(p) < top(q) - alpha, q, p)


@ct.rule(**CASCADE)
def cascade_opt(q, p, *, alpha=0.2):
    """Emit p where max p ≥ max q − α TV(p, q), else q (arXiv 2405.19261, equation 10).

    As |max p − max q| ≤ TV, the rule is lossless for α < −1 and emits p for α ≥ 1.
    """
    apart = (q.double() - p.double()).clamp(min=0.0).sum(-1, keepdim=True)
    return torch.where(top(p) < top(q) - alpha * apart - SLACK, q, p)


def by_token(q: Tensor, p: Tensor, kept: Tensor) -> Tensor:
    """Return the emitted law p on the kept tokens plus q times the draft's mass off them."""
    others = torch.where(kept, 0.0, p.double())
    return torch.where(kept, p.double(), 0.0) + others.sum(-1, keepdim=True) * q.double()


@ct.rule(**TOKENS)
def cascade_token_1(q, p, *, alpha=0.2):
    """Accept n if p_n ≥ max q − α, else draw from q (arXiv 2405.19261, equation 13)."""
    return by_token(q, p, p.double() >= top(q) - alpha)


@ct.rule(**TOKENS)
def cascade_token_2(q, p, *, alpha=0.2):
    """Accept n if q_n ≥ max q − α, else draw from q (arXiv 2405.19261, equation 14)."""
    return by_token(q, p, q.double() >= top(q) - alpha)


@ct.rule(**TOKENS)
def cascade_token_3(q, p, *, alpha=0.95):
    """Accept n if q_n ≥ (1 − α) max q, else draw from q (arXiv 2405.19261, equation 15)."""
    return by_token(q, p, q.double() >= top(q) * (1 - alpha))


@ct.rule(
    vectorised=True, direction=-1, strict=1.0, knob_range=(0.01, 1.0), between=True,
    at_least_speculative=True,
)  # fmt: skip
def power_lenience(q, p, *, epsilon=0.5):
    """Accept n with min(1, q_n^ε/p_n), else draw from (q − p)₊ (DistillSpec, arXiv 2310.08461)."""
    q, p = q.double(), p.double()
    accepted = torch.minimum(p, q**epsilon)
    lost = (p - accepted).sum(-1, keepdim=True)
    return accepted + lost * normalised_or((q - p).clamp(min=0.0), q)


@dataclass(frozen=True)
class LogitComparison(SharedResidual):
    """Accept n iff ln p_n ≤ ln q_n + ε, else draw from q.

    MAX compares raw logits instead, which differ by the normalising constants of the two rows.
    """

    eps: NotNegative = 1e-5
    name = "logit_comparison"
    knob = "eps"

    @property
    def declares(self) -> ct.Declaration:
        """Return the declaration: no budget; acceptance grows with ε."""
        return ct.Declaration(direction=1, continuous=False)

    def acceptance(self, q: Tensor, p: Tensor, n: Tensor) -> Tensor:
        """Return 1 where p_n is at most e^ε q_n and q_n > 0, else 0."""
        q_n, p_n = (row.double().gather(-1, n) for row in (q, p))
        return ((p_n * math.exp(-self.eps) <= q_n) & (q_n > 0)).double()

    def residual(self, q: Tensor, p: Tensor, n: Tensor) -> Tensor:
        """Return q, from which the recovered token is drawn."""
        return q.double()


@dataclass(frozen=True)
class TopKOfCactus(TopK):
    """Accept the target's k likeliest tokens, else draw ∝ 1 − p among them (ties, q_n > 0).

    The published code also accepts tokens with q = 0 where k exceeds the target's support.
    """

    k: Count = 10
    name = "top_k_of_cactus"

    def residual(self, q: Tensor, p: Tensor, n: Tensor) -> Tensor:
        """Return 1 − p among the accepted tokens, normalised; q where nothing is left."""
        rest = torch.where(self.chosen(q), 1 - p.double(), 0.0).clamp(min=0.0)
        return normalised_or(rest, q.double())


# instances for ``--policy simulations/rules.py:NAME``
logit_comparison, top_k_of_cactus = LogitComparison(), TopKOfCactus()


@dataclass(frozen=True)
class Fly(Verifier):
    r"""A chain that overrides a rejection if the target is undecided and the next tokens pass.

    Let a_j be the lossless acceptance probability of drafted token j. A rejection at place i is
    overridden, and n_i accepted, iff −Σ q ln q ≥ θ over the k largest of q_i (not renormalised),
    the next W drafted tokens pass their own coins, q_i(n_i) > 0, and i + W < K. So with o_i = 1
    where the first and the last two conditions hold, A_i = a_{i+1}…a_{i+W}, and R_0 = 1:

    .. math:: R_{i+1} \mathrel{+}= R_i a_i, \quad R_{i+W+1} \mathrel{+}= R_i (1−a_i) o_i A_i,
        \qquad \Pr(τ = i) = R_i (1−a_i)(1 − o_i A_i), \quad \Pr(τ = K) = R_K.

    The law of the number τ of accepted tokens is exact. The emitted distribution at a row depends
    on the tokens that would follow tokens that were not drafted. This distribution is exact for a
    deterministic draft and *an estimate* for a sampled draft, where the tokens after the drafted
    token stand in for the tokens after every other token of the row. Source: arXiv 2511.22972;
    vLLM's documentation of ``rejection_sample_method="fly"``.

    Attributes
    ----------
    window : W ≥ 1; None for vLLM's min(6, K − 1).
    entropy : θ, in nats.
    k : number of the largest probabilities in the entropy.
    """

    window: int | None = None
    entropy: float = 0.3
    k: int = 3
    name = "fly"

    def __post_init__(self) -> None:
        if self.window is not None:
            object.__setattr__(self, "window", check.as_whole_number("window", self.window, 1))
        object.__setattr__(self, "entropy", check.number("entropy", self.entropy, 0))
        object.__setattr__(self, "k", check.as_whole_number("k", self.k, 1))

    def check(self, policy: ct.Policy) -> None:
        """Raise ValueError for a lossy policy: vLLM's rule starts from lossless verification."""
        if policy.name != "speculative":
            raise ValueError(
                f"verifier: fly overrides rejections of speculative; got {policy.spec}"
            )

    def emitted(self, policy: ct.Policy, *rows: Any) -> Any:
        """Raise NotImplementedError: the law at a row depends on later rows, too."""
        raise NotImplementedError("verifier: fly has no law of a single row; give meter=False")

    def verify(
        self, assigned: Assignment, target_probs: Tensor, draft: Draft, accept: Tensor, draw: Tensor
    ) -> Verdict:
        """Return the accepted tokens and the last token for given random numbers."""
        last, chances, window, unsure, possible = self._places(assigned, target_probs, draft)
        passed, row = (accept < chances).double(), torch.arange(len(window), device=window.device)
        overridden = following(passed, window)[row, :, window] * (unsure & possible)
        accepted = (passed + overridden > 0).long().cumprod(-1).sum(-1)
        return Verdict(draft.token_ids, accepted, pick(last[row, accepted], draw))

    def law(self, assigned: Assignment, target_probs: Tensor, draft: Draft) -> VerdictLaw:
        """Return the law of the verdict; for a sampled draft ``emitted`` is an estimate.

        A recursion along the path: ``waiting[:, c]`` is the probability of having overridden a
        rejection that needs c more tokens to pass. ``waiting[:, 0]`` is R, the probability of being
        in no such window, where a round may end.
        """
        q, ids = target_probs.double(), draft.token_ids
        last, chances, window, unsure, possible = self._places(assigned, q, draft)
        p = one_hot(ids, q) if draft.probs is None else draft.probs.double()
        row, goes_on = torch.arange(len(window), device=q.device), following(chances, window)
        stop, free, emitted = [], [], torch.zeros_like(p)
        waiting = q.new_zeros(goes_on.shape[::2])
        waiting[:, 0] = 1.0
        for place in range(ids.shape[1]):
            q_i, p_i, a_i, gate = q[:, place], p[:, place], chances[:, place], unsure[:, place]
            ahead = goes_on[:, place]
            overlap, beyond = torch.minimum(p_i, q_i), (p_i - q_i).clamp(min=0.0)
            deferred = beyond * (q_i > 0) * (gate * ahead[row, window])[:, None]
            lost = (beyond - deferred).sum(-1, keepdim=True)
            mass = waiting[:, :1] * (overlap + deferred + lost * last[:, place])
            bound = (ahead[:, :-1] * waiting[:, 1:]).sum(-1, keepdim=True)
            emitted[:, place] = normalised_or(mass + bound * overlap, q_i)
            free.append(waiting[:, 0])
            overridden = waiting[:, 0] * (1 - a_i) * (gate & possible[:, place])
            stop.append(waiting[:, 0] * (1 - a_i) - overridden * ahead[row, window])
            passed = waiting[:, :2].sum(-1, keepdim=True), waiting[:, 2:], 0 * waiting[:, :1]
            waiting = a_i[:, None] * torch.cat(passed, -1)
            waiting[row, window] += overridden
        counts = torch.as_tensor(draft.counts, device=q.device)
        left = counts[:, None] - torch.arange(last.shape[1], device=q.device)
        ends = torch.stack([*free, waiting[:, 0]], -1) * (left == 0)
        ends += torch.stack([*stop, waiting[:, 0]], -1) * (left > 0)
        alive = ends.flip(-1).cumsum(-1).flip(-1)
        return VerdictLaw(ends, last, alive, emitted * (left[:, :-1, None] > 0))

    def _places(
        self, assigned: Assignment, q: Tensor, draft: Draft
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the chain's last rows, a, W, whether q is undecided, and whether q_n > 0."""
        law, ids = Chain().law(assigned, q, draft), draft.token_ids
        counts = torch.as_tensor(draft.counts, device=q.device)
        rows = q[:, : ids.shape[1]].double()
        q_n = rows.gather(-1, ids[..., None])[..., 0]
        p_n = 1.0 if draft.probs is None else draft.probs.gather(-1, ids[..., None])[..., 0]
        on = torch.arange(ids.shape[1], device=q.device) < counts[:, None]
        chances = accept_probability(q_n, torch.as_tensor(p_n).double()) * on
        largest = rows.topk(min(self.k, rows.shape[-1]), -1).values
        unsure = -torch.xlogy(largest, largest).sum(-1) >= self.entropy
        window = (counts - 1).clamp(1, 6) if self.window is None else 0 * counts + self.window
        return law.last, chances, window, unsure, q_n > 0


def following(passed: Tensor, window: Tensor) -> Tensor:
    """Return the products (B, K, W + 1) of the next 0 to W values; 0 where fewer follow."""
    most = int(window.max())
    padded = torch.cat([passed, passed.new_zeros(len(passed), most)], 1)
    after = padded.unfold(1, most, 1)[:, 1:].cumprod(-1)
    return torch.cat([torch.ones_like(after[..., :1]), after], -1)


class Shipped(NamedTuple):
    """A rule as an engine ships it or a paper publishes it.

    ``policy`` has the rule's default, or a published value if the default is lossless or missing.
    ``engine`` has the rule, ``flag`` is the option there, ``source`` documents it, and ``verifier``
    is the verifier that the rule needs.
    """

    policy: str | ct.Policy
    engine: str
    flag: str
    source: str
    verifier: str | Verifier = "chain"


CASCADES, CACTUS, FLY = "arXiv 2405.19261", "arXiv 2604.04987", "arXiv 2511.22972; vLLM's fly.md"
TENSORRT, MAX = "MTPDecodingConfig", "max/pipelines/speculative/config.py"
MAX_LOGITS = "max/nn/sampling/rejection_sampler.py"
# fmt: off
FIELD = {name: Shipped(*entry) for name, entry in {
    "lossless": ("speculative", "vLLM and others", "–", "arXiv 2211.17192"),
    "compared": ("thresholds", "SGLang, llama.cpp", "--speculative-accept-threshold-acc",
                 "speculative_sampling.cuh"),
    "relaxed_tensorrt": ("relaxed:k=1,delta=0,recover=argmax", "TensorRT-LLM", "relaxed_delta",
                         TENSORRT),
    "relaxed_tensorrt_example": ("relaxed:k=10,delta=0.01,recover=argmax", "TensorRT-LLM",
                                 "relaxed_delta", TENSORRT),
    "relaxed_max": ("relaxed:k=10,delta=0.6", "MAX", "relaxed_delta", MAX),
    "relaxed_atom": ("relaxed:k=10,delta=0.6,recover=argmax", "ATOM", "–", "rejection_sampler.py"),
    "logits_max": (logit_comparison, "MAX", "eps", MAX_LOGITS),
    "medusa": ("typical", "Medusa", "posterior_threshold", "arXiv 2401.10774"),
    "typical_mtplx": ("typical:epsilon=1,alpha=0.09,recover=target", "MTPLX",
                      "--typical-threshold", "MTPLX#478"),
    "cascade_mtplx": ("cascade_token_3", "MTPLX", "--cascade-threshold", "MTPLX#485"),
    "cascade_chow": ("cascade_chow", "paper", "α", CASCADES),
    "cascade_diff": ("cascade_diff", "paper", "α", CASCADES),
    "cascade_opt": ("cascade_opt", "paper, MTPLX", "--cascade-rule opt", CASCADES),
    "cascade_token_1": ("cascade_token_1", "paper, MTPLX", "--cascade-rule tokenv1", CASCADES),
    "cascade_token_2": ("cascade_token_2", "paper, MTPLX", "--cascade-rule tokenv2", CASCADES),
    "ensemble": ("mixture:alpha=0.3,support=free", "Transformers", "assistant_ensemble_weight",
                 "arXiv 2604.07622"),
    "cactus_hipfire": ("cactus:delta=1", "hipfire", "cactus_delta", "hipfire#492"),
    "cactus_exact": ("cactus_exact:delta=0.1", "this package", "delta", CACTUS),
    "band": ("band:price=2", "this package", "price", "THEORY.md, Theorem 7"),
    "lenience": ("lenience:lenience=0.5", "paper", "ℓ", "arXiv 2211.17192, A.5"),
    "power_lenience": ("power_lenience", "paper", "ε", "arXiv 2310.08461"),
    "fuzzy": ("fuzzy:threshold=0.1", "paper", "T", "arXiv 2502.20704"),
    "bild": ("typical:epsilon=0.00033546,alpha=inf", "BiLD", "rollback", "arXiv 2302.07863"),
    "top_k": ("top_k:k=10", "paper", "k", CACTUS),
    "top_k_of_cactus": (top_k_of_cactus, "Cactus's code", "k", CACTUS),
    "tempered": ("speculative:tilt=0.25", "baseline", "temperature", "arXiv 2607.08690"),
    "truncated": ("truncated:top_p=0.95", "baseline", "top_p", "arXiv 2607.26627"),
    "fly": ("speculative", "vLLM", "fly_window_size", FLY, Fly()),
    "fly_4": ("speculative", "vLLM", "fly_window_size", FLY, Fly(4)),
    "fly_2": ("speculative", "vLLM", "fly_window_size", FLY, Fly(2)),
}.items()}
# fmt: on
