"""How long one verification takes: the fused kernel, the torch path, and what memory allows.

The floor is the time a copy of as many bytes would take: every logit of target and draft must
be read once, and next to nothing is written. Logits are bfloat16, as models give them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import cactus_theory as ct

from ..common.grid import followers
from .device import bandwidth
from .fused import fused_step
from .sections import Bench, Job, Message, Row, in_turn
from .timing import Timing, timed

LOSSLESS, BAND = "speculative", "band:price=1"
POLICIES = (LOSSLESS, "cactus:delta=0.1", BAND, "typical")
VERIFIERS = ("chain", "block")
# batch, drafted tokens, vocabulary: those that goals are about come first
Shape = tuple[int, int, int]
LARGE = 151_936
SHAPES: list[Shape] = [(64, 8, LARGE), (1, 8, LARGE), (64, 4, LARGE), (64, 16, LARGE)]
SHAPES += [
    (batch, width, vocab)
    for vocab in (LARGE, 32_000)
    for width in (8, 4, 16)
    for batch in (1, 8, 64)
    if (batch, width, vocab) not in SHAPES
]
TINY_SHAPES = [(1, 2, 64), (2, 2, 64)]
# seconds of measuring each of the two, after warming up
SECONDS, TINY_SECONDS = 0.25, 0.02
# standard deviations of the target's logits, and of what the draft adds to them
SPREAD, STRAY = 3.0, 1.0


@dataclass(frozen=True)
class Inputs:
    """Logits (B, K + 1, V) and (B, K, V), bfloat16, the drafted tokens (B, K), float64 coins."""

    target_logits: Tensor
    draft_logits: Tensor
    draft_token_ids: Tensor
    coins: tuple[Tensor, Tensor]

    @property
    def bytes(self) -> int:
        """Return the bytes that any verification reads at least."""
        both = self.target_logits, self.draft_logits
        return sum(own.numel() * own.element_size() for own in both)


def rows(bench: Bench) -> Iterator[Message]:
    """Yield one row a shape, policy and verifier."""
    speed = bandwidth(bench)
    lossless: dict[tuple[Any, ...], float] = {}
    yield from in_turn(_jobs(bench, speed, lossless), bench.budget)


def _jobs(bench: Bench, speed: float, lossless: dict[tuple[Any, ...], float]) -> Iterator[Job]:
    make = lru_cache(maxsize=1)(lambda shape: inputs(shape, bench.device, bench.settings.seed))
    for shape in TINY_SHAPES if bench.tiny else SHAPES:
        for spec in POLICIES:
            for verifier in followers(spec, VERIFIERS):

                def job(shape=shape, spec=spec, verifier=verifier) -> Iterator[Row]:
                    yield _row(bench, make(shape), spec, verifier, speed, lossless)

                batch, width, vocab = shape
                yield f"{spec} by {verifier} at B = {batch}, K = {width}, V = {vocab:,}", job


def inputs(shape: Shape, device: torch.device, seed: int) -> Inputs:
    """Return random logits whose draft accepts about as much as a usual one does."""
    batch, width, vocab = shape
    source = torch.Generator(device).manual_seed(seed)
    kind: dict[str, Any] = {"generator": source, "device": device, "dtype": torch.bfloat16}
    target = SPREAD * torch.randn(batch, width + 1, vocab, **kind)
    draft = target[:, :-1] + STRAY * torch.randn(batch, width, vocab, **kind)
    probs = draft.float().softmax(-1).flatten(0, 1)
    ids = torch.multinomial(probs, 1, generator=source).view(batch, width)
    coins = torch.rand(batch, width + 1, generator=source, device=device, dtype=torch.float64)
    return Inputs(target, draft, ids, (coins[:, :width], coins[:, width]))


def torch_step(rule: ct.Policy, verifier: str, given: Inputs) -> Callable[[], Any]:
    """Return the path of one torch call after another: two softmaxes, then the verifier."""
    verify = ct.verify_block if verifier == "block" else ct.verify_chain

    def step() -> Any:
        q, p = given.target_logits.float().softmax(-1), given.draft_logits.float().softmax(-1)
        return verify(rule, q, p, given.draft_token_ids, coins=given.coins, validate=False)

    return step


def _row(
    bench: Bench, given: Inputs, spec: str, verifier: str, speed: float, lossless: dict
) -> Row:
    rule, seconds = ct.policy(spec), TINY_SECONDS if bench.tiny else SECONDS
    by_torch = timed(torch_step(rule, verifier, given), bench.device, seconds)
    step = fused_step(rule, verifier, given)
    fused = None if step is None else timed(step, bench.device, seconds)
    batch, width = given.draft_token_ids.shape
    vocab = given.target_logits.shape[-1]
    floor = given.bytes / speed / 1e3
    if fused is not None and spec == LOSSLESS:
        lossless[verifier, batch, width, vocab] = fused.microseconds
    rival = lossless.get((verifier, batch, width, vocab))
    return {
        "policy": spec,
        "verifier": verifier,
        "batch": batch,
        "drafted": width,
        "vocabulary": vocab,
        "kernel_us": _us(fused),
        "torch_us": by_torch.microseconds,
        "floor_us": floor,
        "share_of_bandwidth": None if fused is None else floor / fused.microseconds,
        "torch_over_kernel": _ratio(by_torch, fused),
        "over_lossless": None if None in (fused, rival) else _us(fused) / rival,
        "kernel_graph": None if fused is None else fused.graph,
        "torch_graph": by_torch.graph,
        "repeats": by_torch.repeats if fused is None else fused.repeats,
    }


def _us(timing: Timing | None) -> Any:
    return None if timing is None else timing.microseconds


def _ratio(slow: Timing, fast: Timing | None) -> float | None:
    return None if fast is None else slow.microseconds / fast.microseconds
