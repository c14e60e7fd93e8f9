r"""What a cap on KL promises about an answer (THEORY.md, Theorem 23).

Let q be the law of the target's answers to a prompt, after temperature and truncation, and h that
of the answers that are decoded. If :math:`\mathrm{KL}(h‖q) ≤ C` nats, then for every event E of the
answer (it is right, its tests pass, it refuses) :math:`\mathrm{kl}_2(h(E) ‖ q(E)) ≤ C`, where
:math:`\mathrm{kl}_2(s‖r) = s\ln(s/r) + (1-s)\ln((1-s)/(1-r))`. A ledger's hard cap on what an
answer is charged is such a C; the meters of other divergences promise nothing here.
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
# new tokens of an answer where nobody says how many
USUAL_TOKENS = 64


@dataclass(frozen=True)
class Promise:
    """What so many nats leave the probability of an event of the answer; Theorem 23.

    Parameters
    ----------
    rate : the event's probability under the target, after temperature and truncation.
    cap : nats for a whole answer; or else
    per_token, tokens, burst : nats a token, the most tokens of an answer, and nats that may be
        spent ahead, as those of :class:`cactus_theory.decoding.Ledger`.
    lossless : so many first tokens are the target's own (``ByPosition``); events that they decide
        keep their probability.
    averaged : the nats bound a mean over prompts, and so do rate and interval.

    Raises
    ------
    ValueError
        A number out of its range, nats for an answer and a token at once or neither, nats a token
        without the number of tokens.

    Examples
    --------
    >>> seen = ct.Promise(cap=0.1, rate=0.9)
    >>> print(f"{seen.low:.3f} to {seen.high:.3f}, total variation {seen.total_variation:.3f}")
    0.743 to 0.999, total variation 0.222
    """

    rate: float = 0.5
    cap: float | None = None
    per_token: float | None = None
    tokens: int | None = None
    burst: float = 0.0
    lossless: int = 0
    averaged: bool = False

    def __post_init__(self) -> None:
        if (self.cap is None) == (self.per_token is None):
            raise ValueError(
                "cap, per_token: must be one, nats for a whole answer or nats a token; got "
                f"{'neither' if self.cap is None else 'both'}"
            )
        if self.per_token is not None and self.tokens is None:
            raise ValueError(
                "tokens: must be given with per_token, as nats a token promise nothing of an "
                f"answer; got per_token {self.per_token:g} alone (for a whole answer: cap)"
            )
        check.number("rate", self.rate, 0, 1)
        check.number("cap" if self.per_token is None else "per_token", self._amount, 0)
        check.number("burst", self.burst, 0, math.inf if self.per_token is not None else 0)
        whole_number("lossless", self.lossless, 0)
        if self.tokens is not None:
            whole_number("tokens", self.tokens, 1)

    @property
    def _amount(self) -> float:
        return self.cap if self.per_token is None else self.per_token  # type: ignore[return-value]

    @property
    def nats(self) -> float:
        """Return the most KL of an answer of ``tokens`` tokens."""
        if self.tokens is not None and self.tokens <= self.lossless:
            return 0.0
        return self._amount * (self.tokens or 1 if self.cap is None else 1) + self.burst

    @property
    def low(self) -> float:
        """Return the least that the event's probability may be."""
        return event_interval(self.rate, self.nats)[0]

    @property
    def high(self) -> float:
        """Return the most that it may be."""
        return event_interval(self.rate, self.nats)[1]

    @property
    def total_variation(self) -> float:
        """Return the most by which the probability of any event at all may differ."""
        return most_variation(self.nats)

    def after(self, tokens: int) -> "Promise":
        """Return the promise for events that the first ``tokens`` tokens decide."""
        return replace(self, tokens=tokens)

    @property
    def range(self) -> str:
        """Return rate and interval in words."""
        return f"{share(self.rate)} of the target becomes {share(self.low)} to {share(self.high)}"

    @property
    def sentence(self) -> str:
        """Return what an answer may spend, and the interval."""
        return f"at most {self.nats:.4g} nats an answer: {self.range}"

    @property
    def unit(self) -> str:
        """Return in words whether nats were taken for an answer or a token, and the other way."""
        count = self.tokens or USUAL_TOKENS
        if self.per_token is None:
            other = Promise(self.rate, per_token=self.cap, tokens=count)
            return (
                f"{self.cap:g} was taken as nats for a whole answer. generate --cap, Ledger and "
                f"CACTUS_CAP take nats a token: as that (--per-token {self.cap:g} --tokens "
                f"{count}) it is {other.nats:.4g} an answer, and {other.range}"
            )
        other = Promise(self.rate, cap=self.per_token)
        return (
            f"{self.per_token:g} was taken as nats a token, {self.nats:.4g} an answer of {count}. "
            f"As nats for a whole answer (--cap {self.per_token:g}), which a decode capped at "
            f"{self.per_token / count:.3g} a token keeps, {other.range}"
        )


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
