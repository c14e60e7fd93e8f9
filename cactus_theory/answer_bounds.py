r"""Bounds on the probability of events of an answer, and on its mean KL (THEORY.md, Theorem 23).

Let q be the law of the target's answers to a prompt, after temperature and truncation, and h the
law of the decoded answers. If :math:`\mathrm{KL}(h‖q) ≤ C` nats, then for every event E of the
answer (it is right, its tests pass, it refuses) :math:`\mathrm{kl}_2(h(E) ‖ q(E)) ≤ C`, where
:math:`\mathrm{kl}_2(s‖r) = s\ln(s/r) + (1-s)\ln((1-s)/(1-r))`. The cap of a ledger
(:class:`cactus_theory.decoding.Ledger`) on the nats charged to an answer is such a C. Meters of
other divergences bound nothing here.

A ledger keeps every answer within C nats, so that the nats it counts for an answer (a reading) lie
in [0, C]. If prompts are drawn independently, each reading gives an upper bound on the mean over
all prompts. With probability 1 − α, for an α of your choice, all these bounds hold together, so
that a growing log may be read as often as you like
(:class:`cactus_theory.base.confidence.LowerMean` of the negative readings computes them).
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace

import numpy as np

from cactus_theory.base import arguments as check
from cactus_theory.base.confidence import LowerMean
from cactus_theory.base.roots import rising_root
from cactus_theory.base.significance import RISK

# relative step at which a search ends: the last digit, since secants settle early beside 0 and 1
SETTLED = 1e-30
# relative change below which a series of TERMS terms is more exact than logarithms: 0.05^14 < 1e-18
SMALL, TERMS = 0.05, 14
# caps in nats: below LITTLE Pinsker's inequality is exact to 1e-7, above MUCH 1 − e^−C to rounding
LITTLE, MUCH = 1e-6, 4.0
# relative excess of a reading over its cap that is rounding: meter and ledger sum in other orders
ROUNDING = 1e-6


@dataclass(frozen=True)
class EventBounds:
    """Bounds on the probability of an event of the answer under a cap on KL; Theorem 23.

    Parameters
    ----------
    rate : the event's probability under the target, after temperature and truncation.
    cap : the most nats of a whole answer; give either ``cap`` or ``per_token``.
    per_token : the most nats a token, as in :class:`cactus_theory.decoding.Ledger`.
    tokens : the most tokens of an answer; needed with ``per_token``.
    burst : nats that may be spent ahead, as in ``Ledger``.
    lossless : number of first tokens that are decoded losslessly (``ByPosition``). Events that
        these tokens decide keep their probability.

    Attributes
    ----------
    low, high : the least and the largest probability of the event.
    total_variation : the most by which the probability of any event may differ.
    nats : the most KL of an answer. ``after(tokens)`` returns the bounds for
        events that the first ``tokens`` tokens decide.

    Raises
    ------
    ValueError
        A number out of its range; ``cap`` and ``per_token`` both given or both missing;
        ``per_token`` without ``tokens``.

    Examples
    --------
    >>> bound = ct.EventBounds(0.9, cap=0.1)
    >>> print(f"{bound.low:.3f} to {bound.high:.3f}, total variation {bound.total_variation:.3f}")
    0.743 to 0.999, total variation 0.222
    """

    rate: float = 0.5
    _: KW_ONLY
    cap: float | None = None
    per_token: float | None = None
    tokens: int | None = None
    burst: float = 0.0
    lossless: int = 0

    def __post_init__(self) -> None:
        if (self.cap is None) == (self.per_token is None):
            raise ValueError(
                "cap, per_token: must be one, nats for a whole answer or nats a token; got "
                f"{'neither' if self.cap is None else 'both'}"
            )
        if self.per_token is not None and self.tokens is None:
            raise ValueError(
                "tokens: must be given with per_token, as nats a token bound nothing of an "
                f"answer; got per_token {self.per_token:g} alone (for a whole answer: cap)"
            )
        check.number("rate", self.rate, 0, 1)
        for name in ("cap", "per_token"):
            check.number(name, getattr(self, name) or 0.0, 0)
        # ``cap`` is the whole answer's already, so nothing can be spent ahead of it
        check.number("burst", self.burst, 0, math.inf if self.per_token is not None else 0)
        check.whole_number("lossless", self.lossless, 0)
        if self.tokens is not None:
            check.whole_number("tokens", self.tokens, 1)

    @property
    def nats(self) -> float:
        """Return the most KL of an answer of ``tokens`` tokens."""
        if self.tokens is not None and self.tokens <= self.lossless:
            return 0.0
        by_token = (self.per_token or 0.0) * (self.tokens or 1)
        return (by_token if self.cap is None else self.cap) + self.burst

    @property
    def low(self) -> float:
        """Return the least probability that the event may have."""
        return event_interval(self.rate, self.nats)[0]

    @property
    def high(self) -> float:
        """Return the largest probability that the event may have."""
        return event_interval(self.rate, self.nats)[1]

    @property
    def total_variation(self) -> float:
        """Return the most by which the probability of any event may differ from the target's."""
        return most_variation(self.nats)

    def after(self, tokens: int) -> "EventBounds":
        """Return the bounds for events that the first ``tokens`` tokens decide."""
        return replace(self, tokens=tokens)

    @property
    def range(self) -> str:
        """Return as text the event's probability under the target, :attr:`low` and :attr:`high`."""
        event = f"an event of {share(self.rate)} under the target"
        return f"{event} gets {share(self.low)} to {share(self.high)}"

    @property
    def sentence(self) -> str:
        """Return in words the most nats of an answer, and then :attr:`range`."""
        return f"at most {self.nats:.4g} nats an answer: {self.range}"

    @property
    def unit(self) -> str:
        """Return in words whether the cap was read as nats for an answer or for a token."""
        if self.per_token is None:
            return (
                f"{self.cap:g} was taken as nats for a whole answer. generate --cap, Ledger and "
                "CACTUS_CAP take nats a token, here --per-token with --tokens"
            )
        return (
            f"{self.per_token:g} was taken as nats a token, as generate --cap, Ledger and "
            f"CACTUS_CAP take them: {self.nats:.4g} an answer of {self.tokens}"
        )


@dataclass(frozen=True)
class ConfidenceBound:
    """The result of :func:`confidence_bound`, which documents the fields."""

    count: int
    mean: float
    worst: float
    cap: float
    alpha: float
    bound: float

    @property
    def sentence(self) -> str:
        """Return the bound and its assumptions, in words."""
        return (
            f"{self.count} readings, mean {self.mean:.4g} nats, worst {self.worst:.4g}: with "
            f"confidence {100 * (1 - self.alpha):g} % the mean KL of an answer over all prompts is "
            f"at most {self.bound:.4g} nats (cap {self.cap:.4g}), however often such a log is read "
            "while it grows. That is an average and says nothing of one prompt, for which there is "
            "the cap. It assumes prompts drawn independently, one answer each, neither policy nor "
            "cap chosen by looking at them, and a ledger that enforces the cap: that no reading "
            "was above it would not be enough"
        )


def confidence_bound(readings: Sequence[float], cap: float, alpha: float = RISK) -> ConfidenceBound:
    """Return an upper bound on the mean KL over prompts, from nats that a ledger has charged.

    Parameters
    ----------
    readings : nats charged for each answer, one answer a prompt, in the order of the log.
    cap : nats that the ledger lets no answer exceed.
    alpha : the probability, over prompts and coins, that any of the bounds of a growing log is
        wrong.

    Returns
    -------
    count, mean, worst : number, mean and largest of the readings, in nats an answer.
    bound : the bound on the mean over all prompts, in nats an answer; never above the cap.

    Raises
    ------
    ValueError
        No readings, a reading that is negative or above the cap, a number out of its range.

    Examples
    --------
    >>> proof = ct.confidence_bound([0.1, 0.2, 0.15, 0.05] * 250, cap=0.5)
    >>> f"{proof.mean:.3f}, at most {proof.bound:.3f}"
    '0.125, at most 0.133'
    """
    cap = check.number("cap", cap, 0, sys.float_info.max)
    alpha = check.number("alpha", alpha, 0, 1, open_low=True)
    values = [check.number("readings", nats, 0, cap * (1 + ROUNDING)) for nats in readings]
    if not values:
        raise ValueError("readings: must be at least one; got none")
    shares = [min(nats / cap, 1.0) if cap else 0.0 for nats in values]
    # a lower bound on the mean of the negative shares, which lie in [−1, 0]
    mean, lower_mean = math.fsum(shares) / len(shares), LowerMean(below=1.0, most=0.0, start=-0.5)
    lower_mean.add(-np.array(shares))
    bound = min(max(-lower_mean.bound(alpha), mean), 1.0)
    return ConfidenceBound(
        count=len(shares),
        mean=cap * mean,
        worst=max(values),
        cap=cap,
        alpha=alpha,
        bound=cap * bound,
    )


def event_interval(rate: float, cap: float) -> tuple[float, float]:
    """Return the least and the largest s with kl₂(s‖rate) ≤ cap, to 1e-12."""
    rest = 1 - rate
    # the event loses what the opposite event gains
    down, up = _most_change(rest, rate, cap), _most_change(rate, rest, cap)
    return max(rate - down, 0.0), min(rate + up, 1.0)


def _most_change(rate: float, rest: float, cap: float) -> float:
    """Return the largest d ≤ rest = 1 − rate with kl₂(rate + d‖rate) ≤ cap."""
    if cap == math.inf:
        return rest
    if cap == 0 or rate == 0 or rest == 0:
        return 0.0
    # −ln rate, the KL of an event that is certain; near 1 from the exact rest
    if cap >= (-math.log(rate) if rate < 0.5 else -math.log1p(-rest)):
        return rest
    spread = math.sqrt(cap) * math.sqrt(rate) * math.sqrt(rest)  # kl₂ ≤ d²/(rate rest)
    most = min(rest, math.sqrt(cap / 2))  # Pinsker
    start = spread * math.sqrt(2)
    low = min(spread, most)
    return _root_of(lambda d: binary_kl(rate, rest, d), cap, low=low, high=most, start=start)


def binary_kl(rate: float, rest: float, change: float) -> float:
    """Return kl₂(rate + change‖rate), where rest is 1 − rate."""
    return _kl_term(rate, change) + _kl_term(rest, -change)


def _kl_term(mass: float, change: float) -> float:
    """Return m ln(m/mass) − change for m = mass + change: kl₂ is the sum of two such terms."""
    if change <= -mass:
        return mass
    u = change / mass  # the term is mass·((1 + u) ln(1 + u) − u)
    if abs(u) < SMALL:
        return mass * math.fsum((-u) ** k / (k * (k - 1)) for k in range(2, TERMS))
    if u > 1:
        return (mass + change) * (math.log(mass + change) - math.log(mass)) - change
    return mass * ((1 + u) * math.log1p(u) - u)


def most_variation(cap: float) -> float:
    r"""Return the largest total variation at a KL of ``cap`` nats, over all pairs of laws.

    Let t > 0 be such that :math:`\ln(t/\sinh t) + t\coth t − t²/\sinh² t` is the cap C. Then the
    result is :math:`t(1 − (\coth t − 1/t)²)/2` (Fedotov, Harremoës & Topsøe 2003). Laws of two
    outcomes reach this value; it is below :math:`\sqrt{C/2}` and :math:`\sqrt{1 − e^{−C}}`.
    """
    if cap < LITTLE:
        return math.sqrt(cap / 2)
    if cap > MUCH:
        return -math.expm1(-cap)
    low, high = math.sqrt(2 * cap), math.exp(cap) + 3
    t = _root_of(_kl_of_widest, cap, low=low / 2, high=high, start=low)
    slope = 1 / math.tanh(t) - 1 / t
    return min(t * (1 - slope) * (1 + slope) / 2, math.sqrt(cap / 2), 1.0)


def _kl_of_widest(t: float) -> float:
    """Return ln(t/sinh t) + t coth t − t²/sinh² t, the KL in :func:`most_variation`."""
    # with these coth t is 1 + 2 over, and sinh t is e^t less/2
    less = -math.expm1(-2 * t)
    over = math.exp(-2 * t) / less
    return math.log(2 * t) - math.log(less) + 2 * t * over - 4 * t * t * over / less


def _root_of(
    rising: Callable[[float], float], amount: float, low: float, high: float, start: float
) -> float:
    """Return x with rising(x) = amount to the last digit, for a function that rises about as x²."""
    steepness = 2 * amount  # x f′(x) is 2 f(x) for a multiple of x²
    return rising_root(lambda x: rising(x) - amount, low, high, start, SETTLED, steepness)


def share(value: float) -> str:
    """Return a probability in per cent, with three digits."""
    return f"{100 * value:.3g} %"
