"""Result of a decode: tokens, counts, seconds, and divergence from the target."""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.decoding.readings import DIRECTIONS, Kind, Reading
from cactus_theory.verify.node import Node

DECODING_PARTS = ("draft", "target", "verify", "other")


@dataclass(frozen=True)
class Seconds:
    """Wall-clock seconds of a decode, by part.

    ``draft`` and ``target`` are the models' forward passes, ``verify`` the acceptance step,
    ``other`` sampling and bookkeeping. Three parts are not in ``total``: ``meter`` (measuring and
    recording), ``callback``, and ``preparation``, which is done once (loading compiled loops,
    laying out weights, checking forward passes, capturing CUDA graphs). CUDA kernels run
    asynchronously, so that on a GPU only ``total`` is exact.
    """

    draft: float = 0.0
    target: float = 0.0
    verify: float = 0.0
    other: float = 0.0
    meter: float = 0.0
    callback: float = 0.0
    preparation: float = 0.0

    @property
    def total(self) -> float:
        """Return the seconds spent decoding."""
        return sum(getattr(self, part) for part in DECODING_PARTS)

    @property
    def overhead(self) -> float:
        """Return the share of ``total`` outside the models' forward passes."""
        return (self.verify + self.other) / self.total if self.total else 0.0


@dataclass(frozen=True)
class LogProbs:
    """Natural logarithms of the probabilities of the new tokens, (B, N) float64, NaN as padding.

    Attributes
    ----------
    target : ln q, where q is the target's row for the token, after processors and temperature. The
        sum over an answer is the log-likelihood of the answer under the target. Use ``target`` to
        score a text (perplexity, reranking, the reference of a policy gradient).
    emitted : ln h, where h is the law that the token was drawn from, given the text before the
        token and given that the round reached the token: the emitted law of the token's policy
        (``chain``), the row h at the node (``block``). For a bonus token or a token of a round
        without a draft h is q, or the row that a ``tilt`` or ``truncated`` puts in the place of q.
        Accepted and recovered tokens have the same h.

    With a lossless policy, ``target`` and ``emitted`` are equal. Averaged over h,
    ``emitted − target`` of a token is the meter's charge for the token (KL). So over an answer the
    sum of ``emitted − target`` and the meter's sum have the same expectation, which is at least the
    KL of whole texts. The product of q ÷ h over an answer, ``exp`` of the sum of
    ``target − emitted``, reweights answers to the target's law wherever h excludes no token that q
    allows. Do not score a text with ``emitted``: the law of a token given the text alone is a
    mixture over the places where rounds may have begun, and differs from h.
    """

    target: Float[Tensor, "batch new"]
    emitted: Float[Tensor, "batch new"]


@dataclass(frozen=True)
class GenerationResult:
    """Generated tokens and statistics of a decode; :func:`generate` describes each field."""

    output_token_ids: Int[Tensor, "batch new"]
    row_ended: tuple[bool, ...]
    row_rounds: tuple[Counter[Kind], ...]
    target_calls: int
    draft_calls: int
    seconds: Seconds
    reading: Reading
    rows: Sequence[Node] = ()
    token_charges: Float[Tensor, "batch new"] | None = None
    row_directions: Float[np.ndarray, "batch 3"] | None = None
    log_probs: LogProbs | None = None
    loop: str = "host"
    dtype: str = ""

    @property
    def num_tokens(self) -> int:
        """Return the number of new tokens of all texts."""
        return self.reading.num_tokens

    @property
    def num_accepted(self) -> int:
        """Return the number of accepted drafted tokens."""
        return self.reading.num_accepted_tokens

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """Return the number of new tokens of each text."""
        return tuple((self.output_token_ids >= 0).sum(-1).tolist())

    @property
    def ended(self) -> bool:
        """Return whether every text was ended by an end-of-text token or ``stop``."""
        return all(self.row_ended)

    def readings(self) -> list[Reading]:
        """Return one :class:`Reading` per text."""
        rows = zip(self.row_rounds, self.row_lengths, strict=True)
        if self.token_charges is None or self.row_directions is None:
            return [Reading(rounds, length) for rounds, length in rows]
        name, charges = self.reading.divergence, self.token_charges.tolist()
        sums = [dict(zip(DIRECTIONS, row, strict=True)) for row in self.row_directions.tolist()]
        return [
            Reading(rounds, length, math.fsum(spent), max(spent, default=0.0), name, **directions)
            for (rounds, length), spent, directions in zip(rows, charges, sums, strict=True)
        ]

    @property
    def tokens_per_second(self) -> float:
        """Return new tokens per second of ``seconds.total``, which leaves out the meter."""
        return self.num_tokens / self.seconds.total

    def statistics(self) -> dict[str, Any]:
        """Return all statistics by their names in tables and JSON files."""
        seconds = self.seconds
        figures = {
            "dtype": self.dtype,
            "ended": self.ended,
            "target_calls": self.target_calls,
            "draft_calls": self.draft_calls,
            **self.reading.as_dict(),
            "tokens_per_second": self.tokens_per_second,
            "seconds": seconds.total,
            **{f"{part}_seconds": getattr(seconds, part) for part in DECODING_PARTS},
            "overhead": seconds.overhead,
            "preparation_seconds": seconds.preparation,
        }
        metered = self.reading.emitted_divergence is not None
        return figures | ({"meter_seconds": seconds.meter} if metered else {})


class Stopwatch:
    """Stopwatch of a decode: adds the seconds since the last call of :meth:`lap` to a part."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self.last = time.perf_counter()

    def lap(self, part: str) -> None:
        """Add the seconds since the last call to ``part``, such as ``target``."""
        now = time.perf_counter()
        self.parts[part] = self.parts.get(part, 0.0) + now - self.last
        self.last = now

    def set_apart(self, seconds: float) -> None:
        """Move ``seconds`` from ``other`` to ``preparation``."""
        self.parts["other"] -= seconds
        self.parts["preparation"] = self.parts.get("preparation", 0.0) + seconds

    def seconds(self, since: Mapping[str, float] | None = None) -> Seconds:
        """Return the seconds of each part, less those in ``since``, a copy of earlier ``parts``."""
        before = since or {}
        return Seconds(**{part: now - before.get(part, 0.0) for part, now in self.parts.items()})
