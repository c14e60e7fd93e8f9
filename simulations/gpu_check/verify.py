"""How long one verification takes: the fused kernel, the torch path, and what memory allows.

The floor is the time a copy of as many bytes would take: every logit of target and draft must
be read once, and next to nothing is written. Logits are bfloat16, as models give them. All ways
are timed in turn, and between the rounds random numbers go on, since what is read again depends
on what is accepted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import cactus_theory as ct
from cactus_theory.kernels import LogitsVerdict, Workspace, has_kernel, verify_logits

from ..common.grid import followers
from .timing import Bench, Job, Row, Timing, Work, interleaved

LOSSLESS, BAND = "speculative", "band:price=1"
POLICIES = (LOSSLESS, "cactus:delta=0.1", BAND, "typical")
VERIFIERS = ("chain", "block")
# batch, drafted tokens, vocabulary: those that matter most come first
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
# where torch.compile is tried, too
COMPILED = SHAPES[:2]
TINY_SHAPES = [(1, 2, 64), (2, 2, 64)]
# seconds of measuring each of the two, after warming up
SECONDS, TINY_SECONDS = 0.25, 0.02
# standard deviations of the target's logits, and of what the draft adds to them
SPREAD, STRAY = 3.0, 1.0
# a text's place in its stream of random numbers, from which a timed step goes on
POSITION = 100


@dataclass(frozen=True)
class Inputs:
    """Logits (B, K + 1, V) and (B, K, V), bfloat16, and the drafted tokens (B, K)."""

    target_logits: Tensor
    draft_logits: Tensor
    draft_token_ids: Tensor
    # (B, K + 1) float64 coins of the torch path, the last one of the token that follows
    numbers: Tensor
    positions: Tensor  # (B,) where the kernels' random numbers are
    source: torch.Generator  # of the logits, and of coins to come

    @property
    def coins(self) -> tuple[Tensor, Tensor]:
        """Return the coins of acceptance, and of the token that follows."""
        return self.numbers[:, :-1], self.numbers[:, -1]

    def advance(self) -> None:
        """Draw other random numbers in place: how much is read depends on what is accepted."""
        self.numbers.uniform_(generator=self.source)
        self.positions.add_(self.draft_token_ids.shape[1] + 1)

    @property
    def bytes(self) -> int:
        """Return the bytes that any verification reads at least."""
        both = self.target_logits, self.draft_logits
        return sum(logits.numel() * logits.element_size() for logits in both)


def jobs(bench: Bench) -> Iterator[Job]:
    """Yield what gives one row, a shape, policy and verifier."""
    lossless: dict[tuple[Any, ...], float] = {}
    make = lru_cache(maxsize=1)(lambda shape: inputs(shape, bench.device, bench.seed))
    for shape in TINY_SHAPES if bench.tiny else SHAPES:
        for spec in POLICIES:
            for verifier in followers(spec, VERIFIERS):

                def job(shape=shape, spec=spec, verifier=verifier) -> list[Row]:
                    return [_row(bench, make(shape), spec, verifier, lossless)]

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
    positions = torch.full((batch,), POSITION, device=device)
    return Inputs(target, draft, ids, coins, positions, source)


def torch_step(rule: ct.Policy, verifier: str, inputs: Inputs) -> Callable[[], Any]:
    """Return the path of one torch call after another: two softmaxes, then the verifier."""
    verify = ct.verify_block if verifier == "block" else ct.verify_chain

    def step() -> Any:
        q, p = inputs.target_logits.float().softmax(-1), inputs.draft_logits.float().softmax(-1)
        return verify(rule, q, p, inputs.draft_token_ids, coins=inputs.coins, validate=False)

    return step


def fused_step(rule: ct.Policy, verifier: str, inputs: Inputs) -> Callable[[], Any] | None:
    """Return one call of the fused kernel, in memory of its own; None where there is none.

    On a CPU kernels are there only while Triton interprets them.
    """
    ids = inputs.draft_token_ids
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not has_kernel(rule, verifier) or not (ids.is_cuda or interpreted):
        return None
    batch, width = ids.shape
    fixed = {
        "seeds": torch.arange(batch, device=ids.device),
        "positions": inputs.positions,
        "workspace": Workspace(batch, width, inputs.target_logits.shape[-1], ids.device),
        "out": LogitsVerdict(ids.new_empty(batch, width + 1), ids.new_empty(batch)),
        "verifier": verifier,
    }
    return lambda: verify_logits(rule, inputs.target_logits, inputs.draft_logits, ids, **fixed)


def rivals(rule: ct.Policy, verifier: str, inputs: Inputs, *, compiles: bool) -> dict[str, Work]:
    """Return what is timed in turn: torch, a copy of as many bytes, the kernel if there is one.

    ``compiles`` adds the torch path as ``torch.compile`` fuses it, which takes a minute.
    """
    by_torch, kernel = torch_step(rule, verifier, inputs), fused_step(rule, verifier, inputs)
    source = torch.empty(inputs.bytes // 2, dtype=torch.int8, device=inputs.numbers.device)
    sink = torch.empty_like(source)
    works: dict[str, Work] = {"torch": by_torch, "copy": lambda: sink.copy_(source)}
    if compiles:
        works["compiled"] = torch.compile(by_torch, dynamic=False)
    return works if kernel is None else works | {"kernel": kernel}


def _row(bench: Bench, inputs: Inputs, spec: str, verifier: str, lossless: dict) -> Row:
    rule, seconds = ct.policy(spec), TINY_SECONDS if bench.tiny else SECONDS
    (batch, width), vocab = inputs.draft_token_ids.shape, inputs.target_logits.shape[-1]
    shape = batch, width, vocab
    compiles = (spec, verifier) == (LOSSLESS, "chain") and shape in COMPILED
    works = rivals(rule, verifier, inputs, compiles=compiles and bench.device.type == "cuda")
    timings = interleaved(works, bench.device, seconds, inputs.advance)
    by_torch, fused = timings["torch"], timings.get("kernel")
    floor = inputs.bytes / bench.bandwidth / 1e3
    if fused is not None and spec == LOSSLESS:
        lossless[verifier, *shape] = fused.microseconds
    rival = lossless.get((verifier, *shape))
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
        "torch_over_kernel": None if fused is None else by_torch.microseconds / _us(fused),
        "over_lossless": None if None in (fused, rival) else _us(fused) / rival,
        "copy_us": _us(timings["copy"]),
        "compiled_us": _us(timings.get("compiled")),
        **{
            f"{name}_{end}_us": _us(timings.get(name), end)
            for name in ("kernel", "torch")
            for end in ("low", "high")
        },
        "kernel_graph": None if fused is None else fused.graph,
        "torch_graph": by_torch.graph,
        "repeats": by_torch.repeats,
    }


def _us(timing: Timing | None, which: str = "microseconds") -> Any:
    return None if timing is None else getattr(timing, which)
