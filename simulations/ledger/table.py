"""Tables of capped and of free answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..common.statistics import jackknife_error

# groups of prompts that are left out in turn
GROUPS = 8
# tokens of an answer at which the books are shown
EVERY = 2


@dataclass(frozen=True)
class Line:
    """One line: a band at a price (``setting``), or a ledger with a cap."""

    verifier: str
    kind: str
    setting: float

    @property
    def key(self) -> str:
        """Return the name under which results are kept."""
        return f"{self.verifier}|{self.kind}|{self.setting:g}"


@dataclass(frozen=True)
class Answers:
    """Answers: what each token was charged, in nats, and target calls."""

    costs: list[np.ndarray]
    calls: np.ndarray

    def only(self, kept: np.ndarray) -> Answers:
        """Return some of the answers."""
        return Answers([self.costs[i] for i in kept], self.calls[kept])

    @property
    def point(self) -> tuple[float, float]:
        """Return emitted KL per token and tokens per call."""
        tokens = sum(map(len, self.costs))
        return sum(float(own.sum()) for own in self.costs) / tokens, tokens / self.calls.sum()


def rows_of(answers: Mapping[Line, Answers], prompts: int) -> list[dict[str, Any]]:
    """Return one row a line.

    ``over`` is the share of answers that at their end have spent more per token than the cap
    (of a ledger) or the mean (of a band); ``largest_answer`` the largest spend per token of any
    answer at its end.
    """
    rows = []
    for line, own in answers.items():
        kl, tokens = own.point
        limit = line.setting if line.kind == "ledger" else kl
        ends = np.array([costs.sum() / len(costs) for costs in own.costs])
        ratio, error = _against_band(answers, line, prompts)
        rows.append(
            {
                **asdict(line),
                "answers": len(own.costs),
                "kl_per_token": kl,
                "used": kl / line.setting if line.kind == "ledger" else None,
                "largest_answer": float(ends.max()),
                "over": float((ends > limit).mean()),
                "tokens_per_call": float(tokens),
                "ratio": ratio,
                "ratio_se": error,
            }
        )
    return rows


def along(answers: Mapping[Line, Answers]) -> Iterator[dict[str, Any]]:
    """Yield what answers have spent after t tokens: median, 90th percentile and largest."""
    for line, own in answers.items():
        longest = max(map(len, own.costs))
        spent = np.full((len(own.costs), longest), np.nan)
        for row, costs in zip(spent, own.costs, strict=True):
            row[: len(costs)] = costs.cumsum()
        for t in range(EVERY, longest + 1, EVERY):
            here = spent[:, t - 1][~np.isnan(spent[:, t - 1])]
            yield {
                **asdict(line),
                "tokens": t,
                "median": float(np.median(here)),
                "upper": float(np.quantile(here, 0.9)),
                "largest": float(here.max()),
            }


def _against_band(
    answers: Mapping[Line, Answers], line: Line, prompts: int
) -> tuple[float | None, float | None]:
    """Return tokens per call over the band's at equal KL, and its standard error."""
    if line.kind == "band":
        return None, None
    bands = [
        own for one, own in answers.items() if (one.verifier, one.kind) == (line.verifier, "band")
    ]
    whole = _ratio(answers[line], bands)
    count = len(answers[line].costs)
    group = np.arange(count) % prompts * GROUPS // prompts
    parts = [
        _ratio(answers[line].only(kept), [own.only(kept) for own in bands])
        for kept in (np.flatnonzero(group != g) for g in np.unique(group))
    ]
    known = [part for part in parts if part is not None]
    if whole is None or len(known) < max(len(parts), 2):
        return whole, None
    return whole, jackknife_error(known)


def _ratio(own: Answers, bands: list[Answers]) -> float | None:
    """Return None where no two bands have less and more KL."""
    kl, tokens = own.point
    points = sorted(band.point for band in bands)
    known = [band_kl for band_kl, _ in points]
    if not known or not known[0] <= kl <= known[-1]:
        return None
    return float(tokens / np.interp(kl, known, [calls for _, calls in points]))
