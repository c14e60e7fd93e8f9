r"""Evidence against a claimed law that may be read after any token (THEORY.md, Theorem 31).

Let h be the claimed law of the next token and r another law, both fixed before the token x is
read. If x is drawn from h, the expected value of r(x)/h(x) is at most 1. So the product along all
tokens, and any average of such products with fixed weights, reaches 1/α at any time with
probability α at most (Ville). The *evidence* is that average over M alternatives of equal weight.

How far off is the engine? With ρ the factor by which a token multiplies the evidence and η = FLOOR,
:math:`\ln(η + (1 − η)ρ)` has a mean of at most KL(s‖h) if tokens are drawn from s (Donsker and
Varadhan), and is at least ln η. Numbers with a least value have a confidence sequence for the mean
of their conditional means: :class:`LowerMean`.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float

from cactus_theory.base import arguments as check
from cactus_theory.base.confidence import LowerMean, log_mean

# risk of an alarm about a healthy engine, over the whole of a log, however often it is read
ALPHA = 0.01
# share of the claim in the law whose log-ratio is averaged, and the largest mean that is predicted
FLOOR, MOST = 0.2, 0.1
# most points of the curve that is kept for a picture
POINTS = 400


def divergence_bound() -> LowerMean:
    """Return the sequence for the nats a token, before any token."""
    return LowerMean(-math.log(FLOOR), MOST)


@dataclass
class Evidence:
    """The evidence of all tokens so far, and what it takes to go on from there.

    Attributes
    ----------
    names : of the M alternatives.
    slack : nats a token that every alternative gives up, for a reference on other kernels.
    tokens, own, growth : how many tokens; by alternative ln of its evidence, and the sum of the
        divergences of its law from the claim: what its evidence grows by if it is the engine's.
    top : the largest ln of the evidence at any time.
    off : where the evidence first reached 1/α: line and token there, tokens in all.
    impossible : the first token that the claim never emits: line, token there, id, and how many
        nats it lies beyond the cut.
    nats : the sequence that bounds the nats a token.
    curve : (tokens, ln evidence, ln of each alternative's) after some answers.
    stride : answers between two points of the curve.
    """

    names: tuple[str, ...]
    slack: float = 0.0
    alpha: float = ALPHA
    tokens: int = 0
    answers: int = 0
    own: Any = None
    growth: Any = None
    top: float = 0.0
    off: dict[str, int] | None = None
    impossible: dict[str, Any] | None = None
    nats: LowerMean = field(default_factory=divergence_bound)
    curve: list[list[float]] = field(default_factory=list)
    stride: int = 1

    def __post_init__(self) -> None:
        check.number("alpha", self.alpha, 0, 1, open_low=True)
        check.number("slack", self.slack, 0)
        zeros = np.zeros(len(self.names))
        self.own = zeros if self.own is None else np.asarray(self.own, np.float64)
        self.growth = zeros if self.growth is None else np.asarray(self.growth, np.float64)
        if isinstance(self.nats, dict):
            self.nats = LowerMean(**self.nats)

    @property
    def log(self) -> float:
        """Return ln of the evidence now."""
        return float(log_mean(self.own))

    @property
    def limit(self) -> float:
        """Return ln(1/α), which the evidence of a healthy engine seldom reaches."""
        return -math.log(self.alpha)

    @property
    def verdict(self) -> str:
        """Return ``off``, ``as claimed`` or ``too little``.

        Too little was said if most alternatives that differ from the claim on these rows would
        not have been shown yet.
        """
        if self.off or self.impossible:
            return "off"
        differing = int((self.growth > 0).sum())
        shown = int((self.grown >= self.limit + math.log(len(self.names))).sum())
        return "as claimed" if 2 * shown >= differing > 0 else "too little"

    @property
    def grown(self) -> Float[np.ndarray, "M"]:
        """Return about ln of each alternative's evidence if it were the law."""
        return self.growth - self.slack * self.tokens

    def add(self, line: int, factors: Float[np.ndarray, "n M"], growth: np.ndarray) -> None:
        """Take up an answer: ln r(x)/h(x) of its tokens, and the sums of divergences (M,)."""
        path = self.own + (factors - self.slack).cumsum(0)
        logs = log_mean(np.concatenate([self.own[None], path]))
        self.nats.add(np.log(FLOOR + (1 - FLOOR) * np.exp(np.diff(logs) + self.slack)))
        if self.off is None and len(passed := np.flatnonzero(logs[1:] >= self.limit)):
            place = int(passed[0])
            self.off = {"line": line, "token": place, "tokens": self.tokens + place + 1}
        self.own, self.growth = path[-1], self.growth + growth
        self.top, self.tokens = max(self.top, float(logs.max())), self.tokens + len(factors)
        self.answers += 1
        if self.answers % self.stride == 0:
            self.curve.append([self.tokens, self.log, *self.own.tolist()])
        if len(self.curve) > POINTS:
            self.curve, self.stride = self.curve[1::2], 2 * self.stride

    def needed(self) -> Float[np.ndarray, "M"]:
        """Return how many more tokens would show each alternative if it were the engine's law.

        ∞ where it does not differ from the claim on these rows, or by less than the slack.
        """
        rates = self.growth / max(self.tokens, 1) - self.slack
        missing = np.maximum(self.limit + math.log(len(self.names)) - self.own, 0.0)
        return np.where(rates > 1e-9, missing / np.maximum(rates, 1e-9), np.inf)

    def content(self) -> dict[str, Any]:
        """Return all of it for JSON; the class takes the same back."""
        lists = {"own": self.own.tolist(), "growth": self.growth.tolist()}
        return vars(self) | lists | {"names": list(self.names), "nats": vars(self.nats)}


def paired(ours: Float[np.ndarray, "pairs M"], controls: Float[np.ndarray, "pairs M"]) -> Any:
    """Return ln of the evidence that two arms of one engine differ, after each pair of answers.

    Of a pair to the same prompt g is r/h of a whole answer. If both arms have one law, whichever
    it is, the answers may be exchanged, and 2 g/(g + g′) has mean 1: no reference has to be exact.

    Parameters
    ----------
    ours, controls : (pairs, M), ln g of each answer and alternative.
    """
    steps = math.log(2) + ours - np.logaddexp(ours, controls)
    return log_mean(steps.cumsum(0))
