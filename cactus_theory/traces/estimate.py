"""Hold the results of replays on a trace, as sums by text, with standard errors over texts.

Cycles (logged rounds) of one text are alike, so standard errors come from the jackknife over texts.
Differences and ratios of two settings are computed text by text (paired), which makes their errors
small.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Real
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.base.significance import FEWEST_TEXTS
from cactus_theory.decoding.setting import Setting
from cactus_theory.divergences import read_divergence

PerText = Real[np.ndarray, "texts"]


class CannotSay(ValueError):
    """Error for too few texts to give a verdict, an interval or a choice."""


def check_texts(count: int) -> None:
    """Raise CannotSay for fewer texts than a standard error needs."""
    if count < FEWEST_TEXTS:
        raise CannotSay(
            f"cannot say: errors are those over texts, and need at least {FEWEST_TEXTS} with a "
            f"draft; got {count}: log more (--prompts, --cycles), by a draft that drafts"
        )


@dataclass(frozen=True, eq=False)
class Estimate:
    """A number computed from T texts, with a standard error by the jackknife.

    The difference and the ratio of two estimates from the same texts are estimates, too: their
    standard errors are paired, text by text.

    Attributes
    ----------
    value : the number computed from all texts.
    left_out : (T,), the numbers computed from all texts but one.
    source : fingerprint of the texts, so that only estimates from the same texts are combined.
    """

    value: float
    left_out: PerText
    source: str

    @property
    def standard_error(self) -> float:
        """Return the jackknife's standard error; NaN for one text or if a number is not finite."""
        count = len(self.left_out)
        if count < 2 or not np.isfinite(self.left_out).all():
            return float("nan")
        around = self.left_out - self.left_out.mean()
        return float(np.sqrt((count - 1) / count * (around**2).sum()))

    def __sub__(self, other: "Estimate") -> "Estimate":
        """Return the paired difference; ValueError for estimates from different texts."""
        return combined(np.subtract, self, other)

    def __truediv__(self, other: "Estimate") -> "Estimate":
        """Return the paired ratio; ValueError for estimates from different texts."""
        return combined(np.divide, self, other)


def combined(function: Callable[..., Any], first: Estimate, *others: Estimate) -> Estimate:
    """Apply a function of numbers to estimates from the same texts; the result is an estimate.

    ``function`` is applied to the values and, elementwise, to the numbers with one text left out.
    Raises ValueError for estimates from different texts.
    """
    count = len(first.left_out)
    for other in others:
        if first.source != other.source or count != len(other.left_out):
            raise ValueError(
                f"estimates: must be from the same texts to be paired; got {count} and "
                f"{len(other.left_out)} texts of different sources"
            )
    estimates = first, *others
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(function(*(np.float64(part.value) for part in estimates)))
        return Estimate(value, function(*(part.left_out for part in estimates)), first.source)


def ratio_of_sums(above: PerText, below: PerText, source: str) -> Estimate:
    """Return the ratio Σ above / Σ below of sums over texts as an estimate; NaN for 0/0."""
    tops, bottoms = np.float64(above.sum()), np.float64(below.sum())
    with np.errstate(divide="ignore", invalid="ignore"):
        return Estimate(float(tops / bottoms), _all_but_one(above) / _all_but_one(below), source)


def valued(name: str, estimate: Estimate | None) -> dict[str, float | None]:
    """Return an estimate as items ``name`` and ``name_se`` (standard error); both None for None."""
    if estimate is None:
        return {name: None, f"{name}_se": None}
    return {name: estimate.value, f"{name}_se": estimate.standard_error}


def _all_but_one(values: PerText) -> Float[np.ndarray, "parts"]:
    """Return for each entry the sum of all others, without subtraction, which fails for ∞ − ∞."""
    before = np.concatenate([[0.0], values[:-1].cumsum()])
    after = np.concatenate([values[:0:-1].cumsum()[::-1], [0.0]])
    return before + after


@dataclass(frozen=True, eq=False, kw_only=True)
class Replay(Setting):
    """Sums for each text of a replayed policy, verifier and K: the result of ``replay``."""

    source: str
    cycles: PerText
    tokens: PerText
    spent: dict[str, PerText]
    reached: Float[np.ndarray, "K texts"]
    accepted_at: Float[np.ndarray, "K texts"]
    drafts: PerText
    drafted: PerText

    def add(
        self, text: Tensor, alive: Tensor, going: Tensor, spent: dict[str, Tensor],
        undrafted: dict[str, Tensor],
    ) -> None:  # fmt: skip
        """Add B cycles to the sums; of longer drafts only the first K tokens count.

        ``text`` (B,) holds the cycles' texts; ``alive`` (B, K + 1) the probability P_i that at
        least i tokens are accepted; ``going`` (B, K + 1) whether the text goes on after i tokens;
        ``spent`` by name the divergence of each row (B, K); ``undrafted`` by name the divergence
        (B, K + 1) of a bonus token, or of the token of a round without a draft, after i accepted
        tokens; an empty dictionary if these cost nothing.
        """
        texts = text.numpy()  # a text may occur several times, hence np.add.at
        alive, going = (part[:, : self.num_draft_tokens + 1] for part in (alive, going))
        after = torch.where(going, alive, 0.0)  # P_0 = 1: every call gives a token
        reached, accepted = after[:, :-1], torch.where(going[:, :-1], alive[:, 1:], 0.0)
        width = accepted.shape[1]
        np.add.at(self.cycles, texts, 1.0)
        np.add.at(self.drafts, texts, float(width > 0))
        np.add.at(self.drafted, texts, float(width))
        np.add.at(self.tokens, texts, after.sum(-1).numpy())
        np.add.at(self.reached[:width].T, texts, reached.numpy())
        np.add.at(self.accepted_at[:width].T, texts, accepted.numpy())
        for spec, values in spent.items():
            charged = torch.where(reached > 0, reached * values[:, :width], 0.0)  # 0 · ∞ is NaN
            np.add.at(self.spent[spec], texts, charged.sum(-1).numpy())
        for spec, values in undrafted.items():
            np.add.at(self.spent[spec], texts, (after[:, width] * values[:, width]).numpy())

    @cached_property
    def tokens_per_call(self) -> Estimate:
        """Return emitted tokens per target call, recovered and bonus tokens included."""
        return ratio_of_sums(self.tokens, self.cycles, self.source)

    @property
    def undrafted(self) -> str:
        """Return a sentence on how many target calls had a draft; empty if all calls had one."""
        calls, drafts = (f"{counts.sum():,.0f}" for counts in (self.cycles, self.drafts))
        said = f"{drafts} of {calls} target calls had a draft; tokens a call and divergence a token"
        return "" if calls == drafts else f"{said} are over all of them"

    @cached_property
    def accepted_per_call(self) -> Estimate:
        """Return accepted drafted tokens per target call."""
        return ratio_of_sums(self.accepted_at.sum(0), self.cycles, self.source)

    @property
    def acceptance(self) -> Estimate:
        """Return the accepted share of drafted tokens that are reached (accepted or rejected)."""
        return ratio_of_sums(self.accepted_at.sum(0), self.reached.sum(0), self.source)

    @cached_property
    def acceptance_by_position(self) -> tuple[Estimate, ...]:
        """Return for each position in a draft the accepted share of the tokens that are reached."""
        pairs = zip(self.accepted_at, self.reached, strict=True)
        return tuple(ratio_of_sums(accepted, reached, self.source) for accepted, reached in pairs)

    def part(self, texts: Sequence[int]) -> "Replay":
        """Return the replay restricted to some texts; parts of equal texts can be paired."""
        numbers = np.array(texts, dtype=np.int64)
        sums = {
            field.name: array[..., numbers]
            for field in fields(self)
            if isinstance(array := getattr(self, field.name), np.ndarray)
        }
        spent = {spec: values[numbers] for spec, values in self.spent.items()}
        return replace(self, source=f"{self.source} {numbers.tolist()}", spent=spent, **sums)

    def divergence_per_token(self, divergence: str | None = None) -> Estimate:
        """Return a metered sum per emitted token: a divergence (nats for KL) or a signed quantity.

        ``divergence`` is a divergence's name, ``surprise`` or ``agreement``; None for the first
        that was metered.
        """
        return ratio_of_sums(self._spent(divergence), self.tokens, self.source)

    def _spent(self, divergence: str | None) -> PerText:
        """Return the sums (T,) of a metered divergence; ValueError if it was not metered."""
        divergence = next(iter(self.spent)) if divergence is None else divergence
        spec = divergence if divergence in self.spent else read_divergence(divergence).spec
        return self.spent[check.one_of("divergence", spec, tuple(self.spent))]
