"""Tokens per second of a model pair: this loop beside Hugging Face's own, lossless and warm.

The library's assisted generation is pinned to the same draft length: a constant schedule,
no confidence threshold. Jobs are interleaved over repeats; a row's speed is the median.
"""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from cactus_theory.decoding import GenerationResult, Pair, generate, generate_plain, load_pair

from .rows import load_prompts

WIDTH, NEW, BATCH, PROMPTS = 4, 96, 8, 8
LOSSLESS, RELAXED = "speculative", "cactus:delta=0.1"
Job = Callable[[Sequence[int], int], tuple[int, GenerationResult | None]]


def measure(target: Path, draft: Path, prompts: Path, repeats: int) -> list[dict[str, Any]]:
    """Return one dictionary per job."""
    pair = load_pair(target, draft)
    texts = load_prompts(prompts, target)[:PROMPTS]
    longest = pair.target.config.max_position_embeddings
    room = min(NEW, min(longest, pair.draft.config.max_position_embeddings) - max(map(len, texts)))
    jobs = _jobs(pair, texts, room)
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    tokens: dict[str, list[int]] = {name: [] for name in jobs}
    results: dict[str, list[GenerationResult]] = {name: [] for name in jobs}
    for repeat in range(repeats + 1):
        for name, (job, rounds) in jobs.items():
            spent, made = 0.0, 0
            for number in range(rounds):
                started = time.perf_counter()
                count, result = job(texts[number], number)
                spent += time.perf_counter() - started
                made += count
                if result is not None and repeat:
                    results[name].append(result)
            if repeat:  # the first run warms up
                seconds[name].append(spent)
                tokens[name].append(made)
    return [_row(name, seconds[name], tokens[name], results[name], target) for name in jobs]


def _jobs(pair: Pair, texts: Sequence[Sequence[int]], room: int) -> dict[str, tuple[Job, int]]:
    """Return each job with the number of prompts it runs one by one (1 for a whole batch)."""

    def own(policy: str, meter: bool = False) -> Job:
        def run(ids: Sequence[int], seed: int) -> tuple[int, GenerationResult]:
            result = generate(
                pair.target, pair.draft, torch.tensor([list(ids)]), policy=policy,
                num_draft_tokens=WIDTH, max_new_tokens=room, seed=seed, meter=meter,
            )  # fmt: skip
            return result.num_tokens, result

        return run

    def plain(ids: Sequence[int], seed: int) -> tuple[int, GenerationResult]:
        result = generate_plain(
            pair.target, torch.tensor([list(ids)]), max_new_tokens=room, seed=seed
        )
        return result.num_tokens, result

    def batch(ids: Sequence[int], seed: int) -> tuple[int, GenerationResult]:
        longest = max(map(len, texts))
        rows = [[0] * (longest - len(text)) + list(text) for text in texts]
        mask = [[0] * (longest - len(text)) + [1] * len(text) for text in texts]
        result = generate(
            pair.target, pair.draft, torch.tensor(rows), attention_mask=torch.tensor(mask),
            policy=LOSSLESS, num_draft_tokens=WIDTH, max_new_tokens=room, seed=seed, meter=False,
        )  # fmt: skip
        return result.num_tokens, result

    return {
        "Hugging Face generate": (_library(pair, room, assisted=False), PROMPTS),
        "Hugging Face assisted generation": (_library(pair, room, assisted=True), PROMPTS),
        "plain": (plain, PROMPTS),
        "lossless": (own(LOSSLESS), PROMPTS),
        f"{RELAXED}, meter off": (own(RELAXED), PROMPTS),
        f"{RELAXED}, meter on": (own(RELAXED, meter=True), PROMPTS),
        f"lossless, batch of {BATCH}": (batch, 1),
    }


def _library(pair: Pair, room: int, assisted: bool) -> Job:
    logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns about its own call
    config = pair.draft.generation_config
    config.num_assistant_tokens = WIDTH
    config.num_assistant_tokens_schedule = "constant"
    config.assistant_confidence_threshold = 0.0
    options: dict[str, Any] = {"assistant_model": pair.draft} if assisted else {}

    def run(ids: Sequence[int], seed: int) -> tuple[int, None]:
        prompt = torch.tensor([list(ids)])
        with warnings.catch_warnings(), torch.random.fork_rng():
            warnings.simplefilter("ignore")
            torch.manual_seed(seed)
            output = pair.target.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=True, top_k=0,
                max_new_tokens=room, eos_token_id=-1, pad_token_id=0, **options,
            )  # fmt: skip
        return output.shape[1] - prompt.shape[1], None

    return run


def _row(
    name: str,
    seconds: list[float],
    tokens: list[int],
    results: list[GenerationResult],
    target: Path,
) -> dict[str, Any]:
    speeds = [count / spent for count, spent in zip(tokens, seconds, strict=True)]
    total = sum(result.seconds.total for result in results)
    row: dict[str, Any] = {
        "target": target.name,
        "job": name,
        "num_draft_tokens": WIDTH,
        "tokens_per_second": statistics.median(speeds),
        "least": min(speeds),
        "most": max(speeds),
        "tokens_per_call": "",
        "outside_forward": "",
        "meter_share": "",
    }
    if results:
        calls = sum(result.row_calls for result in results)
        row["tokens_per_call"] = sum(result.num_tokens for result in results) / calls
        outside = sum(result.seconds.verify + result.seconds.other for result in results)
        row["outside_forward"] = outside / total
        row["meter_share"] = sum(result.seconds.meter for result in results) / total
    return row


def report(found: list[dict[str, Any]]) -> None:
    """Print the rows with their speed over assisted generation."""
    assisted = next(row for row in found if "assisted" in row["job"])["tokens_per_second"]
    for row in found:
        shares = "".join(
            f"  {label} {row[key]:.1%}"
            for key, label in (("outside_forward", "outside"), ("meter_share", "meter"))
            if row[key] != ""
        )
        calls = f"  {row['tokens_per_call']:.2f} a call" if row["tokens_per_call"] else ""
        print(
            f"{row['tokens_per_second']:>9.1f} tokens/s  "
            f"{row['tokens_per_second'] / assisted:>5.2f}x assisted  {row['job']}{calls}{shares}"
        )
