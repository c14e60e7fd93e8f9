"""Seconds of single forward passes of an inflated pair, and the least that they can take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from cactus_theory.decoding.device import BUCKET, Repeated, StaticForward
from cactus_theory.decoding.models import CachedModel

from ..inflate import step_cost
from .inflated import Inflated

# calls between two looks at the clock of a GPU, so that waiting for it is a small part of them
CALLS = 5
REPEATS = 5
COPIED, TINY_COPIED = 2**30, 2**23


class Passes:
    """Forward passes of both models of a pair over a batch, halfway through its texts."""

    def __init__(
        self,
        pair: Inflated,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        new_tokens: int,
        width: int,
    ) -> None:
        self.device = pair.device
        # every text with as many tokens as the longest prompt has
        self.ids = torch.where(attention_mask > 0, input_ids, input_ids[:, -1:])
        self.batch, self.prompt = input_ids.shape
        self.context = self.prompt + new_tokens // 2
        self.end = -(-(self.context + width + 1) // BUCKET) * BUCKET
        self.cached = {id(model): self._cache(model) for model in (pair.target, pair.draft)}

    def _cache(self, model: Any) -> CachedModel:
        return CachedModel(model, self.end, self.batch, fast_forward=True)

    def prefill(self, model: Any) -> float:
        """Return the seconds of a pass over the prompts."""
        cached, counts = self.cached[id(model)], [self.prompt] * self.batch

        def feed() -> None:
            for row in range(self.batch):
                cached.rollback(row, 0)
            cached.feed(self.ids, counts, [1] * self.batch)

        return self._timed(feed)

    def seconds(self, model: Any, new: int) -> float:
        """Return the seconds of a pass over ``new`` tokens a text, captured on a GPU.

        What the cache holds does not matter to it, only how long it is.
        """
        forward = StaticForward(self.cached[id(model)])
        ids = self.ids[:, -1:].repeat(1, new)
        places = torch.arange(self.context, self.context + new, device=self.device)
        places = places.repeat(self.batch, 1)
        job = Repeated(lambda end: forward(ids, places, end), self.device)
        return self._timed(lambda: job(self.end))

    def _timed(self, job: Callable[[], Any]) -> float:
        with torch.inference_mode():
            return median_seconds(job, self.device)


def median_seconds(job: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of a call, after one that pays for memory and captures."""
    job()
    return statistics.median(_of_calls(job, device) for _ in range(REPEATS))


def _of_calls(job: Callable[[], Any], device: torch.device) -> float:
    calls = CALLS if device.type == "cuda" else 1
    _wait(device)
    started = time.perf_counter()
    for _ in range(calls):
        job()
    _wait(device)
    return (time.perf_counter() - started) / calls


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_bandwidth(device: torch.device, tiny: bool) -> float:
    """Return GB/s of a large copy within the device, bytes read and bytes written."""
    count = TINY_COPIED if tiny else COPIED
    source = torch.zeros(count, dtype=torch.int8, device=device)
    sink = torch.empty_like(source)
    return 2 * count / median_seconds(lambda: sink.copy_(source), device) / 1e9


def floor_of(pair: Inflated, context: int, batch: int, bandwidth: float) -> dict[str, Any]:
    """Return what a plain decode step moves and multiplies, and how long moving it takes."""
    cost = step_cost(pair.target_shape, context, batch=batch, width=pair.width)
    return {
        "bandwidth_gb_per_s": bandwidth,
        "step_gb": cost.bytes / 1e9,
        "step_gflop": cost.flops / 1e9,
        "roofline_ms": cost.bytes / bandwidth / 1e6,
        "context": context,
    }
