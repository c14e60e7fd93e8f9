"""Decodes at real sizes: the shipped pair, inflated on the device, in the device's loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from cactus_theory.decoding import GenerationResult, generate, generate_plain

from ..common.grid import PLAIN, USUAL
from .inflated import Inflated, inflated, prompts
from .passes import Passes, copy_bandwidth, floor_of

POLICIES = (
    "speculative",
    "typical",
    "cactus:delta=0.002",
    "band:price=0.8",
    "speculative@block",
    "band:price=0.8@block",
    "soft_band:price=0.8@block",
)
Row = dict[str, Any]


def decode_rows(
    device: torch.device | str,
    target_shape: str,
    draft_shape: str,
    policies: Sequence[str] = POLICIES,
    widths: Sequence[int] = (4,),
    batch: int = 1,
    new_tokens: int = 128,
    seed: int = 0,
    tiny: bool = False,
    *,
    device_loop: bool | str | None = True,
) -> Iterator[Row]:
    """Yield one row a method: plain decoding first, then every policy at every K.

    Speeds are of a decode without the meter, after one with it on the same seeds, which so
    emitted the same tokens. Texts do not end by themselves; loading and captures are not timed.

    Parameters
    ----------
    policies : specs; ``SPEC@block`` where drafts are verified as whole blocks.
    widths : K, drafted tokens a round.
    device_loop : as in ``generate``: True verifies by the fused kernels on CUDA, where they can.
    """
    pair = inflated(device, target_shape, draft_shape, tiny=tiny)
    given = prompts(pair, batch) | {"max_new_tokens": new_tokens, "seed": seed}
    yield _row(PLAIN, USUAL, 0, batch, *_twice(pair, given, None, device_loop))
    for width in widths:
        for name in policies:
            spec, _, verifier = name.rpartition("@") if "@" in name else (name, "", USUAL)
            options = {"policy": spec, "verifier": verifier, "num_draft_tokens": width}
            runs = _twice(pair, given, options, device_loop)
            yield _row(spec, verifier, width, batch, *runs)


def costs(
    device: torch.device | str,
    target_shape: str,
    draft_shape: str,
    widths: Sequence[int] = (4,),
    batch: int = 1,
    new_tokens: int = 128,
    seed: int = 0,
    tiny: bool = False,
) -> Iterator[Row]:
    """Yield what the parts of a round cost, one row a K, and at K = 0 of a plain decode.

    ``step_ms`` is the target's pass over one token a text; ``c`` a draft pass and ``v`` a target
    pass over K + 1 positions, in such steps; ``fixed_ms`` what a lossless round takes beyond
    K·c + v: sampling, verification and the host; ``prefill_ms`` both models' passes over
    the prompts. Passes are timed halfway through the texts.
    """
    pair = inflated(device, target_shape, draft_shape, tiny=tiny)
    texts = prompts(pair, batch)
    passes = Passes(pair, texts["input_ids"], texts["attention_mask"], new_tokens, max(widths))
    given: Row = texts | {"max_new_tokens": new_tokens, "seed": seed}
    step, draft = passes.seconds(pair.target, 1), passes.seconds(pair.draft, 1)
    for width in (0, *widths):
        options = {"policy": "speculative", "num_draft_tokens": width} if width else None
        timed = _twice(pair, given, options, True)[1]
        before = passes.prefill(pair.target) + (passes.prefill(pair.draft) if width else 0.0)
        block = passes.seconds(pair.target, width + 1) if width else step
        a_round = (timed.seconds.total - before) / timed.target_calls
        yield {
            "num_draft_tokens": width,
            "batch": batch,
            "step_ms": 1e3 * step,
            "c": draft / step if width else None,
            "v": block / step,
            "fixed_ms": 1e3 * (a_round - width * draft - block),
            "prefill_ms": 1e3 * before,
            "context": passes.context,
        }


def roofline(
    device: torch.device | str,
    target_shape: str,
    draft_shape: str,
    batch: int = 1,
    new_tokens: int = 128,
    tiny: bool = False,
    bandwidth: float | None = None,
) -> Iterator[Row]:
    """Yield the least milliseconds of a plain decode step: its bytes at the speed of a copy.

    Parameters
    ----------
    bandwidth : GB/s of a large copy, bytes read and written; measured if None.
    """
    pair = inflated(device, target_shape, draft_shape, tiny=tiny)
    context = prompts(pair, batch)["input_ids"].shape[1] + new_tokens // 2
    if bandwidth is None:
        bandwidth = copy_bandwidth(pair.device, tiny)
    yield floor_of(pair, context, batch, bandwidth)


def _twice(
    pair: Inflated, given: Row, options: Row | None, device_loop: bool | str | None
) -> tuple[GenerationResult, GenerationResult]:
    """Decode with the meter, which also warms up, and without; plainly if there are no options."""
    shared: Row = given | {"device_loop": device_loop}
    if options is None:
        first, second = (generate_plain(pair.target, **shared) for _ in range(2))
        return first, second
    first, second = (
        generate(pair.target, pair.draft, **shared, **options, meter=meter)
        for meter in (True, False)
    )
    return first, second


def _row(
    policy: str,
    verifier: str,
    width: int,
    batch: int,
    metered: GenerationResult,
    timed: GenerationResult,
) -> Row:
    meter = metered.meter
    return {
        "policy": policy,
        "verifier": verifier,
        "num_draft_tokens": width,
        "batch": batch,
        "tokens": timed.num_tokens,
        "seconds": timed.seconds.total,
        "tokens_per_second": timed.tokens_per_second,
        "tokens_per_call": timed.tokens_per_call,
        "accepted_per_call": timed.accepted_per_call,
        "emitted_kl_per_token": None if meter is None else meter.kl_per_token,
        "largest_row_kl": None if meter is None else meter.largest_row_kl,
        "capture_seconds": timed.seconds.capture,
        "loop": timed.loop,
    }
