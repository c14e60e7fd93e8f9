r"""Evidence against a claimed law that may be read after any token (THEORY.md, Theorem 31).

Let h be the claimed law of the next token and r an alternative law, both fixed before the token x
is read. If x is drawn from h, the expected value of r(x)/h(x) is at most 1. So the product of these
ratios along all tokens ever reaches 1/α with probability α at most (Ville's inequality), and so
does an average of such products with fixed weights. The *evidence* is the average of the products
of M alternatives with equal weights.

The module also bounds how far the engine's law s is from the claim. Let a token multiply the
evidence by ρ, and let η be a fixed weight (``FLOOR``). If tokens are drawn from s, the mean of
:math:`\ln(η + (1 − η)ρ)` is at most KL(s‖h) (Donsker and Varadhan). These logarithms are at
least ln η. So :class:`LowerMean` gives a lower bound, valid at all times, on the mean over tokens
of their expected values (given the tokens before), and thereby on the mean KL(s‖h).
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float

from cactus_theory.base import arguments as check
from cactus_theory.base.confidence import LowerMean, log_mean

# probability of a false alarm over a whole log, however often the log is read
ALPHA = 0.01
# FLOOR: weight η of the claim in the law whose log-ratio is averaged; MOST: the largest mean, in
# nats per token, that the confidence sequence predicts
FLOOR, MOST = 0.2, 0.1
# most points of the curve that is kept for a plot
POINTS = 400


def divergence_bound() -> LowerMean:
    """Return a new confidence sequence for the engine's distance from the claim, nats per token."""
    return LowerMean(-math.log(FLOOR), MOST)


@dataclass
class Evidence:
    """The evidence of all tokens read so far, with the state that is needed to read on.

    Attributes
    ----------
    names : names of the M alternatives.
    slack : nats per token by which all evidence is lowered, to allow for the different rounding of
        the engine's kernels and the reference's.
    alpha : probability of a false alarm.
    tokens, answers : number of tokens and of answers read.
    own : (M,) ln of each alternative's product of ratios r/h.
    growth : (M,) sums over tokens of KL(r‖h), the expected growth of ``own`` if r is the true law.
    top : the largest ln of the evidence at any time.
    off : where the evidence first reached 1/α: line, token in the line, tokens in total.
    impossible : the first token outside the claimed top-k or top-p, which the claim never emits:
        line, token in the line, id, and nats beyond the cut.
    nats : the confidence sequence for the engine's distance from the claim, nats per token.
    curve : (tokens, ln evidence, ln of each alternative's evidence) after some answers.
    stride : number of answers between two points of the curve.
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
        """Return ln(1/α): a healthy engine's evidence ever reaches 1/α with probability ≤ α."""
        return -math.log(self.alpha)

    @property
    def verdict(self) -> str:
        """Return the verdict: ``off``, ``as claimed`` or ``too little``.

        The verdict is ``too little`` if, for most alternatives that differ from the claim on the
        rows read, the tokens would not yet suffice to detect an engine with such a law.
        """
        if self.off or self.impossible:
            return "off"
        differing = int((self.growth > 0).sum())
        shown = int((self.grown >= self.limit + math.log(len(self.names))).sum())
        return "as claimed" if 2 * shown >= differing > 0 else "too little"

    @property
    def grown(self) -> Float[np.ndarray, "M"]:
        """Return for each alternative ln of the evidence to expect if the engine had this law."""
        return self.growth - self.slack * self.tokens

    def add(self, line: int, factors: Float[np.ndarray, "n M"], growth: np.ndarray) -> None:
        """Add an answer's tokens to the evidence.

        Parameters
        ----------
        line : the answer's line in the log.
        factors : (n, M), ln r(x)/h(x) for each token and alternative.
        growth : (M,), sums of KL(r‖h) over the tokens.
        """
        path = self.own + (factors - self.slack).cumsum(0)
        logs = log_mean(np.concatenate([self.own[None], path]))
        # ln(η + (1 − η)ρ), where ρ is the factor of a token without the slack
        self.nats.add(np.log(FLOOR + (1 - FLOOR) * np.exp(np.diff(logs) + self.slack)))
        if self.off is None and len(passed := np.flatnonzero(logs[1:] >= self.limit)):
            place = int(passed[0])
            self.off = {"line": line, "token": place, "tokens": self.tokens + place + 1}
        self.own, self.growth = path[-1], self.growth + growth
        self.top, self.tokens = max(self.top, float(logs.max())), self.tokens + len(factors)
        self.answers += 1
        if self.answers % self.stride == 0:
            self.curve.append([self.tokens, self.log, *self.own.tolist()])
        if len(self.curve) > POINTS:  # keep every second point, also from now on
            self.curve, self.stride = self.curve[1::2], 2 * self.stride

    def needed(self) -> Float[np.ndarray, "M"]:
        """Return how many more tokens would detect an engine with each alternative's law.

        The number is ∞ if, on the tokens read, an alternative differs from the claim by less than
        the slack.
        """
        rates = self.growth / max(self.tokens, 1) - self.slack
        missing = np.maximum(self.limit + math.log(len(self.names)) - self.own, 0.0)
        return np.where(rates > 1e-9, missing / np.maximum(rates, 1e-9), np.inf)

    def content(self) -> dict[str, Any]:
        """Return the state for JSON; ``Evidence(**content)`` restores it."""
        lists = {"own": self.own.tolist(), "growth": self.growth.tolist()}
        return vars(self) | lists | {"names": list(self.names), "nats": vars(self.nats)}


def paired(ours: Float[np.ndarray, "pairs M"], controls: Float[np.ndarray, "pairs M"]) -> Any:
    """Return ln of the evidence that two arms of one engine differ, after each pair of answers.

    A pair is two answers to the same prompt, one from each arm. Let g and g′ be, for each of the
    two answers, the product over its tokens of r/h: h is the claimed probability of the token, r
    the probability under an alternative. If both arms have the same law, the two answers may be
    exchanged, so that 2 g/(g + g′) has mean 1. This holds whatever the common law is. So it does
    not matter if h and r were computed from inexact rows.

    Parameters
    ----------
    ours, controls : (pairs, M), ln g of each answer of the two arms, for each alternative.
    """
    steps = math.log(2) + ours - np.logaddexp(ours, controls)
    return log_mean(steps.cumsum(0))
