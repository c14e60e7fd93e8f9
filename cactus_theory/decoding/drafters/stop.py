r"""Stop drafting where the tokens drafted so far will probably not all be accepted.

Verification ends at the first refusal, so a token drafted after a doubtful one is mostly wasted.
With φ̂(p) the expected acceptance of a token that was drafted with probability p, a row goes on
after its tokens d_1..d_j iff

.. math:: \prod_{i \le j} \hat φ(p_i(d_i)) \ge threshold

All of d_1..d_j are submitted, the one that ended the draft too: whether d_{j+1} is drafted depends
on tokens before it only, so verification stays as lossless as it was (THEORY.md, Theorem 12).
Withdrawing d_j for its own value would not be: with q = (.5, .5) and p = (.8, .2), dropping what
has p(d) < .3 emits (.6, .4).
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.base.arguments import whole_number
from cactus_theory.decoding.result import VerifiedRows
from cactus_theory.policies import Policy
from cactus_theory.policies import policy as find_policy

Knots = tuple[tuple[float, float], ...]

# Lossless acceptance at temperature 1 as a function of p(d), between what two small trained
# pairs measured (3,000 and 1,500 verified rows, standard errors .01 to .04).
DEFAULT_KNOTS: Knots = ((0.0, 0.45), (0.02, 0.55), (0.25, 0.63), (0.5, 0.74), (1.0, 0.98))


@dataclass(frozen=True)
class DraftStop:
    """When a drafter stops: the product of expected acceptances falls below ``threshold``.

    At least one token is drafted, at most K (which ``adaptive`` may still choose, knowing what
    was kept of the tokens that were drafted). Drafts that are certain of their tokens (greedy
    ones, n-grams, anything at temperature 0) say nothing by p(d) = 1 and are not stopped.

    Parameters
    ----------
    threshold : in [0, 1]; 0 never stops.
    knots : pairs (p, φ̂), p rising and φ̂ not falling, both in [0, 1]; φ̂ is linear between
        them and constant outside. The default was measured on two small pairs under lossless
        verification; :meth:`fit` and :meth:`from_rows` measure it on yours.

    Raises
    ------
    ValueError
        A threshold outside [0, 1], knots that do not rise.

    Examples
    --------
    >>> stop = DraftStop(0.5, knots=((0.0, 0.5), (1.0, 1.0)))
    >>> stop.acceptance(torch.tensor([0.0, 0.5, 1.0]))
    array([0.5 , 0.75, 1.  ])
    >>> ModelDrafter(pair.draft, stop=stop).stop.threshold
    0.5
    """

    threshold: float = 0.3
    knots: Knots = DEFAULT_KNOTS

    def __post_init__(self) -> None:
        check.number("threshold", self.threshold, 0, 1)
        places, values = np.asarray(self.knots, dtype=float).reshape(-1, 2).T
        inside = ((places >= 0) & (places <= 1) & (values >= 0) & (values <= 1)).all()
        if not len(places) or not inside:
            raise ValueError(f"knots: must be pairs of numbers in [0, 1]; got {self.knots!r}")
        if (np.diff(places) <= 0).any() or (np.diff(values) < 0).any():
            raise ValueError(f"knots: p must rise and acceptance must not fall; got {self.knots!r}")

    @cached_property
    def lines(self) -> tuple[list[float], list[tuple[float, float]]]:
        """Return the knots' places and, for each interval, intercept and slope of φ̂ there."""
        places, values = np.asarray(self.knots, dtype=float).T
        slopes = np.concatenate([[0.0], np.diff(values) / np.diff(places), [0.0]])
        at = np.concatenate([places[:1], places])
        pairs = zip(np.interp(at, places, values) - slopes * at, slopes, strict=True)
        return places.tolist(), [(float(start), float(slope)) for start, slope in pairs]

    def acceptance(self, draft_prob: ArrayLike) -> Float[np.ndarray, "*any"]:
        """Return φ̂ of tokens that were drafted with these probabilities."""
        places, values = np.asarray(self.knots, dtype=float).T
        return np.interp(np.atleast_1d(draft_prob), places, values)

    @classmethod
    def fit(
        cls, draft_prob: ArrayLike, accepted: ArrayLike, *, threshold: float = 0.3, bins: int = 12
    ) -> "DraftStop":
        """Return a stop whose φ̂ is the monotone regression on verified tokens.

        Tokens sorted by p are cut into ``bins`` groups of equal size; neighbours whose means do
        not rise are pooled (isotonic regression of the groups), and each pool is a knot.

        Parameters
        ----------
        draft_prob : (n,) p(d) of each verified token, refused ones included.
        accepted : (n,) whether it was accepted, 0 or 1, or the probability of that.

        Raises
        ------
        ValueError
            No tokens, numbers outside [0, 1], lengths that differ.
        """
        whole_number("bins", bins, 1)
        p, kept = (np.asarray(values, dtype=float) for values in (draft_prob, accepted))
        if p.ndim != 1 or p.shape != kept.shape or not len(p):
            raise ValueError(
                "draft_prob, accepted: must be two lists of one length, at least 1; "
                f"got shapes {p.shape} and {kept.shape}"
            )
        for name, values in (("draft_prob", p), ("accepted", kept)):
            if not ((values >= 0) & (values <= 1)).all():
                raise ValueError(
                    f"{name}: must lie in [0, 1]; got {values.min()} to {values.max()}"
                )
        groups = np.array_split(np.argsort(p, kind="stable"), min(bins, len(p)))
        means = [
            (len(group), float(p[group].mean()), float(kept[group].mean())) for group in groups
        ]
        return cls(threshold, tuple((place, value) for _, place, value in _pooled(means)))

    @classmethod
    def from_rows(
        cls,
        rows: VerifiedRows,
        policy: Policy | str | None = None,
        *,
        threshold: float = 0.3,
        bins: int = 12,
    ) -> "DraftStop":
        """Return :meth:`fit` of the rows that a decode has recorded (``record_rows=True``).

        ``policy`` takes its acceptance φ of each token, which says more than the coin that was
        tossed; None takes what was accepted.
        """
        at = rows.draft_token_ids[:, None]
        p = rows.draft_probs.gather(1, at)[:, 0]
        kept = rows.accepted.double()
        if policy is not None:
            kept = find_policy(policy).acceptance(rows.target_probs, rows.draft_probs, at)[:, 0]
        return cls.fit(
            p.clamp(0, 1).cpu().numpy(), kept.cpu().numpy(), threshold=threshold, bins=bins
        )


def _pooled(groups: Sequence[tuple[int, float, float]]) -> list[tuple[int, float, float]]:
    """Return (size, p, acceptance) with neighbours merged until both of their means rise."""
    pools: list[tuple[int, float, float]] = []
    for size, place, value in groups:
        while pools and (value <= pools[-1][2] or place <= pools[-1][1]):
            other, p, kept = pools.pop()
            total = size + other
            place, value = (place * size + p * other) / total, (value * size + kept * other) / total
            size = total
        pools.append((size, min(place, 1.0), min(value, 1.0)))
    return pools


def as_stop(stop: "DraftStop | float | None") -> DraftStop | None:
    """Return a stop for a threshold or a stop, None for None."""
    return stop if stop is None or isinstance(stop, DraftStop) else DraftStop(stop)


class Watch:
    """A stop at work on the drafts of one round; shortens the ``lengths`` of rows that stop."""

    def __init__(self, stop: DraftStop, lengths: list[int]) -> None:
        self.threshold, self.lengths = stop.threshold, lengths
        self.places, self.pieces = stop.lines
        self.products = [1.0] * len(lengths)

    def see(
        self, drafted: int, probs: Float[Tensor, "batch vocab"], token: Int[Tensor, "batch"]
    ) -> None:
        """Learn token number ``drafted`` (from 1) of every row and the rows it was drawn from.

        One number a row is read in one transfer. On CUDA that waits for the device, once a
        drafted token: no step can be saved without knowing that it is not needed. Entries of
        rows that have stopped are arbitrary and not looked at.
        """
        for row, (p,) in enumerate(probs.gather(1, token[:, None]).tolist()):
            if self.lengths[row] <= drafted:
                continue
            start, slope = self.pieces[bisect_right(self.places, p)]
            self.products[row] *= start + slope * p
            if self.products[row] < self.threshold:
                self.lengths[row] = drafted
