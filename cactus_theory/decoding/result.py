"""Results of a decode: the tokens, their counts and seconds, and their cost in fidelity."""

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
    """Wall-clock seconds of a decode.

    ``draft`` and ``target`` are the models' forward passes, ``verify`` the acceptance step,
    ``other`` sampling and bookkeeping. ``meter`` (measuring and recording), ``callback`` and
    ``preparation``, done once (compiled loops loaded, a model's weights laid out, its passes tried,
    CUDA graphs captured), are not part of ``total``. CUDA kernels run asynchronously: there only
    ``total`` is exact.
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
    target : ln q, q the target's row for the token, after processors and temperature. Their sum
        is the log-likelihood of the answer under the target: this one scores a text (perplexity,
        reranking, the reference of a policy gradient).
    emitted : ln h, h the law that the token was drawn from, given the text before it and that
        the round got that far: the emitted law of the token's policy (``chain``), the row h at
        the node (``block``), and q for a bonus token or one that was not drafted. Accepted and
        recovered tokens have the same h: which of the two a token was is not asked.

    Where the policy is lossless the two are equal. On average over h, ``emitted − target`` of a
    token is the divergence that the meter charges for it (KL), so that the sums of an answer
    average to the meter's, no less than the KL of whole texts. The product of q ÷ h over an
    answer, ``exp`` of the sum of ``target − emitted``, weighs answers back to the target's law
    wherever h excludes no token that q allows. ``emitted`` is not the law of the token given the
    text alone, which is a mixture over where rounds may have begun: it does not score a text.
    """

    target: Float[Tensor, "batch new"]
    emitted: Float[Tensor, "batch new"]


@dataclass(frozen=True)
class GenerationResult:
    """Generated tokens and statistics, over all rows of the batch."""

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
        """Return the number of new tokens."""
        return self.reading.num_tokens

    @property
    def num_accepted(self) -> int:
        """Return the number of accepted drafted tokens."""
        return self.reading.num_accepted_tokens

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """Return the new tokens of each row."""
        return tuple((self.output_token_ids >= 0).sum(-1).tolist())

    @property
    def ended(self) -> bool:
        """Return whether every text ended by itself."""
        return all(self.row_ended)

    def readings(self) -> list[Reading]:
        """Return the readings of each row by itself; see ``decoding.readings``."""
        rows = zip(self.row_rounds, self.row_lengths, strict=True)
        if self.token_charges is None or self.row_directions is None:
            return [Reading(rounds, length) for rounds, length in rows]
        name, charges = self.reading.divergence, self.token_charges.tolist()
        return [
            Reading(rounds, length, math.fsum(own), max(own, default=0.0), name,
                    **dict(zip(DIRECTIONS, sums, strict=True)))
            for (rounds, length), own, sums in zip(
                rows, charges, self.row_directions.tolist(), strict=True)
        ]  # fmt: skip

    @property
    def tokens_per_second(self) -> float:
        """Return new tokens per second of decoding; metering and preparation are not counted."""
        return self.num_tokens / self.seconds.total

    def statistics(self) -> dict[str, Any]:
        """Return every figure under the name that tables and JSON give it."""
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
    """Charges the time since the last lap to a named part."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self.last = time.perf_counter()

    def lap(self, part: str) -> None:
        """Charge the time since the last lap to ``part``."""
        now = time.perf_counter()
        self.parts[part] = self.parts.get(part, 0.0) + now - self.last
        self.last = now

    def set_apart(self, seconds: float) -> None:
        """Charge so many seconds of ``other`` to ``preparation``."""
        self.parts["other"] -= seconds
        self.parts["preparation"] = self.parts.get("preparation", 0.0) + seconds

    def seconds(self, since: Mapping[str, float] | None = None) -> Seconds:
        """Return the seconds charged so far, or since ``parts`` were these."""
        before = since or {}
        return Seconds(**{part: own - before.get(part, 0.0) for part, own in self.parts.items()})
