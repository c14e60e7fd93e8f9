"""A bug that engines have had: the draft's noise is used again to draw the recovered token.

Gumbel noise draws the drafted token, argmax(ln p + G). After a rejection the recovered token
must be drawn with new noise; with the same G, tokens that the draft likes come out too seldom.
A chi-square test against the exact law sees it once there are enough rounds.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

import cactus_theory as ct

from . import INK, OPTIMUM, OWN, bars

TARGET = np.array([0.60, 0.35, 0.05])
DRAFT = np.array([0.30, 0.25, 0.45])
ROUNDS = 2**20
QUICK_ROUNDS = 2**15
# chance of a false alarm of one test
LEVEL = 1e-6


@dataclass(frozen=True)
class Result:
    """Counts of tokens (rounds tested, V), and chi-square p-values of each, both ways."""

    law: np.ndarray
    rounds: np.ndarray
    reused: np.ndarray
    fresh: np.ndarray

    def p_values(self, counts: np.ndarray) -> np.ndarray:
        """Return the p-value of each line of counts, χ² with V − 1 = 2 degrees of freedom."""
        expected = self.rounds[:, None] * self.law
        return np.exp(-((counts - expected) ** 2 / expected).sum(1) / 2)


def measure(quick: bool = False) -> Result:
    """Return what comes out with the same noise and with new noise."""
    law = ct.emitted_law(ct.policy("speculative"), TARGET, DRAFT)  # the target's row, exactly
    most = QUICK_ROUNDS if quick else ROUNDS
    rounds = 2 ** np.arange(6, int(np.log2(most)) + 1)
    coins = np.random.default_rng(0)
    noise, again = coins.gumbel(size=(2, most, 3))
    coin = coins.random(most)
    reused, fresh = (emitted(noise, second, coin) for second in (noise, again))
    counts = [np.eye(3)[tokens].cumsum(0)[rounds - 1] for tokens in (reused, fresh)]
    return Result(law, rounds, *counts)


def emitted(noise: np.ndarray, second: np.ndarray, coin: np.ndarray) -> np.ndarray:
    """Return the tokens (N,) of N lossless rounds that recover with the noise ``second`` (N, V)."""
    drafted = (np.log(DRAFT) + noise).argmax(1)
    missing = np.maximum(TARGET - DRAFT, 0)
    likely = np.log(missing, out=np.full(3, -np.inf), where=missing > 0)
    recovered = (likely + second).argmax(1)
    return np.where(coin < (TARGET / DRAFT)[drafted], drafted, recovered)


def say(result: Result) -> str:
    shares = [counts[-1, 0] / result.rounds[-1] for counts in (result.reused, result.fresh)]
    alarms = result.rounds[result.p_values(result.reused) < LEVEL]
    return (
        f"a token of {TARGET[0]:.0%} comes out {shares[0]:.2%} of the time with the draft's noise, "
        f"{shares[1]:.2%} with new noise ({result.rounds[-1]:,} rounds)\n"
        f"seen at a false-alarm rate of {LEVEL:g} after {alarms[0]:,} rounds"
    )


def draw(figure: Any, result: Result) -> None:
    """Draw the laws, and the p-values as rounds add up."""
    left, right = figure.subplots(1, 2)
    rows = {
        "target": (TARGET, INK),
        "new noise": (result.fresh[-1] / result.rounds[-1], OPTIMUM),
        "draft's noise again": (result.reused[-1] / result.rounds[-1], OWN),
    }
    bars(left, rows, [f"token {n}" for n in range(3)])
    left.set_title(f"A 60 % token comes out {result.reused[-1, 0] / result.rounds[-1]:.1%}")
    left.legend(frameon=False, fontsize=7.5)
    for name, counts in (("new noise", result.fresh), ("draft's noise again", result.reused)):
        p_values = np.maximum(result.p_values(counts), 1e-12)
        right.plot(result.rounds, p_values, color=rows[name][1], label=name, marker="o", ms=3)
    right.axhline(LEVEL, color=INK, ls=":", lw=1, label="alarm")
    right.set(xscale="log", yscale="log", ylim=(1e-12, 3), xlabel="rounds")
    right.set_ylabel("p-value against the target's row")
    right.set_title("When a test sees it")
    right.legend(frameon=False, fontsize=7.5)
