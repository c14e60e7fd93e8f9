"""Decode prompts by a method and measure tokens, seconds and costs, for all tables of speeds.

A method is ``plain`` (this package's loop with the target alone), ``hf_plain`` or ``hf_assisted``
(generation by Hugging Face's library), or any spec that ``ct.policy`` takes.
"""

import logging
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from cactus_theory.decoding import DecodeOptions, GenerationResult, Pair, decode
from cactus_theory.decoding.options import own_ends
from cactus_theory.decoding.text import left_padded

from .grid import HF_ASSISTED, Config


@dataclass(frozen=True)
class Decoded:
    """A timed decode: seconds, new tokens of each row, and our loop's result (else None)."""

    seconds: float
    outputs: list[list[int]]
    result: GenerationResult | None
    ended: Sequence[bool]

    @property
    def record(self) -> dict[str, Any]:
        """Return the sums that the journal keeps; the library has only seconds and tokens."""
        record: dict[str, Any] = {"seconds": self.seconds, "tokens": sum(map(len, self.outputs))}
        if self.result is None:
            return record
        seconds, reading = self.result.seconds, self.result.reading
        record |= {
            "target_calls": self.result.target_calls,
            "row_calls": reading.num_calls,
            "accepted": reading.num_accepted_tokens,
            "parts": [seconds.draft, seconds.target, seconds.verify, seconds.other],
        }
        if reading.emitted_divergence is not None:
            record["kl"] = reading.emitted_divergence
            record["largest_row_kl"] = reading.largest_row_divergence
        return record


@dataclass(frozen=True)
class Harness:
    """The models, prompts, lengths and seed that all methods share.

    Prompt i of repeat r has the seed ``seed + i + r · len(prompts)``.
    """

    pair: Pair
    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    seed: int

    def group(self, batch: int, number: int) -> range:
        start = number * batch
        return range(start, min(start + batch, len(self.prompts)))

    def decode(
        self,
        config: Config,
        group: int,
        *,
        repeat: int = 0,
        meter: bool = False,
    ) -> Decoded:
        """Decode one group of ``config.batch`` prompts by the config's method.

        ``repeat`` numbers the passes over the prompts, which have different seeds. ``meter`` is as
        in :func:`cactus_theory.generate` and not timed.
        """
        rows = self.group(config.batch, group)
        prompts = [self.prompts[row] for row in rows]
        seeds = [self.seed + row + repeat * len(self.prompts) for row in rows]
        if config.policy.startswith("hf_"):
            return self._library(config, prompts, seeds[0])
        target = self.pair.target
        ids, mask = left_padded(prompts, target)
        options = DecodeOptions(
            **config.keywords,
            attention_mask=mask,
            max_new_tokens=self.max_new_tokens,
            seed=seeds,
            meter=meter,
        )
        result = decode(target, config.drafter(self.pair.draft), ids, options)
        outputs = [[t for t in row if t >= 0] for row in result.output_token_ids.tolist()]
        return Decoded(result.seconds.total, outputs, result, result.row_ended)

    def _library(self, config: Config, prompts: list[Sequence[int]], seed: int) -> Decoded:
        """Decode with Hugging Face ``generate``, with a fixed K and without truncation."""
        target, draft = self.pair.target, self.pair.draft
        ids, mask = left_padded(prompts, target)
        options, pinned = {}, nullcontext()
        if config.policy == HF_ASSISTED:
            options["assistant_model"] = draft
            pinned = _pinned(draft, config.num_draft_tokens)
        with pinned, _quiet(seed), torch.inference_mode():
            start = time.perf_counter()
            full = target.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                top_k=0,
                top_p=1.0,
                temperature=config.temperature,
                max_new_tokens=self.max_new_tokens,
                **options,
            )
            if full.is_cuda:
                torch.cuda.synchronize(full.device)
            seconds = time.perf_counter() - start
        new_ids = full[:, ids.shape[1] :].tolist()
        ends = own_ends(target)
        outputs = [_until_end(row, ends) for row in new_ids]
        return Decoded(seconds, outputs, None, [row[-1] in ends for row in outputs])


@contextmanager
def _pinned(draft: Any, width: int) -> Iterator[None]:
    original = draft.generation_config
    draft.generation_config = deepcopy(original)
    draft.generation_config.num_assistant_tokens = max(width, 1)
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    try:
        yield
    finally:
        draft.generation_config = original


@contextmanager
def _quiet(seed: int) -> Iterator[None]:
    """Seed the global generator, from which the library draws, and silence its warnings."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng():
            warnings.simplefilter("ignore")
            torch.manual_seed(seed)
            yield
    finally:
        logger.setLevel(level)


def _until_end(row: list[int], ends: frozenset[int]) -> list[int]:
    """Cut the padding after an end-of-text token; the end-of-text token is kept."""
    stop = next((position + 1 for position, token in enumerate(row) if token in ends), len(row))
    return row[:stop]
