r"""What readings of answers certify: a bound on the mean KL over prompts (THEORY.md, Theorem 23).

A ledger keeps every answer within C nats, so that n readings lie in [0, C]. If prompts are drawn
independently, the mean over all prompts is at most each of these with probability 1 − β:

* Hoeffding's bound before he rounds it: C times the largest m with
  :math:`\mathrm{kl}_2(\bar x/C ‖ m) ≤ \ln(1/β)/n`, never above
  :math:`\bar x + C\sqrt{\ln(1/β)/2n}`;
* the empirical Bernstein bound :math:`\bar x + s\sqrt{2\ln(2/β)/n} + 7C\ln(2/β)/3(n-1)` (Maurer &
  Pontil 2009), s the standard deviation: better for many readings that differ little.

Neither is better everywhere, so the smaller one counts and each gets half of the risk, which adds
ln 2 to ln(1/β): at β = .05 the roots grow by 11 %.
"""

import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cactus_theory import _arguments as check
from cactus_theory._files import parsed_json
from cactus_theory.optimum.roots import RisingRoot
from cactus_theory.promises import SETTLED, Promise, binary_kl

RISK = 0.05
# of the distance from the mean to 1; a nearer bound is as good as the mean
EXACT = 1e-15
# a meter adds the same numbers up in another order than a ledger
ROUNDING = 1e-6


@dataclass(frozen=True)
class Certificate:
    """What n readings say about the mean KL over prompts.

    Attributes
    ----------
    count, mean, worst : of the readings, in nats an answer.
    cap : nats that no answer can exceed, whatever the prompt.
    alpha : probability that ``bound`` is wrong, over the choice of prompts and the coins.
    hoeffding, bernstein : the two bounds on the mean, each wrong with probability alpha/2.

    Examples
    --------
    >>> seen = ct.certificate([0.1, 0.2, 0.15, 0.05] * 250, cap=0.5)
    >>> f"{seen.mean:.3f}, at most {seen.bound:.3f}"
    '0.125, at most 0.135'
    """

    count: int
    mean: float
    worst: float
    cap: float
    alpha: float
    hoeffding: float
    bernstein: float

    @property
    def bound(self) -> float:
        """Return the least of the two bounds and the cap."""
        return min(self.cap, self.hoeffding, self.bernstein)

    @property
    def sentence(self) -> str:
        """Return what is certified, and what that rests on."""
        return (
            f"{self.count} readings, mean {self.mean:.4g} nats, worst {self.worst:.4g}: with "
            f"confidence {100 * (1 - self.alpha):g} % the mean KL of an answer over all prompts is "
            f"at most {self.bound:.4g} nats (Hoeffding {self.hoeffding:.4g}, empirical Bernstein "
            f"{self.bernstein:.4g}, cap {self.cap:.4g}). That is an average and says nothing of "
            "one prompt, for which there is the cap. It assumes prompts drawn independently, one "
            "answer each, neither policy nor cap chosen by looking at them, and a ledger that "
            "enforces the cap: that no reading was above it would not be enough"
        )


def certificate(readings: Sequence[float], cap: float, alpha: float = RISK) -> Certificate:
    """Return a bound on the mean KL over prompts, from readings that a ledger keeps within a cap.

    Parameters
    ----------
    readings : nats charged for each answer, one answer a prompt.
    cap : nats that the ledger lets no answer exceed.
    alpha : how probable the bound may be wrong.

    Raises
    ------
    ValueError
        No readings, one that is negative or above the cap, a number out of its range.

    Examples
    --------
    >>> ct.certificate([0.1] * 20, cap=0.5).mean
    0.1
    """
    cap = check.number("cap", cap, 0, sys.float_info.max)
    alpha = check.number("alpha", alpha, 0, 1, open_low=True)
    values = [check.number("readings", own, 0, cap * (1 + ROUNDING)) for own in readings]
    if not values:
        raise ValueError("readings: must be at least one; got none")
    count, mean = len(values), math.fsum(values) / len(values)
    upper = cap * _most_mean(min(mean / cap, 1.0), math.log(2 / alpha) / count) if cap else 0.0
    bernstein = math.inf
    if count > 1:
        spread, log = statistics.stdev(values, mean), math.log(4 / alpha)
        bernstein = mean + spread * math.sqrt(2 * log / count) + 7 * cap * log / 3 / (count - 1)
    return Certificate(count, mean, max(values), cap, alpha, upper, bernstein)


def _most_mean(mean: float, amount: float) -> float:
    """Return the largest m with kl₂(mean‖m) ≤ amount."""
    rest = 1 - mean
    if rest == 0:
        return 1.0
    if mean == 0:
        return -math.expm1(-amount)
    most = min(math.sqrt(amount / 2), rest)
    search = RisingRoot(EXACT * rest, most, most / 2, SETTLED, 2 * amount)
    while not search.done:
        x = search.x
        search.tell(binary_kl(mean + x, rest - x, -x) - amount)
    return mean + search.x


def read_readings(path: str | Path, own: Promise) -> list[float]:
    """Return the nats of each answer in a file, if a ledger with this promise can have kept them.

    JSON lines, or one JSON list: numbers, readings (``Reading.as_dict()``) or what ``generate
    --json`` prints.

    Raises
    ------
    OSError, ValueError
        A file that cannot be read, or holds something else; an answer that is over its cap.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--readings: must be a readable file of JSON lines; {error}") from None
    lines = [text] if text.lstrip().startswith("[") else text.split("\n")
    parsed = [parsed_json(f"--readings: line {number} of {path} must be JSON", line)
              for number, line in enumerate(lines, 1) if line.strip()]  # fmt: skip
    answers = [answer for value in parsed for answer in _answers(value)]
    for number, (spent, tokens) in enumerate(answers, 1):
        allowed = own.nats if tokens is None or own.cap is not None else own.after(tokens).nats
        if own.tokens is not None and tokens is not None and tokens > own.tokens:
            raise ValueError(f"--tokens: must be the most of any answer; got {own.tokens}, and "
                             f"answer {number} of --readings has {tokens}")  # fmt: skip
        if spent > allowed * (1 + ROUNDING):
            kept = own.cap is not None and tokens and spent <= own.cap * tokens
            hint = ", which is within the cap a token: was --per-token meant?" if kept else ""
            raise ValueError(
                f"--readings: answer {number} must be within {allowed:.4g} nats, as a ledger keeps "
                f"it; got {spent:.4g}{hint}"
            )
    return [spent for spent, _ in answers]


def _answers(value: Any) -> list[tuple[float, int | None]]:
    """Return nats, and new tokens where they are told, of all answers in a JSON value."""
    value = value.get("readings", value) if isinstance(value, dict) else value
    if isinstance(value, list):
        return [own for item in value for own in _answers(item)]
    own = value if isinstance(value, dict) else {"emitted_kl": value}
    spent, tokens = own.get("emitted_kl"), own.get("num_tokens", None)
    if type(spent) not in (int, float) or type(tokens) not in (int, type(None)):
        raise ValueError(
            "--readings: must hold nats, or emitted_kl and num_tokens (the meter of another "
            f"divergence promises nothing); got {str(value):.60}"
        )
    return [(check.number("--readings", spent, 0), tokens)]
