r"""What readings of answers certify: a bound on the mean KL over prompts (THEORY.md, Theorem 21).

A ledger keeps every answer within C nats, so that n readings lie in [0, C]. Were the answers those
of independently drawn prompts, the mean reading of all prompts, and with it the mean KL, is at most
each of these with probability 1 − β:

* Hoeffding's bound before he rounds it: C times the largest m with
  :math:`\mathrm{kl}_2(\bar x/C ‖ m) ≤ \ln(1/β)/n`, never above
  :math:`\bar x + C\sqrt{\ln(1/β)/2n}`;
* the empirical Bernstein bound :math:`\bar x + s\sqrt{2\ln(2/β)/n} + 7C\ln(2/β)/3(n-1)` (Maurer &
  Pontil 2009), s the standard deviation: better for many readings that differ little.

Neither is better everywhere, so the smaller one counts and each gets half of the risk, which adds
ln 2 to ln(1/β): at β = .05 the roots grow by 11 %.
"""

import math
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
    bound : the least of these and the cap.

    Examples
    --------
    >>> seen = certificate([0.1, 0.2, 0.15, 0.05] * 250, cap=0.5)
    >>> f"{seen.mean:.3f}, at most {seen.bound:.3f}"
    '0.125, at most 0.134'
    """

    count: int
    mean: float
    worst: float
    cap: float
    alpha: float
    hoeffding: float
    bernstein: float
    bound: float

    @property
    def sentences(self) -> list[str]:
        """Return what is certified, and what that rests on."""
        sure = f"with confidence {100 * (1 - self.alpha):g} %"
        return [
            f"{self.count} readings, mean {self.mean:.4g} nats, worst {self.worst:.4g}: {sure} the "
            f"mean KL of an answer over all prompts is at most {self.bound:.4g} nats "
            f"(Hoeffding {self.hoeffding:.4g}, empirical Bernstein {self.bernstein:.4g}, cap "
            f"{self.cap:.4g})",
            "that is of prompts like these on average, and says nothing of a single one, for which "
            "there is the cap alone; it assumes prompts drawn independently, one answer each, and "
            "that neither policy nor cap was chosen by looking at them",
            "readings are bounded because a ledger enforces the cap; that no reading was above it "
            "would not be enough",
        ]


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
    >>> certificate([0.1] * 20, cap=0.5).bound > 0.1
    True
    """
    cap = check.number("cap", cap, 0)
    if cap == math.inf:
        raise ValueError("cap: must be finite, as readings without a hard cap certify nothing")
    alpha = check.number("alpha", alpha, 0, 1, open_low=True)
    values = [check.number("readings", own, 0) for own in readings]
    if not values:
        raise ValueError("readings: must be at least one; got none")
    worst, count = max(values), len(values)
    if worst > cap * (1 + ROUNDING):
        raise ValueError(
            f"readings: must be within the cap, {cap:g} nats an answer; got {worst:g}: no ledger "
            "kept it (a ledger's own cap is nats a token)"
        )
    mean = math.fsum(values) / count
    upper = cap * _most_mean(min(mean / cap, 1.0), math.log(2 / alpha) / count) if cap else 0.0
    bernstein = math.inf
    if count > 1:
        spread = math.sqrt(math.fsum((own - mean) ** 2 for own in values) / (count - 1))
        log = math.log(4 / alpha)
        bernstein = mean + spread * math.sqrt(2 * log / count) + 7 * cap * log / 3 / (count - 1)
    bound = min(cap, upper, bernstein)
    return Certificate(count, mean, worst, cap, alpha, upper, bernstein, bound)


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


def read_readings(path: str | Path) -> list[tuple[float, int | None]]:
    """Return nats and new tokens (None where they are not told) of each answer in a file.

    JSON, or JSON lines: numbers, readings (``Reading.as_dict()``) or what ``generate --json``
    prints, alone or in lists.

    Raises
    ------
    OSError, ValueError
        A file that cannot be read, or holds something else; readings of another divergence.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise OSError(f"--readings: must be a readable file; {error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"--readings: must be UTF-8 text; got {path.name}, {error}") from None
    whole = text.lstrip().startswith("[")
    lines = [(1, text)] if whole else list(enumerate(text.split("\n"), 1))
    found: list[tuple[float, int | None]] = []
    for number, line in lines:
        if line.strip():
            rule = f"--readings: line {number} of {path.name} must be JSON"
            found += _of(parsed_json(rule, line), f"line {number} of {path.name}")
    if not found:
        raise ValueError(f"--readings: must hold at least one; got {path.name}, empty")
    return found


def _of(value: Any, where: str) -> list[tuple[float, int | None]]:
    if isinstance(value, dict) and "readings" in value:
        value = value["readings"]
    if isinstance(value, list):
        return [own for item in value for own in _of(item, where)]
    spent, tokens = value, None
    if isinstance(value, dict):
        spent, tokens = value.get("emitted_kl"), value.get("num_tokens")
    if isinstance(spent, bool) or not isinstance(spent, int | float):
        raise ValueError(
            f"--readings: {where} must hold a number, or emitted_kl (nats; the meter of another "
            f"divergence promises nothing); got {str(value):.60}"
        )
    if tokens is not None and type(tokens) is not int:
        raise ValueError(f"--readings: {where}: num_tokens must be whole; got {tokens!r:.60}")
    return [(check.number("--readings", spent, 0), tokens)]


def check_kept(readings: Sequence[tuple[float, int | None]], own: Promise) -> None:
    """Raise for an answer that a ledger with this promise cannot have written.

    Raises
    ------
    ValueError
        One that is over, in the words of what may have been meant.
    """
    for number, (spent, tokens) in enumerate(readings, 1):
        if own.tokens is not None and tokens is not None and tokens > own.tokens:
            raise ValueError(
                f"--tokens: must be the most that an answer may have; got {own.tokens}, and answer "
                f"{number} of --readings has {tokens}"
            )
        allowed = own.cap if tokens is None else own.after(tokens).cap
        if spent > allowed * (1 + ROUNDING):
            hint = ""
            if own.per_token is None and all(
                kept is not None and one <= own.cap * kept * (1 + ROUNDING)
                for one, kept in readings
            ):
                hint = f"; all are within {own.cap:g} a token: was --per-token meant?"
            raise ValueError(
                f"--readings: answer {number} must be within {allowed:.4g} nats, as a ledger keeps "
                f"it; got {spent:.4g}{hint}"
            )
