r"""What a cap on KL promises about an answer (THEORY.md, Theorem 21).

Let q be the law of the target's answers to a prompt, after temperature and truncation, and h that
of the answers that are decoded. If :math:`\mathrm{KL}(h‖q) ≤ C` nats then for every event E of the
answer (it is right, its tests pass, it refuses)

.. math:: \mathrm{kl}_2(h(E) ‖ q(E)) ≤ C, \qquad
    \mathrm{kl}_2(s‖r) = s\ln\frac sr + (1-s)\ln\frac{1-s}{1-r},

which leaves h(E) an interval around q(E). The meter bounds the KL (Theorem 11), so a ledger's hard
cap on what an answer is charged is such a C. The meters of other divergences promise nothing here.
"""

import math
from dataclasses import dataclass, replace

from cactus_theory import _arguments as check
from cactus_theory.decoding._checks import whole_number
from cactus_theory.optimum.roots import RisingRoot

# searches go on to the last digit: beside 0 and 1 the KL is so steep that secants settle too early
SETTLED = 1e-30
# below it a series of so many terms is more exact than logarithms: 0.05^14 < 1e-18
SMALL, TERMS = 0.05, 14
# Pinsker's inequality is met to 1e-7 of it below the first, 1 − e^−C to rounding beyond the second
LITTLE, MUCH = 1e-6, 4.0
# more nats than that leave every rate that is worth a promise anything
VACUOUS = 5.0
# new tokens of an answer where nobody says how many
USUAL_TOKENS = 64


@dataclass(frozen=True)
class Promise:
    """What so many nats for a whole answer leave the probability of an event.

    Attributes
    ----------
    cap : most nats of KL of an answer from the target's.
    rate : the event's probability under the target, after temperature and truncation.
    low, high : the interval that its probability lies in.
    total_variation : the most that the probability of any event at all may change by.
    per_token, burst, tokens : where the cap is per_token · tokens + burst, as a ledger's.
    lossless : so many first tokens of the answer have exactly the target's law.
    averaged : whether cap, rate and interval are means over prompts, not those of every prompt.

    Examples
    --------
    >>> seen = promise(cap=0.1, rate=0.9)
    >>> print(f"{seen.low:.3f} to {seen.high:.3f}, total variation {seen.total_variation:.3f}")
    0.743 to 0.999, total variation 0.222
    """

    cap: float
    rate: float
    low: float
    high: float
    total_variation: float
    per_token: float | None = None
    burst: float = 0.0
    tokens: int | None = None
    lossless: int = 0
    averaged: bool = False

    def after(self, tokens: int) -> "Promise":
        """Return the promise for events that the first ``tokens`` tokens decide.

        None of them costs anything while a schedule is lossless (``ByPosition``, ``Between``);
        after that a ledger may spend what it saved.
        """
        if tokens <= self.lossless:
            return _promise(replace(self, cap=0.0, tokens=tokens))
        cap = self.cap if self.per_token is None else self.per_token * tokens + self.burst
        return _promise(replace(self, cap=cap, tokens=tokens))

    @property
    def sentence(self) -> str:
        """Return what holds of the event."""
        whom = "averaged over prompts" if self.averaged else "whatever the prompt"
        return (
            f"{self.cap:.4g} nats an answer: what happens in {share(self.rate)} of the target's "
            f"answers happens in {share(self.low)} to {share(self.high)} of these, {whom}"
        )

    @property
    def shown_one(self) -> str:
        """Return how well an answer tells which of the two wrote it."""
        return (
            "who is shown one answer and says which of the two wrote it is right at most "
            f"{share((1 + self.total_variation) / 2)} of the time (guessing: 50 %)"
        )

    @property
    def unit(self) -> str:
        """Return in words whether nats were taken for an answer or a token, and the other way."""
        count, rate = self.tokens or USUAL_TOKENS, share(self.rate)
        if self.per_token is None:
            other = _promise(replace(self, cap=self.cap * count))
            return (
                f"{self.cap:g} was taken as nats for a whole answer, {self.cap / count:.3g} a "
                f"token of {count}. generate --cap, Ledger and CACTUS_CAP take nats a token: as "
                f"that it is {other.cap:.4g} an answer of {count} tokens, and {rate} is "
                f"{share(other.low)} to {share(other.high)} (--per-token {self.cap:g} --tokens "
                f"{count})"
            )
        other = _promise(replace(self, cap=self.per_token))
        little = ", which promises next to nothing" if self.cap > VACUOUS else ""
        return (
            f"{self.per_token:g} was taken as nats a token, {self.cap:.4g} an answer of {count} "
            f"tokens{little}. As nats for a whole answer (--cap {self.per_token:g}) {rate} is "
            f"{share(other.low)} to {share(other.high)}: a decode capped at "
            f"{self.per_token / count:.3g} a token keeps that"
        )


def promise(
    *,
    rate: float = 0.5,
    cap: float | None = None,
    per_token: float | None = None,
    tokens: int | None = None,
    burst: float = 0.0,
    lossless: int = 0,
    averaged: bool = False,
) -> Promise:
    """Return what a cap on an answer's KL leaves the probability of an event; Theorem 21.

    Parameters
    ----------
    rate : the event's probability under the target, after temperature and truncation.
    cap : nats for a whole answer; or else
    per_token, tokens, burst : nats a token, the most tokens of an answer, and nats that may be
        spent ahead, as those of :class:`cactus_theory.decoding.Ledger`.
    lossless : so many first tokens are drawn from the target itself (``ByPosition``).
    averaged : the nats bound a mean over prompts, not every prompt.

    Raises
    ------
    ValueError
        A number out of its range, nats for an answer and a token at once or neither, nats a token
        without the number of tokens.

    Examples
    --------
    >>> capped = promise(per_token=0.001, tokens=100, rate=0.01)
    >>> f"{capped.cap:g} nats an answer: {capped.low:.3f} to {capped.high:.3f}"
    '0.1 nats an answer: 0.000 to 0.081'
    """
    rate = check.number("rate", rate, 0, 1)
    lossless = whole_number("lossless", lossless, 0)
    tokens = None if tokens is None else whole_number("tokens", tokens, 1)
    if (cap is None) == (per_token is None):
        got = "neither" if cap is None else "both"
        raise ValueError(
            f"cap, per_token: nats for a whole answer, or nats a token; must be one; got {got}"
        )
    burst = check.number("burst", burst, 0)
    if per_token is None:
        if burst:
            raise ValueError(f"burst: must be given with per_token; got {burst:g} with a cap")
        total = check.number("cap", cap, 0)
    else:
        per_token = check.number("per_token", per_token, 0)
        if tokens is None:
            raise ValueError(
                "tokens: must say how many tokens an answer may have, as nats a token promise "
                f"nothing of an answer without; got per_token {per_token:g} alone (nats for a "
                "whole answer are cap)"
            )
        total = per_token * tokens + burst
    made = Promise(total, rate, 0.0, 1.0, 1.0, per_token, burst, tokens, lossless, averaged)
    return _promise(made) if tokens is None else _promise(made.after(tokens))


def _promise(own: Promise) -> Promise:
    """Return the promise with interval and total variation of its cap and rate."""
    low, high = event_interval(own.rate, own.cap)
    return replace(own, low=low, high=high, total_variation=most_variation(own.cap))


def event_interval(rate: float, cap: float) -> tuple[float, float]:
    """Return the least and the most s with kl₂(s‖rate) ≤ cap, to 1e-12."""
    rest = 1 - rate
    down, up = _most_change(rest, rate, cap), _most_change(rate, rest, cap)
    return max(rate - down, 0.0), min(rate + up, 1.0)


def _most_change(rate: float, rest: float, cap: float) -> float:
    """Return the largest d ≤ rest = 1 − rate with kl₂(rate + d‖rate) ≤ cap."""
    if cap == math.inf:
        return rest
    if cap == 0 or rate == 0 or rest == 0:
        return 0.0
    if cap >= (-math.log(rate) if rate < 0.5 else -math.log1p(-rest)):
        return rest
    spread = math.sqrt(cap) * math.sqrt(rate) * math.sqrt(rest)  # kl₂ ≤ d²/(rate rest)
    most = min(rest, math.sqrt(cap / 2))  # Pinsker
    search = RisingRoot(min(spread, most), most, spread * math.sqrt(2), SETTLED, 2 * cap)
    while not search.done:
        x = search.x
        search.tell(binary_kl(rate, rest, x) - cap)
    return search.x


def binary_kl(rate: float, rest: float, change: float) -> float:
    """Return kl₂(rate + change‖rate), where rest is 1 − rate."""
    return _part(rate, change) + _part(rest, -change)


def _part(mass: float, change: float) -> float:
    """Return m ln(m/mass) − change for m = mass + change: kl₂ is the sum of two of these."""
    if change <= -mass:
        return mass
    u = change / mass
    if abs(u) < SMALL:
        return mass * math.fsum((-u) ** k / (k * (k - 1)) for k in range(2, TERMS))
    if u > 1:
        return (mass + change) * (math.log(mass + change) - math.log(mass)) - change
    return mass * ((1 + u) * math.log1p(u) - u)


def most_variation(cap: float) -> float:
    r"""Return the largest total variation at a KL of ``cap`` nats, over all pairs of laws.

    With t > 0 so that :math:`\ln(t/\sinh t) + t\coth t − t²/\sinh² t` is the cap, it is
    :math:`t(1 − (\coth t − 1/t)²)/2` (Fedotov, Harremoës & Topsøe 2003); it is reached by two
    outcomes and lies below both :math:`\sqrt{C/2}` and :math:`\sqrt{1 − e^{−C}}`.
    """
    if cap < LITTLE:
        return math.sqrt(cap / 2)
    if cap > MUCH:
        return -math.expm1(-cap)
    low, high = math.sqrt(2 * cap), math.exp(cap) + 3
    search = RisingRoot(low / 2, high, low, SETTLED, 2 * cap)
    while not search.done:
        t = search.x
        less = math.exp(-2 * t)
        over = less / -math.expm1(-2 * t)
        kl = math.log(2 * t) - math.log(-math.expm1(-2 * t)) + 2 * t * over
        search.tell(kl - 4 * t * t * over / -math.expm1(-2 * t) - cap)
    slope = 1 / math.tanh(search.x) - 1 / search.x
    return min(search.x * (1 - slope) * (1 + slope) / 2, math.sqrt(cap / 2), 1.0)


def share(value: float) -> str:
    """Return a probability in per cent, with three digits."""
    return f"{100 * value:.3g} %"
