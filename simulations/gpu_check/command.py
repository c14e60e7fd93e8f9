"""Time a CUDA machine: one verification, and whole decodes in the device's loop.

``kernels`` is done if it is named: it compiles the kernels for a Hopper GPU that need not be here.

The tables go by the names that the figure knows: copied into ``paper_figures/data``, they are what
``make figures`` draws. Whether the machine is right is for
``pytest -m gpu`` to say. ``--device cpu`` rehearses all of it at the smallest sizes.

The device's own clock counts, from the first kernel of a call to its last, with data out of its
caches; what never waits for the device is a CUDA graph. What is compared is timed in turn.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

import cactus_theory as ct
from cactus_theory.base.files import first_line
from cactus_theory.decoding import Pair, generate, load_pair
from cactus_theory.decoding._text import left_padded
from cactus_theory.decoding.device.round import Repeated, never_waits
from cactus_theory.decoding.models.inflate import DRAFTS, inflate_pair
from cactus_theory.kernels import LogitsVerdict, Workspace, has_kernel, verify_logits

from ..common.grid import PLAIN, Config, configs, followers, label
from ..common.inputs import PAIR, PROMPTS, code_digest, load_prompts
from ..common.results import package_version, publish
from . import kernels

Row = dict[str, Any]
Work = Callable[[], Any]
# a measurement: its name, and the function that returns its row
Job = tuple[str, Callable[[], Row]]
# the code that is timed
SOURCE = ("cactus_theory/**/*.py", "simulations/gpu_check/*.py")
DRIVER = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("parts", nargs="*", metavar="PART",
        help=f"of {', '.join(PARTS)}, timed (all without), and {COMPILED}")  # fmt: skip
    add("--device", default="cuda", help="cuda (default), or cpu for a rehearsal at tiny sizes")
    add("--out", type=Path, default=Path("gpu_check"))
    add("--seed", type=int, default=0)
    kernels.add_arguments(parser.add_argument_group(COMPILED))


def run(args: argparse.Namespace) -> int:
    """Make the tables of the parts; return 1 if something failed."""
    for name in args.parts:
        if name not in (*PARTS, COMPILED):
            known = ", ".join((*PARTS, COMPILED))
            raise ValueError(f"PART: must be among {known}; got {name!r}")
    failed = COMPILED in args.parts and kernels.compile_kernels(args)
    parts = [name for name in args.parts or PARTS if name != COMPILED]
    if parts and args.device.startswith("cuda") and not torch.cuda.is_available():
        print("gpu-check: no GPU here, nothing was timed (--device cpu rehearses it)")
        return int(failed)
    device = torch.device(args.device)
    bench = Bench(device, args.seed)
    for name in parts:
        rows: list[Row] = []
        for what, job in PARTS[name](bench):
            try:
                rows.append(job())
                print(f"{what}: done", flush=True)
            except Exception as error:  # whatever a first run on a new machine meets
                failed = True
                print(f"{what}: {type(error).__name__}: {first_line(error)}", flush=True)
        if rows:
            publish(args, rows, args.out / f"gpu_{name}.csv", **facts(bench))
    print(f"written to {args.out}/: a CSV a part")
    return int(failed)


@dataclass(frozen=True)
class Bench:
    """The device of a part, and the seed of its numbers."""

    device: torch.device
    seed: int = 0

    @property
    def tiny(self) -> bool:
        """Return whether this is a rehearsal, at the smallest sizes."""
        return self.device.type == "cpu"


def facts(bench: Bench) -> dict[str, str]:
    """Describe the machine: names, versions, clocks; on a CPU, that the run is a rehearsal."""
    about = {"device": "cpu (rehearsal)", "source": code_digest(*SOURCE)}
    if bench.device.type == "cuda":
        about["device"] = torch.cuda.get_device_name(bench.device)
        about |= {"cuda": str(torch.version.cuda), "driver": _driver(bench.device.index or 0)}
    for package in ("triton", "transformers"):
        about[package] = package_version(package) or "not there"
    return about


def _driver(index: int) -> str:
    """Return driver, clocks and power limit from nvidia-smi, if it is there."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown"
    query = [tool, f"--id={index}", f"--query-gpu={DRIVER}", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=20)
    return answer.stdout.strip() or "unknown"


# seconds of measuring a call, after warming up
SECONDS = 0.25
FEWEST, MOST, WARM_UPS = 3, 50, 3
# bytes of a buffer, larger than any cache of the device, that is read before every timed call:
# after a write, dirty lines would have to be written back while the call is timed
FLUSH_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Timing:
    """Microseconds of calls: their median, tenths from both ends; how many, and if by a graph."""

    us: float
    low: float
    high: float
    repeats: int
    graph: bool = False


def interleaved(
    works: Mapping[str, Work], device: torch.device, between: Work | None = None
) -> dict[str, Timing]:
    """Time calls in turn: ``FEWEST`` rounds at least, at most ``MOST`` in ``SECONDS`` a call.

    On a CPU one round, as a kernel that is interpreted takes a second. The first calls pay for
    memory and compilation untimed. ``between`` runs after every round, and changes what the time
    depends on: random numbers.
    """
    cuda = device.type == "cuda"
    with torch.inference_mode():
        for work in works.values():
            for _ in range(WARM_UPS if cuda else 1):
                work()
        graphs = {name: captured(work, device) if cuda else None for name, work in works.items()}
        clock = _by_events if cuda else _by_clock
        clocks = {name: clock(graphs[name] or work, device) for name, work in works.items()}
        rounds, until = 0, time.monotonic() + SECONDS * len(works)
        times: dict[str, list[float]] = {name: [] for name in works}
        while rounds < (FEWEST if cuda else 1) or (
            cuda and rounds < MOST and time.monotonic() < until
        ):
            for name, timed in clocks.items():
                times[name].append(timed())
            rounds += 1
            if between is not None:
                between()
    return {name: _timing(samples, graphs[name] is not None) for name, samples in times.items()}


def _timing(times: list[float], graph: bool) -> Timing:
    tenths = statistics.quantiles(times, n=10, method="inclusive") if len(times) > 1 else times
    return Timing(statistics.median(times), tenths[0], tenths[-1], len(times), graph)


def _by_clock(work: Work, device: torch.device) -> Callable[[], float]:
    def once() -> float:
        start = time.perf_counter()
        work()
        return 1e6 * (time.perf_counter() - start)

    return once


def _by_events(work: Work, device: torch.device) -> Callable[[], float]:
    flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.float32, device=device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def once() -> float:
        torch.amax(flush)  # also keeps the device busy while the call is being launched
        start.record()
        work()
        end.record()
        end.synchronize()
        return 1e3 * start.elapsed_time(end)

    return once


def captured(work: Work, device: torch.device) -> Work | None:
    """Return the replay of a CUDA graph of a call, None for one that waits for the device.

    Such a call is not captured to see it fail: what a failed capture holds is never freed.
    """
    if not never_waits(work, device):
        return None
    graph = Repeated(lambda end: work(), device)
    graph.prepare(0)
    return lambda: graph(0)


# one verification: the fused kernel, the torch path, and a copy of as many bytes, which is the
# floor: every logit must be read once, and next to nothing is written
LOSSLESS = "speculative"
POLICIES, VERIFIERS = (LOSSLESS, "cactus:delta=0.1", "band:price=1", "typical"), ("chain", "block")
# batch, drafted tokens, vocabulary; the most important shapes come first
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
TINY_SHAPES: list[Shape] = [(1, 2, 64), (2, 2, 64)]
# standard deviations of the target's logits, and of what the draft adds to them
SPREAD, STRAY = 3.0, 1.0
# place in a text's stream of random numbers at which a timed step begins
POSITION = 100


def verifications(bench: Bench) -> Iterator[Job]:
    """Yield the job of each row: a shape, policy and verifier."""
    make = lru_cache(maxsize=1)(lambda shape: Inputs(shape, bench.device, bench.seed))
    for shape in TINY_SHAPES if bench.tiny else SHAPES:
        for spec in POLICIES:
            for verifier in followers(spec, VERIFIERS):
                batch, width, vocab = shape
                name = f"{spec} by {verifier} at B = {batch}, K = {width}, V = {vocab:,}"
                yield name, partial(_verification, bench, make, shape, spec, verifier)


class Inputs:
    """Logits (B, K + 1, V) and (B, K, V), bfloat16 as models give them, and drafted tokens (B, K).

    Drafts are accepted about as often as usual ones are.
    """

    def __init__(self, shape: Shape, device: torch.device, seed: int) -> None:
        batch, width, vocab = self.shape = shape
        self.source = torch.Generator(device).manual_seed(seed)
        kind: dict[str, Any] = {"generator": self.source, "device": device}
        noise = [torch.randn(batch, width + more, vocab, dtype=torch.bfloat16, **kind)
                 for more in (1, 0)]  # fmt: skip
        self.target = SPREAD * noise[0]
        self.draft = self.target[:, :-1] + STRAY * noise[1]
        probs = self.draft.float().softmax(-1).flatten(0, 1)
        self.ids = torch.multinomial(probs, 1, generator=self.source).view(batch, width)
        # coins of the torch path, the last one of the token that follows; the kernels' places
        self.coins = torch.rand(batch, width + 1, dtype=torch.float64, **kind)
        self.positions = torch.full((batch,), POSITION, device=device)

    def advance(self) -> None:
        """Draw other random numbers in place: how much is read depends on what is accepted."""
        self.coins.uniform_(generator=self.source)
        self.positions.add_(self.ids.shape[1] + 1)

    @property
    def copy(self) -> Work:
        """Return a copy that moves as many bytes, read and written, as are read at the least."""
        count = sum(rows.numel() * rows.element_size() for rows in (self.target, self.draft))
        source = torch.zeros(count // 2, dtype=torch.int8, device=self.ids.device)
        sink = torch.empty_like(source)
        return lambda: sink.copy_(source)


def torch_step(policy: ct.Policy, verifier: str, inputs: Inputs) -> Work:
    """Return the path of one torch call after another: two softmaxes, then the verifier."""
    verify = ct.verify_block if verifier == "block" else ct.verify_chain
    coins = inputs.coins[:, :-1], inputs.coins[:, -1]

    def step() -> Any:
        q, p = inputs.target.float().softmax(-1), inputs.draft.float().softmax(-1)
        return verify(policy, q, p, inputs.ids, coins=coins, validate=False)

    return step


def fused_step(policy: ct.Policy, verifier: str, inputs: Inputs) -> Work | None:
    """Return one call of the fused kernel, in memory of its own; None where there is none.

    On a CPU kernels are there only while Triton interprets them.
    """
    ids = inputs.ids
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not has_kernel(policy, verifier) or not (ids.is_cuda or interpreted):
        return None
    batch, width, vocab = inputs.shape
    fixed = {
        "seeds": torch.arange(batch, device=ids.device),
        "positions": inputs.positions,
        "workspace": Workspace(batch, width, vocab, ids.device),
        "out": LogitsVerdict(ids.new_empty(batch, width + 1), ids.new_empty(batch)),
        "verifier": verifier,
    }
    return lambda: verify_logits(policy, inputs.target, inputs.draft, ids, **fixed)


def _verification(
    bench: Bench, make: Callable[[Shape], Inputs], shape: Shape, spec: str, verifier: str
) -> Row:
    policy, inputs = ct.policy(spec), make(shape)
    works = {"floor": inputs.copy, "torch": torch_step(policy, verifier, inputs)}
    kernel = fused_step(policy, verifier, inputs)
    works |= {} if kernel is None else {"kernel": kernel}
    timings = interleaved(works, bench.device, inputs.advance)
    names = dict(zip(("batch", "drafted", "vocabulary"), inputs.shape, strict=True))
    row: Row = {"policy": spec, "verifier": verifier, **names}
    for name in ("floor", "torch", "kernel"):
        timing = vars(timings[name]) if name in works else dict.fromkeys(vars(timings["torch"]))
        row |= {f"{name}_{part}": value for part, value in timing.items()}
    return row


# whole decodes: the shipped pair, inflated to real sizes, in the device's loop
# knob values that spend about 0.03, 0.07 and 0.14 nats a token on the shipped pair
PRICES, DELTAS = (1.5, 0.8, 0.5), (0.0003, 0.002, 0.01)
BANDS = [f"band:price={price}" for price in PRICES]
DECODED = [LOSSLESS, *(f"cactus:delta={delta}" for delta in DELTAS), *BANDS, "typical"]
TINY_DECODED = [LOSSLESS, "cactus:delta=0.01", BANDS[-1]]
WIDTHS, NEW_TOKENS = [4, 8], 128
TINY_WIDTHS, TINY_NEW_TOKENS = [2], 4
# target, batch size
SETUPS = (("8b", 1), ("8b", 8), ("14b", 1))
TINY_SETUPS = (("tiny", 2),)


def decodes(bench: Bench) -> Iterator[Job]:
    """Yield the job of each row: a pair, batch size, method and K; plain decoding comes first."""
    widths, specs = (TINY_WIDTHS, TINY_DECODED) if bench.tiny else (WIDTHS, DECODED)
    for target, batch in TINY_SETUPS if bench.tiny else SETUPS:
        for line in configs([PLAIN], specs, widths, [batch], VERIFIERS):
            yield (
                f"{line.key} at {target} + {DRAFTS[target]}",
                partial(_decode, bench, target, line),
            )


@lru_cache(maxsize=1)  # setups ask for a pair in turn, and a device may hold only one
def inflated(device: torch.device, target: str) -> Pair:
    """Return the shipped pair in named shapes: bfloat16 on a GPU, float32 on a CPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    pair = load_pair(PAIR / "target", PAIR / "draft")
    return inflate_pair(pair, target, dtype=dtype, device=device)


def _decode(bench: Bench, target: str, line: Config) -> Row:
    """Return the measurements of a line.

    Speed is of a decode without the meter, after one with it on the same seed, which so emitted the
    same tokens; loading and captures are not timed.
    """
    pair = inflated(bench.device, target)
    texts = itertools.cycle(load_prompts(PROMPTS, pair.tokenizer))
    ids, mask = left_padded(list(itertools.islice(texts, line.batch)), pair.target)
    shared: Row = {"attention_mask": mask, "seed": bench.seed, "device_loop": True}
    shared["max_new_tokens"] = TINY_NEW_TOKENS if bench.tiny else NEW_TOKENS
    drafted: Row = {"policy": line.method, "verifier": line.verifier}
    drafted["num_draft_tokens"] = line.width
    if line.method == PLAIN:
        metered, timed = (generate(pair.target, None, ids, **shared) for _ in range(2))
    else:
        metered, timed = (
            generate(pair.target, pair.draft, ids, meter=meter, **shared, **drafted)
            for meter in (True, False)
        )
    policy, knob = label(line.method)
    reading, tokens, seconds = metered.reading, timed.num_tokens, timed.seconds.total
    return {
        "target": target,
        "draft": DRAFTS[target],
        "batch": line.batch,
        "policy": policy,
        "knob": knob,
        "verifier": line.verifier,
        "num_draft_tokens": line.width,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "round_ms": 1e3 * seconds / timed.target_calls,
        "tokens_per_call": timed.reading.tokens_per_call,
        "accepted_per_call": timed.reading.accepted_per_call,
        "emitted_kl_per_token": (reading.emitted_divergence or 0.0) / tokens,
        "largest_row_kl": reading.largest_row_divergence,
        "loop": timed.loop,
    }


PARTS = {"verify": verifications, "decode": decodes}
COMPILED = "kernels"
