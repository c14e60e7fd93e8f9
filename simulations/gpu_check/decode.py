"""Whole decodes: tokens per second, what they emit, and what their parts should add up to.

The shipped pair is inflated to real sizes and decodes in the device's loop. What a round should
cost is measured pass by pass, halfway through the texts: ``step_ms`` is the target's pass over one
token a text; ``c`` a draft pass and ``v`` a target pass over K + 1 positions, in such steps;
``prefill_ms`` both models' passes over the prompts. ``fixed_ms`` is what a lossless round takes
beyond K·c + v: sampling, verification and the host. What a decode should gain is its tokens per
call over K·c + v, the reading of the prompts apart.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

import torch

from cactus_theory.decoding import GenerationResult, generate, generate_plain
from cactus_theory.decoding._text import left_padded
from cactus_theory.decoding.device import BY_KERNELS
from cactus_theory.decoding.device.loop import BUCKET
from cactus_theory.decoding.device.round import Repeated, StaticForward
from cactus_theory.decoding.models import CachedModel

from ..common.grid import PLAIN, USUAL, Config, at, label
from ..common.inputs import PAIR, PROMPTS, load_model, load_prompts
from ..inflate import SHAPES, Shape, inflate, step_bytes
from .timing import Bench, Job, Row, wait
from .verify import LARGE, LOSSLESS

# knob values that spend about .03, .07 and .14 nats a token on the shipped pair
PRICES, DELTAS = (1.5, 0.8, 0.5), (0.0003, 0.002, 0.01)
TINY_POLICIES = (LOSSLESS, "cactus:delta=0.01", "band:price=0.5", "band:price=0.5@block")
WIDTHS, NEW_TOKENS = (4, 8), 128
TINY_WIDTHS, TINY_NEW_TOKENS = (2,), 12
TINY_SHAPES = ("tiny", "tiny-draft")
# target, draft, batch size
SETUPS = (("8b", "0.6b", 1), ("8b", "0.6b", 8), ("14b", "0.6b", 1))
TINY_SETUPS = (("tiny", "tiny-draft", 1), ("tiny", "tiny-draft", 2))
# calls between two looks at the clock of a GPU, so that waiting for it is a small part of them
CALLS = 5
REPEATS = 5


COLUMNS = (
    "target draft batch policy knob verifier num_draft_tokens tokens_per_second speedup "
    "tokens_per_call accepted_per_call emitted_kl_per_token largest_row_kl tokens seconds c v "
    "step_ms fixed_ms prefill_ms net_speedup predicted_speedup share_of_predicted roofline_ms "
    "share_of_roofline round_ms draft_ms target_ms verify_ms other_ms loop"
).split()


def policies(tiny: bool) -> list[str]:
    """Return what is decoded besides the plain target; ``SPEC@block`` where not token by token."""
    if tiny:
        return list(TINY_POLICIES)
    bands, soft = ([f"{name}:price={price}" for price in PRICES] for name in ("band", "soft_band"))
    cactus = [f"cactus:delta={delta}" for delta in DELTAS]
    blocks = [at(spec, "block") for spec in (LOSSLESS, *bands, *soft)]
    return [LOSSLESS, *cactus, *bands, *blocks, "typical"]


def lines(batch: int, tiny: bool) -> list[Config]:
    """Return plain decoding, then every policy at every K."""
    configs = [Config(PLAIN, 0, batch)]
    for width in TINY_WIDTHS if tiny else WIDTHS:
        for name in policies(tiny):
            spec, _, verifier = name.partition("@")
            configs.append(Config(spec, width, batch, verifier or USUAL))
    return configs


@dataclass(frozen=True)
class Inflated:
    """A target and a draft of these shapes that compute what the shipped pair computes."""

    target: Any
    draft: Any
    target_shape: Shape
    draft_shape: Shape

    @property
    def device(self) -> torch.device:
        return self.target.device

    def roofline_ms(self, context: int, batch: int, bandwidth: float) -> float:
        """Return the least milliseconds of a plain decode step: its bytes at GB/s of a copy."""
        width = self.target.dtype.itemsize
        moved = step_bytes(self.target_shape, context, batch=batch, width=width)
        return moved / bandwidth / 1e6


@lru_cache(maxsize=1)  # setups ask for a pair in turn, and a device may hold only one
def inflated(device: torch.device, target_shape: str, draft_shape: str) -> Inflated:
    """Return the shipped pair in two named shapes: bfloat16 on a GPU, float32 on a CPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shapes = SHAPES[target_shape], SHAPES[draft_shape]
    target, draft = (
        inflate(load_model(PAIR / part), shape, device=device, dtype=dtype)
        for part, shape in zip(("target", "draft"), shapes, strict=True)
    )
    return Inflated(target, draft, *shapes)


def prompts(batch: int) -> list[Sequence[int]]:
    """Return the ids of ``batch`` of the shipped prompts, again from the first."""
    ids = load_prompts(PROMPTS, PAIR / "target")
    return list(itertools.islice(itertools.cycle(ids), batch))


def jobs(bench: Bench) -> Iterator[Job]:
    """Yield what gives one row, a setup, method and K; plain decoding comes first in each setup."""
    for target, draft, batch in TINY_SETUPS if bench.tiny else SETUPS:
        decodes = Decodes(bench, target, draft, batch)
        for line in lines(batch, bench.tiny):
            name = f"{at(line.method, line.verifier)}, K = {line.width} at {target} + {draft}"

            def job(decodes=decodes, line=line) -> list[Row]:
                return [decodes.row(line)]

            yield f"{name}, batch {batch}", job


@dataclass
class Decodes:
    """The decodes of one pair at one batch size, and what their parts cost.

    Speeds are of a decode without the meter, after one with it on the same seed, which so emitted
    the same tokens; loading and captures are not timed.
    """

    bench: Bench
    target: str
    draft: str
    batch: int
    plain: Row | None = None

    @property
    def pair(self) -> Inflated:
        return inflated(self.bench.device, self.target, self.draft)

    @cached_property
    def prompts(self) -> list[Sequence[int]]:
        return prompts(self.batch)

    @property
    def new_tokens(self) -> int:
        return TINY_NEW_TOKENS if self.bench.tiny else NEW_TOKENS

    @cached_property
    def costs(self) -> dict[int, Row]:
        """Return what the parts of a round cost, by K."""
        widths = TINY_WIDTHS if self.bench.tiny else WIDTHS
        return costs_of(self.pair, self.prompts, self.new_tokens, widths)

    @cached_property
    def roofline_ms(self) -> float:
        context = max(map(len, self.prompts)) + self.new_tokens // 2
        return self.pair.roofline_ms(context, self.batch, self.bench.bandwidth)

    def decode(self, line: Config, *, meter: bool) -> GenerationResult:
        ids, mask = left_padded(self.prompts, self.pair.target)
        shared: Row = {"attention_mask": mask, "seed": self.bench.seed}
        shared |= {"max_new_tokens": self.new_tokens, "device_loop": True}
        if line.method == PLAIN:
            return generate_plain(self.pair.target, ids, **shared)
        shared |= {"policy": line.method, "verifier": line.verifier, "meter": meter}
        pair = self.pair.target, self.pair.draft
        return generate(*pair, ids, num_draft_tokens=line.width, **shared)

    def row(self, line: Config) -> Row:
        """Return what a line measured, and that over plain decoding and over the prediction."""
        metered, timed = (self.decode(line, meter=meter) for meter in (True, False))
        row = measured(line, metered, timed)
        cost = self.costs[line.width]
        if (line.method, line.verifier) in ((PLAIN, USUAL), (LOSSLESS, USUAL)):
            cost["fixed_ms"] = fixed_ms(cost, row, timed.target_calls)
        verify_ms = verification(self.bench.tables.get("verify", ()), row, self.batch)
        return self.completed(
            row | cost | {"roofline_ms": self.roofline_ms, "verify_ms": verify_ms}
        )

    def completed(self, measures: Row) -> Row:
        """Return a row of all columns; the first must be plain decoding."""
        policy, knob = label(measures["policy"])
        columns = {key: measures[key] for key in COLUMNS if measures.get(key) is not None}
        columns |= {"target": self.target, "draft": self.draft, "batch": self.batch}
        row: Row = dict.fromkeys(COLUMNS) | columns | {"policy": policy, "knob": knob}
        if policy == PLAIN:
            self.plain = row
        if self.plain is None:
            raise RuntimeError("plain decoding failed, so there is nothing to compare with")
        return row | _relative(row, self.plain) | _parts(row)


def measured(line: Config, metered: GenerationResult, timed: GenerationResult) -> Row:
    """Return what a line's decodes did."""
    reading = metered.reading
    spent = reading.emitted_divergence
    return {
        "policy": line.method,
        "verifier": line.verifier,
        "num_draft_tokens": line.width,
        "tokens": timed.num_tokens,
        "seconds": timed.seconds.total,
        "tokens_per_second": timed.num_tokens / timed.seconds.total,
        "tokens_per_call": timed.tokens_per_call,
        "accepted_per_call": timed.accepted_per_call,
        "emitted_kl_per_token": None if spent is None else spent / timed.num_tokens,
        "largest_row_kl": reading.largest_row_divergence,
        "loop": timed.loop,
    }


def costs_of(
    pair: Inflated, ids: Sequence[Sequence[int]], new_tokens: int, widths: Sequence[int]
) -> dict[int, Row]:
    """Return what the parts of a round cost, by K; at K = 0 those of a plain decode."""
    passes = Passes(pair, ids, new_tokens, max(widths))
    step, draft = passes.seconds(pair.target, 1), passes.seconds(pair.draft, 1)
    prefills = passes.prefill(pair.target), passes.prefill(pair.draft)
    return {
        width: {
            "step_ms": 1e3 * step,
            "c": draft / step if width else None,
            "v": passes.seconds(pair.target, width + 1) / step if width else 1.0,
            "prefill_ms": 1e3 * (sum(prefills) if width else prefills[0]),
        }
        for width in (0, *widths)
    }


def fixed_ms(costs: Row, row: Row, rounds: int) -> float:
    """Return the milliseconds of a round that its passes do not account for."""
    passes = row["num_draft_tokens"] * (costs["c"] or 0.0) + costs["v"]
    return (1e3 * row["seconds"] - costs["prefill_ms"]) / rounds - passes * costs["step_ms"]


class Passes:
    """Forward passes of both models of a pair over a batch, halfway through its texts."""

    def __init__(
        self, pair: Inflated, prompts: Sequence[Sequence[int]], new_tokens: int, width: int
    ) -> None:
        self.device = pair.device
        ids, mask = left_padded(prompts, pair.target)
        # every text with as many tokens as the longest prompt has
        self.ids = torch.where(mask > 0, ids, ids[:, -1:])
        self.batch, self.prompt = ids.shape
        self.context = self.prompt + new_tokens // 2
        self.end = -(-(self.context + width + 1) // BUCKET) * BUCKET
        self.cached = {
            id(model): CachedModel(model, self.end, self.batch, fast_forward=True)
            for model in (pair.target, pair.draft)
        }

    def prefill(self, model: Any) -> float:
        """Return the seconds of a pass over the prompts."""
        cached, counts = self.cached[id(model)], [self.prompt] * self.batch

        def feed() -> None:
            for row in range(self.batch):
                cached.rollback(row, 0)
            cached.feed(self.ids, counts, [1] * self.batch)

        return self._timed(feed)

    def seconds(self, model: Any, new: int) -> float:
        """Return the seconds of a pass over ``new`` tokens a text, whatever the cache holds."""
        forward = StaticForward(self.cached[id(model)])
        ids = self.ids[:, -1:].repeat(1, new)
        places = torch.arange(self.context, self.context + new, device=self.device)
        places = places.repeat(self.batch, 1)
        return self._timed(
            partial(Repeated(lambda end: forward(ids, places, end), self.device), self.end)
        )

    def _timed(self, job: Callable[[], Any]) -> float:
        """Return the seconds of a call, after one that pays for memory and captures."""
        calls = CALLS if self.device.type == "cuda" else 1
        with torch.inference_mode():
            job()
            return statistics.median(self._of_calls(job, calls) for _ in range(REPEATS))

    def _of_calls(self, job: Callable[[], Any], calls: int) -> float:
        wait(self.device)
        start = time.perf_counter()
        for _ in range(calls):
            job()
        wait(self.device)
        return (time.perf_counter() - start) / calls


def verification(steps: Sequence[Row], row: Row, batch: int) -> float | None:
    """Return the milliseconds of the step that a decode verified by, when it was timed alone."""
    by = "kernel_us" if row["loop"] == BY_KERNELS else "torch_us"
    name = row["policy"].partition(":")[0], row["verifier"], batch, row["num_draft_tokens"], LARGE
    for step in steps:
        policy, *others = (step[key] for key in
                           ("policy", "verifier", "batch", "drafted", "vocabulary"))  # fmt: skip
        if (policy.partition(":")[0], *others) == name:
            return None if step[by] is None else step[by] / 1e3
    return None


def _relative(row: Row, plain: Row) -> Row:
    """Return speed over plain decoding, over the prediction, and over the memory's limit."""
    net = _net(row) / _net(plain)
    ratios: Row = {
        "speedup": row["tokens_per_second"] / plain["tokens_per_second"],
        "net_speedup": net,
    }
    width, c, v = row["num_draft_tokens"], row["c"], row["v"]
    if width and c is not None and v is not None:
        predicted = row["tokens_per_call"] / (width * c + v)
        ratios |= {"predicted_speedup": predicted, "share_of_predicted": net / predicted}
    if not width and row["roofline_ms"] is not None:
        step = 1e3 * row["batch"] / _net(row)
        ratios["share_of_roofline"] = row["roofline_ms"] / step
    return ratios


def _net(row: Row) -> float:
    """Return tokens per second after the prompts were read, where that is known apart."""
    tokens, seconds, prefill = (row[key] for key in ("tokens", "seconds", "prefill_ms"))
    if None in (tokens, seconds, prefill):
        return row["tokens_per_second"]
    return tokens / (seconds - prefill / 1e3)


def _parts(row: Row) -> Row:
    """Return the milliseconds of a round: drafting, the target's pass, verification, the rest."""
    width, c, v, step = (row[key] for key in ("num_draft_tokens", "c", "v", "step_ms"))
    total_ms = 1e3 * row["batch"] * row["tokens_per_call"] / _net(row)
    if not width or None in (c, v, step):
        return {"round_ms": total_ms}
    draft, target, verify = width * c * step, v * step, row["verify_ms"]
    return {
        "round_ms": total_ms,
        "draft_ms": draft,
        "target_ms": target,
        "other_ms": total_ms - draft - target - (verify or 0.0),
    }
