"""A table of alternative laws of the next token: typical faults of an engine, one line a fault.

A law gives the distribution of the next token from the target's row, the text so far, the claimed
settings and, with a draft, the draft's row. The engine's true law need not be in the table: the
alternative nearest to the true law gathers evidence fastest, and its name hints at the fault.
:mod:`cactus_theory.served.answers` evaluates the table along answers.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.base import defaults
from cactus_theory.decoding.truncation import WHOLE, Cuts
from cactus_theory.divergences.regret import REGRET
from cactus_theory.policies import Policy, read_policy
from cactus_theory.policies.policy import one_hot

# weight of the claimed law in every alternative: without it, one token that an alternative never
# emits would bring the evidence for that alternative to 0 for good
SHARE = 1e-3
# factor on the probability of a token that lies EDGE nats outside the claimed cuts
UNCLAIMED = 1e-3
# nats, of a logit or of the log-odds of a mass, by which the rounding of kernels may move a token
# across a cut. For tokens of probability above 1e-3, bfloat16 moved logits by at most 0.46 and the
# log-odds of masses by at most 0.32 (SmolLM2-135M)
EDGE = 1.0
# names of the policies that emit the target distribution
UNRELAXED = defaults.POLICY, "plain"
# least temperature above 0: engines decode greedily below, as logits over less would overflow
COLDEST = 1e-5
# most entries (rows times vocabulary) that are read at once, which bounds the memory
ENTRIES = 1 << 21

Law = Float[Tensor, "rows vocab"]
Ids = Int[Tensor, "_"]


@dataclass(frozen=True)
class Claim:
    """The settings with which an answer is claimed to be sampled: temperature, cuts, policy."""

    temperature: float = defaults.TEMPERATURE
    cuts: Cuts = WHOLE
    policy: str = defaults.POLICY
    ends: tuple[int, ...] = ()  # ids that end a text

    def __post_init__(self) -> None:
        heat = check.finite("temperature", self.temperature, 0)
        if 0 < heat < COLDEST:
            raise ValueError(f"temperature: must be 0 or at least {COLDEST:g}; got {heat:g}")
        object.__setattr__(self, "temperature", heat)
        if not self.lossless and read_policy(self.policy).unit == REGRET:
            raise ValueError(f"policy: must be one of temperatures above 0; got {self.policy}")

    @property
    def lossless(self) -> bool:
        """Return whether the claimed law is the target distribution."""
        return self.policy in UNRELAXED

    @cached_property
    def rule(self) -> Policy | None:
        """Return the claimed lossy policy, or None for a lossless claim."""
        return None if self.lossless else read_policy(self.policy).at_ends(self.ends)


class Rows:
    """The inputs of the claimed law and the alternative laws at n consecutive places of an answer.

    Attributes
    ----------
    logits : (n, V) logits of the target, float64, before temperature and cuts.
    claim : the settings that the engine claims.
    prompt : ids of the prompt.
    before : ids of the answer before the last of the n places.
    p : (n, V) draft rows after temperature and cuts; None without a draft.
    raw_p : (n, V) draft rows at temperature 1, without cuts; None without a draft.
    late : (1, V) target logits of the place just before the n places. At the beginning of an answer
        there is no such place; then the first row of ``logits``.
    """

    def __init__(
        self,
        logits: Law,
        claim: Claim,
        prompt: Ids,
        before: Ids,
        draft_logits: Law | None = None,
        greedy: bool = False,
        late: Float[Tensor, "1 vocab"] | None = None,
    ) -> None:
        self.logits, self.claim, self.prompt, self.before = logits.double(), claim, prompt, before
        self.p = self.raw_p = None
        if draft_logits is not None:
            scores, cuts = draft_logits.double(), claim.cuts
            heat = claim.temperature or 1.0  # at temperature 0 no law is computed from p
            heated = scores.div(heat).softmax(-1)
            sampled = cut(heated, cuts.draft_top_k or 0, cuts.draft_top_p or 1.0)
            self.p = one_hot(scores.argmax(-1), scores) if greedy else sampled
            self.raw_p = self.p if greedy else scores.softmax(-1)
        self.late = self.logits[:1] if late is None else late.double()

    @cached_property
    def whole(self) -> Law:
        """Return the target's rows at the claimed temperature, before top-k and top-p."""
        return self.logits.div(self.claim.temperature).softmax(-1)

    @cached_property
    def q(self) -> Law:
        """Return the target's rows with the claimed temperature, top-k and top-p."""
        return self.cut()

    @cached_property
    def h(self) -> Law:
        """Return the law that is claimed for a token at a place with a draft."""
        return self.emitted(self.q)

    @cached_property
    def order(self) -> Int[Tensor, "rows vocab"]:
        """Return the token ids of each row, the target's likeliest token first."""
        return self.logits.argsort(-1, descending=True)

    def cut(
        self,
        heat: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
    ) -> Law:
        """Return the target's rows as claimed, except for the settings that are given."""
        claim = self.claim
        heat = claim.temperature if heat is None else heat
        probs = self.whole if heat == claim.temperature else self.logits.div(heat).softmax(-1)
        top_k = claim.cuts.top_k if top_k is None else top_k
        return cut(probs, top_k, claim.cuts.top_p if top_p is None else top_p, self)

    def emitted(self, q: Law) -> Law:
        """Return the law that the claimed policy emits if the target's rows are ``q``."""
        rule = self.claim.rule
        return q if rule is None or self.p is None else rule.emitted(q, self.p)

    @cached_property
    def counts(self) -> Law:
        """Return how often each token occurs in the answer before each place."""
        # ``before`` ends before the last of the n places: ids before the first of them
        first = len(self.before) - len(self.logits) + 1
        counts = torch.zeros_like(self.logits)
        counts[0] = torch.bincount(self.before[:first], minlength=counts.shape[-1])
        for place in range(1, len(counts)):
            counts[place] = counts[place - 1]
            counts[place, self.before[first + place - 1]] += 1
        return counts

    @cached_property
    def prompted(self) -> Float[Tensor, "vocab"]:
        """Return how often each token occurs in the prompt."""
        return torch.bincount(self.prompt, minlength=self.logits.shape[-1]).double()


def cut(probs: Law, top_k: int, top_p: float, rows: Rows | None = None) -> Law:
    """Return rows cut to the k likeliest tokens (0: all; ties stay), then to the nucleus of mass p.

    If ``probs`` ranks the tokens as the target does, ``rows`` gives their order and saves a sort.
    """
    if not top_k and top_p >= 1:
        return probs
    order = probs.argsort(-1, descending=True) if rows is None else rows.order
    falling = probs.gather(-1, order)
    if 0 < top_k < falling.shape[-1]:
        falling = torch.where(falling >= falling[:, top_k - 1 : top_k], falling, 0.0)
        falling = falling / falling.sum(-1, keepdim=True)
    if top_p < 1:  # a token stays if the likelier tokens have less mass than top_p
        falling = torch.where(falling.cumsum(-1) - falling < top_p, falling, 0.0)
    falling = falling / falling.sum(-1, keepdim=True)
    return torch.zeros_like(probs).scatter_(-1, order, falling)


def blend(share: float, other: Callable[[Rows], Law]) -> Callable[[Rows], Law]:
    """Return the law that mixes ``other``, with weight ``share``, with the claimed law."""
    return lambda rows: (1 - share) * rows.h + share * other(rows)


def _heated(rows: Rows, heat: Callable[[float], float]) -> Law:
    return rows.emitted(rows.cut(heat(rows.claim.temperature)))


def _nucleus_first(rows: Rows) -> Law:
    cuts = rows.claim.cuts
    return rows.emitted(cut(cut(rows.whole, 0, cuts.top_p, rows), cuts.top_k, 1.0, rows))


def _cut_cold(rows: Rows) -> Law:
    """Return the law of an engine that applies top-k and top-p before the temperature."""
    claim, raw = rows.claim, rows.logits.softmax(-1)
    kept = cut(raw, claim.cuts.top_k, claim.cuts.top_p, rows) > 0
    scores = rows.logits.masked_fill(~kept, -torch.inf)
    return rows.emitted(scores.div(claim.temperature).softmax(-1))


def _further(rows: Rows, top_k: int, top_p: float) -> Law:
    return rows.emitted(cut(rows.q, top_k, top_p, rows))


def _above(rows: Rows, share: float) -> Law:
    kept = torch.where(rows.q >= share * rows.q.amax(-1, keepdim=True), rows.q, 0.0)
    return rows.emitted(kept / kept.sum(-1, keepdim=True))


def _penalised(rows: Rows, repeated: float = 1, present: float = 0, frequent: float = 0) -> Law:
    """Return the law of an engine that lowers the logits of tokens that already occurred.

    ``repeated`` lowers tokens of the prompt and of the answer; ``present`` and ``frequent`` lower
    tokens of the answer only.
    """
    scores = rows.logits
    if repeated != 1:
        harder = torch.where(scores > 0, scores / repeated, scores * repeated)
        scores = torch.where(rows.counts + rows.prompted > 0, harder, scores)
    else:
        scores = scores - present * (rows.counts > 0) - frequent * rows.counts
    claim = rows.claim
    probs = scores.div(claim.temperature).softmax(-1)
    # without ``rows``: the penalty may change the order of the tokens
    return rows.emitted(cut(probs, claim.cuts.top_k, claim.cuts.top_p))


def _tail(rows: Rows, factor: float) -> Law:
    """Return the law of an engine that multiplies by ``factor`` the q of unlikely tokens.

    These are the tokens with less than a tenth of the largest q.
    """
    low = rows.q < 0.1 * rows.q.amax(-1, keepdim=True)
    moved = torch.where(low, factor * rows.q, rows.q)
    return rows.emitted(moved / moved.sum(-1, keepdim=True))


def _likeliest(rows: Rows) -> Law:
    return one_hot(rows.q.argmax(-1), rows.q)


def _uniform(rows: Rows) -> Law:
    return torch.full_like(rows.q, 1 / rows.q.shape[-1])


def _of_prompt(rows: Rows) -> Law:
    return (rows.prompted / rows.prompted.sum()).expand_as(rows.q)


def _row_before(rows: Rows) -> Law:
    """Return the target's row of the place before, as after an off-by-one error."""
    logits = torch.cat([rows.late, rows.logits[:-1]])
    cuts = rows.claim.cuts
    return cut(logits.div(rows.claim.temperature).softmax(-1), cuts.top_k, cuts.top_p)


def _policy(spec: str) -> Callable[[Rows], Law]:
    return lambda rows: read_policy(spec).emitted(rows.q, rows.p)  # type: ignore[arg-type]


def _from_target(rows: Rows) -> Law:
    """Return the law of an engine that draws recovered tokens from q, not from (q − p)₊."""
    q, p = rows.q, rows.p
    assert p is not None
    kept = torch.minimum(q, p)
    return kept + (1 - kept.sum(-1, keepdim=True)) * q


def _without_rejected(rows: Rows) -> Law:
    """Return the law of an engine that draws the recovered token from q without the rejected token.

    The probability of x is min(q, p)(x) + Σ over n ≠ x of (p − q)₊(n) q(x)/(1 − q(n)).
    """
    q, p = rows.q, rows.p
    assert p is not None
    lost = (p - q).clamp(min=0.0) / (1 - q).clamp(min=1e-300)
    return torch.minimum(q, p) + q * (lost.sum(-1, keepdim=True) - lost)


def _coin_twice(rows: Rows) -> Law:
    r"""Return the law of an engine that draws the recovered token with the coin of the rejection.

    A coin that rejected n is uniform above :math:`a_n = q_n/p_n`, not on all of [0, 1). With F the
    distribution function of the residual and :math:`G(u) = Σ_n p_n (u - a_n)_+`, the recovered
    token is x with probability :math:`G(F(x)) - G(F(x^-))`.
    """
    q, p = rows.q, rows.p
    assert p is not None
    rest = (q - p).clamp(min=0.0)
    total = rest.sum(-1, keepdim=True)
    ends = (rest / total.clamp(min=1e-300)).cumsum(-1).clamp(max=1.0)  # F(x)
    accept = torch.where(p > 0, q / p.clamp(min=1e-300), 1.0).clamp(max=1.0)
    rising, order = accept.sort(-1)
    mass = p.gather(-1, order)
    below = torch.nn.functional.pad(mass.cumsum(-1), (1, 0))
    moment = torch.nn.functional.pad((mass * rising).cumsum(-1), (1, 0))

    def rejected_below(u: Tensor) -> Tensor:  # G(u), from sums over the tokens with a_n < u
        count = torch.searchsorted(rising, u)
        return u * below.gather(-1, count) - moment.gather(-1, count)

    starts = torch.nn.functional.pad(ends[:, :-1], (1, 0))  # F(x⁻)
    recovered = rejected_below(ends) - rejected_below(starts)
    law = torch.minimum(q, p) + recovered.clamp(min=0.0)
    return torch.where(total > 0, law / law.sum(-1, keepdim=True), q)


def _misreported(rows: Rows, sampled: Law, reported: Law) -> Law:
    """Return the law of tokens drafted from ``sampled`` but verified as if from ``reported``."""
    accept = torch.where(reported > 0, rows.q / reported.clamp(min=1e-300), 1.0).clamp(max=1.0)
    kept = sampled * accept
    rest = (rows.q - reported).clamp(min=0.0)
    total = rest.sum(-1, keepdim=True)
    rest = torch.where(total > 0, rest / total.clamp(min=1e-300), rows.q)
    return kept + (1 - kept.sum(-1, keepdim=True)).clamp(min=0.0) * rest


def _deferred(rows: Rows) -> Law:
    """Return the law of the lossy rule FLy: on undecided rows, drafted tokens with q > 0 are kept.

    Undecided is a row whose three likeliest tokens have −Σ q ln q ≥ 0.3 nats. A token that replaces
    a rejected one is drawn from q.
    """
    assert rows.p is not None
    first = rows.q.topk(min(3, rows.q.shape[-1])).values
    open_ = torch.special.entr(first).sum(-1, keepdim=True) >= 0.3
    kept = torch.where(rows.q > 0, rows.p, 0.0)
    kept = kept + (1 - kept.sum(-1, keepdim=True)) * rows.q
    return torch.where(open_, kept, rows.q)


@dataclass(frozen=True)
class Alternative:
    """An alternative law of the next token: its name, and the fault of an engine with this law."""

    name: str
    law: Callable[[Rows], Law]
    says: str
    thread: str = ""  # a public issue that reports this fault


OF_TARGET = (
    *(Alternative(f"temperature x {by:g}", partial(_heated, heat=lambda t, by=by: by * t),
                  f"the target is sampled at {by:g} times the temperature")
      for by in (0.5, 0.7, 0.8, 0.9, 0.95, 1.05, 1.1, 1.25, 1.5)),
    Alternative("temperature 1", partial(_heated, heat=lambda t: 1.0),
                "the temperature is not applied", "vllm-project/vllm#42744"),
    Alternative("temperature twice", partial(_heated, heat=lambda t: t * t),
                "the temperature is applied twice"),
    Alternative("no top-k", lambda rows: rows.emitted(rows.cut(top_k=0)), "top-k is not applied"),
    Alternative("no top-p", lambda rows: rows.emitted(rows.cut(top_p=1.0)), "top-p is not applied"),
    Alternative("top-p twice", lambda rows: _further(rows, 0, rows.claim.cuts.top_p),
                "top-p is applied to what top-p left"),
    Alternative("top-p before top-k", _nucleus_first, "top-p cuts before top-k does"),
    Alternative("cuts before temperature", _cut_cold, "rows are cut before their temperature"),
    *(Alternative(f"top-k {k} not told", partial(_further, top_k=k, top_p=1.0),
                  f"rows are cut to {k} tokens beyond what was claimed", "vllm-project/vllm#42802")
      for k in (20, 50)),
    *(Alternative(f"top-p {p:g} not told", partial(_further, top_k=0, top_p=p),
                  f"rows are cut to {p:g} of their mass beyond what was claimed",
                  "vllm-project/vllm#56724") for p in (0.8, 0.9, 0.95)),
    Alternative("min-p 0.05 not told", partial(_above, share=0.05),
                "tokens below 0.05 of the likeliest one's probability are cut"),
    *(Alternative(f"argmax for {share:.0%}", blend(share, _likeliest),
                  f"{share:.0%} of the tokens are the likeliest one") for share in (0.05, 0.2)),
    *(Alternative(f"uniform for {share:.1%}", blend(share, _uniform),
                  f"{share:.1%} of the tokens are drawn from the whole vocabulary alike")
      for share in (0.002, 0.02)),
    *(Alternative(f"prompt for {share:.0%}", blend(share, _of_prompt),
                  f"{share:.0%} of the tokens are copied from anywhere in the prompt")
      for share in (0.01, 0.05)),
    *(Alternative(f"repetition penalty {by:g}", partial(_penalised, repeated=by),
                  "a repetition penalty that was not claimed") for by in (1.05, 1.2)),
    Alternative("presence penalty 0.5", partial(_penalised, present=0.5),
                "a presence penalty that was not claimed"),
    Alternative("frequency penalty 0.5", partial(_penalised, frequent=0.5),
                "a frequency penalty that was not claimed"),
    Alternative("tail raised", partial(_tail, factor=1.5),
                "unlikely tokens are half as likely again, as after coarse rounding"),
    Alternative("tail lowered", partial(_tail, factor=0.5), "unlikely tokens are half as likely"),
    Alternative("row before for 20%", blend(0.2, _row_before),
                "a fifth of the tokens are drawn from the row of the token before",
                "NVIDIA/TensorRT-LLM#15098"),
)  # fmt: skip

OF_DRAFT = (
    *(Alternative(spec, _policy(spec), f"drafts are verified by the policy {spec}")
      for spec in ("band:price=2", "band:price=1", "band:price=0.5", "band:price=0.2",
                   "lenience:lenience=0.7", "lenience:lenience=0.3", "cactus:delta=0.1",
                   "cactus:delta=1", "mixture:alpha=0.05", "mixture:alpha=0.2")),
    Alternative("fly", blend(0.3, _deferred),
                "rejections at open places are overridden, as by FLy, three in ten of them"),
    Alternative("drafts kept", blend(0.5, lambda rows: rows.p),  # type: ignore
                "every second token is the draft's, unverified", "vllm-project/vllm-ascend#13730"),
    Alternative("recovered from the target", _from_target,
                "recovered tokens are drawn from the target's whole row"),
    Alternative("recovered without subtraction", _without_rejected,
                "recovered tokens are drawn from the target's row without the rejected token"),
    Alternative("coin used twice", _coin_twice,
                "recovered tokens are drawn with the number that rejected the drafted one"),
    Alternative("draft's law before temperature",
                lambda rows: _misreported(rows, rows.p, rows.raw_p),  # type: ignore
                "the draft samples after its temperature and cuts and reports its law before them",
                "huggingface/transformers#47932"),
    Alternative("draft's law before top-k 50",
                lambda rows: _misreported(rows, cut(rows.p, 50, 1.0), rows.p),  # type: ignore
                "the draft samples from its 50 likeliest tokens and reports them all",
                "huggingface/transformers#47932"),
)  # fmt: skip


def alternatives(drafted: bool) -> tuple[Alternative, ...]:
    """Return the alternatives that need no draft rows; if ``drafted``, those that do, too."""
    return OF_TARGET + (OF_DRAFT if drafted else ())


def log_factors(
    rows: Rows,
    token_ids: Int[Tensor, "n k"],
    table: Iterable[Alternative],
    edge: float = EDGE,
    looked_at: slice = slice(None),
) -> tuple[Float[Tensor, "n k M"], Float[Tensor, "M"], Float[Tensor, "n k"]]:
    """Compute ln r/h of tokens, sums of KL(r‖h), and the tokens' distances from the claimed cuts.

    h is the claimed law, r an alternative. If the claim is a lossy policy, h is the larger of the
    policy's law and the target's, as a log does not show which tokens had a draft.

    The distance of a token is the number of nats by which the token lies outside the cuts. At
    temperature 0 the distance is measured from the largest logit, for top-k from the k-th largest.
    For top-p the distance is the smaller of two numbers: the log-odds of the mass of all likelier
    tokens less those of top-p, and the logit of the last kept token less the token's. A distance
    above ``edge`` refutes the claim. A nearer token may be outside by rounding: h is then the
    probability that the token would have if it were kept, times ``UNCLAIMED``^(distance/edge). With
    exact rows this changes no guarantee, as the claim never emits such a token.

    Parameters
    ----------
    rows : n consecutive places of an answer.
    token_ids : k candidate tokens for each place, of which the claim emits at most one.
    table : the M alternatives.
    edge : nats by which the rounding of kernels may move a token across a cut.
    looked_at : the places whose divergences are added up. The sums only predict how many tokens
        are needed and prove nothing, but take as long as the laws.
    """
    ids, table = token_ids, tuple(table)
    factors = rows.logits.new_zeros(*ids.shape, len(table))
    growth = rows.logits.new_zeros(len(table))
    if rows.claim.temperature == 0:
        return factors, growth, _beyond(rows, ids)
    claimed = rows.h
    if (rule := rows.claim.rule) is not None:
        claimed = torch.maximum(claimed, rule.undrafted(rows.q))
    uncut, h = rows.whole.gather(-1, ids), claimed.gather(-1, ids)
    outside, distance = h <= 0, torch.zeros_like(h)
    if bool(outside.any()):
        distance = torch.where(outside, _beyond(rows, ids), 0.0)
        mass_kept = torch.where(rows.q > 0, rows.whole, 0.0).sum(-1, keepdim=True)
        share = UNCLAIMED ** (distance / edge).clamp(max=1.0)
        h = torch.where(outside, uncut * share / mass_kept, h)
    h = h.clamp(min=1e-300)
    # h of all tokens for KL(r‖h), above 0 so that no divergence is infinite
    positive_h = torch.maximum(claimed, UNCLAIMED * rows.whole)[looked_at].clamp_(min=1e-300)
    for number, alternative in enumerate(table):
        if (law := alternative.law(rows)) is claimed:
            continue
        # r is the mixture SHARE · h + (1 − SHARE) · law, with the claimed h, 0 beyond the cuts
        ratio = law.gather(-1, ids) / h
        mixed = SHARE * outside.logical_not().double() + (1 - SHARE) * ratio
        # a token that neither the claim nor this alternative emits is evidence for neither
        factors[..., number] = torch.where(outside & (ratio == 0), 1.0, mixed).log_()
        some = law[looked_at]
        growth[number] = (some * some.div(positive_h).mul_(1 - SHARE).add_(SHARE).log_()).sum()
    return factors, growth, distance


def _beyond(rows: Rows, ids: Int[Tensor, "n k"]) -> Float[Tensor, "n k"]:
    """Return by how many nats tokens lie outside the claimed cuts: see :func:`log_factors`."""
    cuts, scores = rows.claim.cuts, rows.logits / (rows.claim.temperature or 1.0)
    of_token, falling = scores.gather(-1, ids), scores.gather(-1, rows.order)
    if not rows.claim.temperature:
        return falling[:, :1] - of_token
    distance, size = torch.zeros_like(of_token), falling.shape[-1]
    if 0 < cuts.top_k < size:
        last = falling[:, cuts.top_k - 1 : cuts.top_k]
        distance = (last - of_token).clamp(min=0.0)
        falling = torch.where(falling >= last, falling, -torch.inf)
    if cuts.top_p < 1:
        # mass[i] is that of the i likeliest tokens, and ``above`` that of all likelier tokens
        mass = torch.nn.functional.pad(falling.softmax(-1).cumsum(-1), (1, 0))
        above = mass.gather(-1, torch.searchsorted(-falling, -of_token)).clamp(max=1.0)
        odds = above.logit() - math.log(cuts.top_p / (1 - cuts.top_p))
        least = torch.where(rows.q > 0, scores, torch.inf).amin(-1, keepdim=True)
        distance = torch.maximum(distance, torch.minimum(odds, least - of_token).clamp(min=0.0))
    # a token to which the target gives probability 0 is no matter of rounding
    return torch.where(rows.whole.gather(-1, ids) > 0, distance, torch.inf)
