"""Decode a group of prompts by one method; say how long it took and what came out."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from cactus_theory.decoding import GenerationResult, Pair, generate, generate_plain

from .grid import HF_ASSISTED, HF_MIXTURE, PLAIN, Config
from .quality import parses_so_far, target_log_likelihood


@dataclass(frozen=True)
class Work:
    """What every method is given: the pair, the prompts' texts and ids, room and seed."""

    pair: Pair
    texts: Sequence[str]
    ids: Sequence[Sequence[int]]
    max_new_tokens: int
    seed: int

    def group(self, config: Config, number: int) -> range:
        """Return which prompts the group holds; the last one may be smaller."""
        start = number * config.batch
        return range(start, min(start + config.batch, len(self.ids)))


def decode(work: Work, config: Config, number: int, metered: bool) -> dict[str, Any]:
    """Decode one group and return its record; ``metered`` adds cost and quality, untimed."""
    rows = work.group(config, number)
    prompts = [work.ids[row] for row in rows]
    seeds = [work.seed + row for row in rows]
    if config.method.startswith("hf_"):
        seconds, outputs = _library(work, config, prompts, seeds[0])
        record: dict[str, Any] = {"seconds": seconds}
    else:
        result = _ours(work, config, prompts, seeds, metered)
        outputs = _outputs(result)
        record = {"seconds": result.seconds.total} | _counts(result)
        if metered and result.meter is not None:
            record |= _cost(result)
    record["tokens"] = sum(map(len, outputs))
    return record | (_quality(work, rows, outputs) if metered else {})


def _ours(
    work: Work, config: Config, prompts: list[Sequence[int]], seeds: list[int], metered: bool
) -> GenerationResult:
    ids, mask = _left_padded(prompts, work.pair.target)
    shared: dict[str, Any] = {
        "attention_mask": mask,
        "eos_token_ids": work.pair.target.generation_config.eos_token_id,
        "max_new_tokens": work.max_new_tokens,
        "seed": seeds,
    }
    if config.method == PLAIN:
        return generate_plain(work.pair.target, ids, **shared)
    return generate(
        work.pair.target,
        work.pair.draft,
        ids,
        policy=config.method,
        num_draft_tokens=config.width,
        meter=metered,
        **shared,
    )


def _library(
    work: Work, config: Config, prompts: list[Sequence[int]], seed: int
) -> tuple[float, list[list[int]]]:
    """Decode with Hugging Face ``generate``, K pinned, nothing truncated."""
    target, draft = work.pair.target, work.pair.draft
    ids, mask = _left_padded(prompts, target)
    name, _, weight = config.method.partition(":")
    options: dict[str, Any] = {}
    if name in (HF_ASSISTED, HF_MIXTURE):
        options = {"assistant_model": draft}
    if name == HF_MIXTURE:
        options["assistant_ensemble_weight"] = float(weight)
    logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns about its own call
    torch.manual_seed(seed)  # the library draws from the global generator
    with _pinned(draft, config.width), torch.inference_mode():
        started = time.perf_counter()
        full = target.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            top_p=1.0,
            temperature=1.0,
            max_new_tokens=work.max_new_tokens,
            **options,
        )
        if full.is_cuda:
            torch.cuda.synchronize(full.device)
        seconds = time.perf_counter() - started
    return seconds, [_until_end(row, target) for row in full[:, ids.shape[1] :].tolist()]


@contextmanager
def _pinned(draft: Any, width: int) -> Iterator[None]:
    """Hold the library's K at ``width``, as a fair comparison needs."""
    settings = draft.generation_config
    pins = {
        "num_assistant_tokens": max(width, 1),
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }
    before = {name: getattr(settings, name, None) for name in pins}
    try:
        for name, value in pins.items():
            setattr(settings, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(settings, name, value)


def _left_padded(prompts: list[Sequence[int]], model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, prompts))
    pad = model.generation_config.pad_token_id or 0
    rows = [[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    marks = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(rows, device=model.device), torch.tensor(marks, device=model.device)


def _until_end(row: list[int], model: Any) -> list[int]:
    """Cut the padding behind an end-of-text token, which itself counts."""
    ends = model.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    stop = next((place + 1 for place, token in enumerate(row) if token in ends), len(row))
    return row[:stop]


def _outputs(result: GenerationResult) -> list[list[int]]:
    return [[token for token in row if token >= 0] for row in result.output_token_ids.tolist()]


def _counts(result: GenerationResult) -> dict[str, Any]:
    seconds = result.seconds
    return {
        "target_calls": result.target_calls,
        "row_calls": result.row_calls,
        "accepted": result.num_accepted,
        "histogram": list(result.accepted_histogram),
        "parts": [seconds.draft, seconds.target, seconds.verify, seconds.other],
    }


def _cost(result: GenerationResult) -> dict[str, Any]:
    assert result.meter is not None
    return {
        "rows": result.meter.rows,
        "kl": result.meter.kl,
        "largest_row_kl": result.meter.largest_row_kl,
    }


def _quality(work: Work, rows: range, outputs: list[list[int]]) -> dict[str, Any]:
    likelihoods, parsed = [], []
    for row, output in zip(rows, outputs, strict=True):
        likelihoods.append(target_log_likelihood(work.pair.target, work.ids[row], output))
        text = work.pair.tokenizer.decode(output, skip_special_tokens=True)
        parsed.append(parses_so_far(work.texts[row], text))
    return {"log_likelihood": likelihoods, "lengths": [len(o) for o in outputs], "parses": parsed}
