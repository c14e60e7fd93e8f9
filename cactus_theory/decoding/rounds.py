"""Third stage of a decode: rounds until every text has ended, with counts, meter and errors.

``HostRounds`` and ``DeviceRounds`` draft and verify a round; :class:`Rounds` is their base class.
"""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.base.threads import one_thread
from cactus_theory.decoding.models.projections import preparation
from cactus_theory.decoding.prepare import HALF, Opening, dtype_of
from cactus_theory.decoding.processors import name_of
from cactus_theory.decoding.readings import Kind, Reading
from cactus_theory.decoding.result import GenerationResult, Stopwatch
from cactus_theory.decoding.text import Text
from cactus_theory.optimum.band_row import warm
from cactus_theory.verify.draft import Verdict
from cactus_theory.verify.node import Node


class DecodingError(RuntimeError):
    """Error of a decode: a token's row holds NaN, or gives no token a positive probability.

    The decode stops for all texts of the batch. A text's tokens do not depend on the rest of the
    batch. So decode the other texts again without the failed text: with unchanged seeds (with a
    single seed, ``seed + b`` for text b), they get the same tokens as before, and further tokens.

    Attributes
    ----------
    text : the number of the failed text in the batch.
    position : the number of new tokens of this text before the token without a distribution.
    result : the :class:`GenerationResult` of all texts, up to the round before.

    Examples
    --------
    >>> def spoilt(ids, scores):
    ...     return scores if ids.shape[1] < 6 else scores * float("nan")
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> try:
    ...     ct.generate(pair.target, None, ids, max_new_tokens=8, logits_processor=[spoilt])
    ... except DecodingError as error:
    ...     error.text, error.position, error.result.num_tokens
    (0, 3, 3)
    """

    def __init__(self, message: str, text: int, position: int, result: GenerationResult) -> None:
        super().__init__(message, text, position, result)
        self.text, self.position, self.result = text, position, result

    def __str__(self) -> str:
        return str(self.args[0])


class Rounds(ABC):
    """Base class of the decode loops: runs rounds until every text has ended.

    Subclasses draft and verify a round; this class counts, meters and makes the result.
    """

    def __init__(self, opening: Opening) -> None:
        self.clock, self.prepared_before = Stopwatch(), preparation.seconds
        if opening.texts.device.type == "cpu" and not warm.cache_info().currsize:
            with preparation.timed():  # loading numba must not count as seconds of a round
                warm()
        self.opening, self.options = opening, opening.options
        self.verifier = self.options.parsed_verifier
        self.texts, self.policies = opening.texts, opening.policies
        self.observing = any(text.rule.observes for text in self.texts.all)
        self.meter = opening.meter
        recorded = opening.drafter is not None and self.options.record_rows
        self.recorder: list[Node] | None = [] if recorded else None

    def run(self) -> GenerationResult:
        """Decode until every text has ended or has ``max_new_tokens`` new tokens."""
        on_tokens, single = self.options.callbacks.on_tokens, self.texts.batch == 1
        self.clock.lap("other")
        self.clock.set_apart(preparation.seconds - self.prepared_before)
        while any(text.room for text in self.texts.rows):
            new = self.round()
            if on_tokens is not None:
                on_tokens(new[0] if single else new)
                self.clock.lap("callback")
        return self.result()

    @abstractmethod
    def round(self) -> list[list[int]]:
        """Run one round, which adds tokens to each text that has not ended; return the new ids."""

    @property
    @abstractmethod
    def calls(self) -> tuple[int, int]:
        """Return the number of forward passes of the target and of the draft so far."""

    @staticmethod
    def count(text: Text, drafted: int, tokens: Sequence[int], emitted: Sequence[int]) -> Kind:
        """Add a round to a text's counts; return (drafted, accepted, ended).

        ``tokens`` are the tokens that verification returned; ``emitted`` are those up to the text's
        end; ``ended`` is whether tokens after the end were dropped.
        """
        accepted = min(len(tokens) - 1, len(emitted))
        kind = drafted, accepted, len(emitted) < len(tokens)
        text.rounds[kind] += 1
        return kind

    @one_thread()
    def measure(self, verdict: Verdict, new: list[list[int]]) -> None:
        """Pass the nodes of each text to the meter, the recorder and the schedules.

        ``new`` are the tokens that each text got in the round; an ended text got none.
        """
        meter, recorder = self.meter, self.recorder
        if meter is None and recorder is None and not self.observing:
            return
        for row, (text, ids) in enumerate(zip(self.texts.rows, new, strict=True)):
            if not ids:
                continue
            nodes = verdict.nodes(row)[: len(ids)]
            text.rule.observe(nodes)
            if recorder is not None:
                recorder += [node.copy() for node in nodes if node.drafted]
            if meter is not None:
                before = len(text.new_ids) - len(ids)
                places = enumerate(ids, before)
                meter.add(nodes, [(text.number, place, token) for place, token in places])
        self.clock.lap("meter")

    def failure(
        self,
        row: int,
        q: Float[Tensor, "K1 vocab"],
        p: Float[Tensor, "K vocab"] | None,
        places: range,
    ) -> DecodingError:
        """Return the error for text ``row``: one of its rows at ``places`` is no distribution."""
        place, name = _lawless((q, p), places)
        model, processors = self.opening.target_model, self.opening.warp.processors.all
        causes = list[str]()
        if name == "policy":
            causes.append("a rule of one's own that returned NaN")
        else:
            if processors:
                causes.append(f"a logits processor ({', '.join(map(name_of, processors))})")
            causes.append("weights that hold NaN")
            if model.dtype in HALF:
                causes.append(f"an overflow of {dtype_of([model])}")
        text = self.texts.rows[row]
        number, position = text.number, len(text.new_ids) + place
        message = (
            f"{name}: new token {position} of text {number} has no law, as its row holds NaN or "
            f"leaves no token possible; likely cause: {' or '.join(causes)}. What was decoded "
            "before is in the error's result"
        )
        return DecodingError(message, number, position, self.result())

    def result(self) -> GenerationResult:
        """Return the tokens and statistics of the rounds so far."""
        by_text = [(text.new_ids, text.ended, text.rounds) for text in self.texts.all]
        new, ended, row_rounds = zip(*by_text, strict=True)
        rounds, longest = sum(row_rounds, Counter()), max(map(len, new))
        reading = Reading(rounds, sum(map(len, new)))
        padded = [ids + [-1] * (longest - len(ids)) for ids in new]
        token_ids = torch.tensor(padded, dtype=torch.int64, device="cpu")
        self.clock.lap("other")
        measured: dict[str, Any] = {}
        if self.meter is not None:
            reading = self.meter.reading(rounds, reading.num_tokens)
            if (log := self.meter.log) is not None:
                measured["token_charges"] = log.costs(longest)
                measured["row_directions"] = log.directions.copy()
                measured["log_probs"] = log.log_probs(longest)
        if self.recorder is not None:
            measured["rows"] = self.recorder
        self.clock.lap("meter")
        seconds = self.clock.seconds()
        counts = row_rounds, *self.calls
        return GenerationResult(token_ids, ended, *counts, seconds, reading, **measured)


def _lawless(rows: tuple[Tensor, Tensor | None], places: range) -> tuple[int, str]:
    """Return the first of ``places`` where a row is no distribution, and whose row it is.

    ``rows`` are one text's target and draft rows; the second result is ``target_model`` or
    ``draft_model``. If all rows are distributions, return the first place and ``policy``.
    """
    for place in places:
        for name, probs in zip(("target_model", "draft_model"), rows, strict=True):
            if probs is None or place >= len(probs):
                continue
            if not 0 < float(probs[place].sum()) < math.inf:
                return place, name
    return places[0], "policy"
