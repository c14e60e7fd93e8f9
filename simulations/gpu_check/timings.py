"""Time verifications, the passes of a round and whole decodes on a GPU, one job for each row.

Times are from the device's clock, from a call's first kernel to its last, with cold caches. A call
that never waits for the device is timed as a CUDA graph. Calls to compare are timed in turn.
"""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

import cactus_theory as ct
from cactus_theory.decoding import Pair, generate, load_pair
from cactus_theory.decoding.device.host_side import BUCKET
from cactus_theory.decoding.device.round import Repeated, StaticForward, never_waits
from cactus_theory.decoding.models import CachedModel
from cactus_theory.decoding.text import left_padded
from cactus_theory.kernels import LogitsVerdict, Workspace, has_kernel, verify_logits

from ..common.grid import PLAIN, label
from ..common.inputs import PAIR, PROMPTS, code_digest, load_prompts
from ..common.results import package_version

Row = dict[str, Any]
Work = Callable[[], Any]
# a measurement: its name, and the function that returns its row
Job = tuple[str, Callable[[], Row]]
# the files of the timed code, whose digest is recorded
SOURCE = ("cactus_theory/**/*.py", "simulations/gpu_check/*.py")
DRIVER = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit"


@dataclass(frozen=True)
class Bench:
    """The device of a piece, and the seed of its random numbers."""

    device: torch.device
    seed: int = 0

    @property
    def tiny(self) -> bool:
        return self.device.type == "cpu"


def facts(bench: Bench) -> dict[str, str]:
    """Return a description of the machine: names, versions, clocks; on a CPU, "rehearsal"."""
    about = {"device": "cpu (rehearsal)", "source": code_digest(*SOURCE)}
    if bench.device.type == "cuda":
        about["device"] = torch.cuda.get_device_name(bench.device)
        about |= {"cuda": str(torch.version.cuda), "driver": _driver(bench.device.index or 0)}
    for package in ("triton", "transformers"):
        about[package] = package_version(package) or "not there"
    return about


def _driver(index: int) -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown"
    query = [tool, f"--id={index}", f"--query-gpu={DRIVER}", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=20)
    return answer.stdout.strip() or "unknown"


# seconds of timing per call, after warming up; a call that takes longer is timed once
SECONDS = 0.25
FEWEST, MOST, WARM_UPS = 3, 50, 3
# bytes of a buffer, larger than any cache of the device, that is read before every timed call.
# Writing it would leave dirty cache lines, to be written back while the call is timed
FLUSH_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Timing:
    """Times of a call in µs: median, 10 % and 90 % quantiles, repeats, and whether by a graph."""

    us: float
    low: float
    high: float
    repeats: int
    graph: bool = False


def interleaved(
    works: Mapping[str, Work], device: torch.device, between: Work | None = None
) -> dict[str, Timing]:
    """Time calls in turn, each for ``SECONDS``, but ``FEWEST`` to ``MOST`` times.

    On a CPU each call is timed once, as an interpreted kernel takes a second. The first calls,
    which allocate memory and compile, are not timed. ``between`` runs after every turn, to change
    the random numbers that the time depends on.
    """
    cuda = device.type == "cuda"
    slow: dict[str, bool] = {}
    with torch.inference_mode():
        for name, work in works.items():
            work()
            slow[name] = cuda and _seconds(work, device) > SECONDS
            for _ in range(0 if slow[name] or not cuda else WARM_UPS - 2):
                work()
        short = {name: work for name, work in works.items() if cuda and not slow[name]}
        graphs = {name: captured(work, device) for name, work in short.items()}
        clock = _by_events if cuda else _by_clock
        clocks = {name: clock(graphs.get(name) or work, device) for name, work in works.items()}
        fewest = {name: 1 if slow[name] or not cuda else FEWEST for name in works}
        times: dict[str, list[float]] = {name: [] for name in works}
        spent = dict.fromkeys(works, 0.0)
        for _ in range(MOST):
            early = {name for name in works if cuda and spent[name] < SECONDS}
            now = [name for name in works if name in early or len(times[name]) < fewest[name]]
            for name in now:
                start = time.monotonic()
                times[name].append(clocks[name]())
                spent[name] += time.monotonic() - start
            if between is not None:
                between()
            if not now:
                break
    return {name: _timing(own, graphs.get(name) is not None) for name, own in times.items()}


def _timing(times: list[float], graph: bool) -> Timing:
    tenths = statistics.quantiles(times, n=10, method="inclusive") if len(times) > 1 else times
    return Timing(statistics.median(times), tenths[0], tenths[-1], len(times), graph)


def _seconds(work: Work, device: torch.device) -> float:
    torch.cuda.synchronize(device)
    start = time.monotonic()
    work()
    torch.cuda.synchronize(device)
    return time.monotonic() - start


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
        torch.amax(flush)  # also keeps the device busy while the CPU launches the call
        start.record()
        work()
        end.record()
        end.synchronize()
        return 1e3 * start.elapsed_time(end)

    return once


def captured(work: Work, device: torch.device) -> Work | None:
    """Return the replay of a call's CUDA graph, or None if the call waits for the device.

    Such a call is not tried, because memory of a failed capture is never freed.
    """
    if not never_waits(work, device):
        return None
    graph = Repeated(lambda end: work(), device)
    graph.prepare(0)
    return lambda: graph(0)


# one verification is timed as the fused kernel, as torch calls, beside a softmax of the target's
# rows, and beside a copy that moves as many bytes as the logits have. The copy is the floor: every
# logit must be read once, and almost nothing is written
LOSSLESS, BAND = "speculative", "band:price=1"
STEPS = (
    (LOSSLESS, "chain"), (LOSSLESS, "block"), (BAND, "chain"), (f"{BAND},per_row=True", "block"),
    ("cactus:delta=0.1", "chain"),
)  # fmt: skip
# batch, drafted tokens, vocabulary; the most important shapes come first
Shape = tuple[int, int, int]
LARGE = 151_936
SHAPES: list[Shape] = [(64, 8, LARGE), (1, 8, LARGE), (8, 8, LARGE)]
SHAPES += [(batch, 4, LARGE) for batch in (64, 1, 8)]
TINY_SHAPES: list[Shape] = [(1, 2, 64), (2, 2, 64)]
# standard deviations of the target's logits, and of the noise that makes the draft's logits
SPREAD, STRAY = 3.0, 1.0
# position in a text's stream of random numbers at which a timed step begins
POSITION = 100


def verifications(bench: Bench) -> Iterator[Job]:
    make = lru_cache(maxsize=1)(lambda shape: Inputs(shape, bench.device, bench.seed))
    for shape in TINY_SHAPES if bench.tiny else SHAPES:
        for spec, verifier in STEPS:
            batch, width, vocab = shape
            name = f"{spec} by {verifier} at B = {batch}, K = {width}, V = {vocab:,}"
            yield name, partial(_verification, bench, make, shape, spec, verifier)


class Inputs:
    """Random inputs of a verification: logits (B, K + 1, V) and (B, K, V), drafted tokens (B, K).

    Logits are bfloat16, as models give them; the acceptance is that of usual drafts.
    """

    def __init__(self, shape: Shape, device: torch.device, seed: int) -> None:
        batch, width, vocab = self.shape = shape
        self.source = torch.Generator(device).manual_seed(seed)
        kind: dict[str, Any] = {"generator": self.source, "device": device}
        noise = [
            torch.randn(batch, width + more, vocab, dtype=torch.bfloat16, **kind) for more in (1, 0)
        ]
        self.target = SPREAD * noise[0]
        self.draft = self.target[:, :-1] + STRAY * noise[1]
        probs = self.draft.float().softmax(-1).flatten(0, 1)
        self.ids = torch.multinomial(probs, 1, generator=self.source).view(batch, width)
        # coins of the torch path (the last draws the final token); kernels take positions instead
        self.coins = torch.rand(batch, width + 1, dtype=torch.float64, **kind)
        self.positions = torch.full((batch,), POSITION, device=device)

    def advance(self) -> None:
        """Draw new random numbers in place; accepted tokens decide how many rows are read."""
        self.coins.uniform_(generator=self.source)
        self.positions.add_(self.ids.shape[1] + 1)

    @property
    def copy(self) -> Work:
        """Return a copy whose bytes, read and written, are as many as those of the logits."""
        count = sum(rows.numel() * rows.element_size() for rows in (self.target, self.draft))
        source = torch.zeros(count // 2, dtype=torch.int8, device=self.ids.device)
        sink = torch.empty_like(source)
        return lambda: sink.copy_(source)


def torch_step(policy: ct.Policy, verifier: str, inputs: Inputs) -> Work:
    """Return the verification by single torch calls: two softmaxes, then the verifier."""
    verify = ct.verify_block if verifier == "block" else ct.verify_chain
    coins = inputs.coins[:, :-1], inputs.coins[:, -1]

    def step() -> Any:
        q, p = inputs.target.float().softmax(-1), inputs.draft.float().softmax(-1)
        return verify(policy, q, p, inputs.ids, coins=coins, validate=False)

    return step


def fused_step(policy: ct.Policy, verifier: str, inputs: Inputs) -> Work | None:
    """Return a call of the fused kernel with preallocated memory, or None without a kernel.

    On a CPU there are kernels only if Triton interprets them.
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
    works = {"floor": inputs.copy, "softmax": lambda: inputs.target.float().softmax(-1)}
    works["torch"] = torch_step(policy, verifier, inputs)
    kernel = fused_step(policy, verifier, inputs)
    works |= {} if kernel is None else {"kernel": kernel}
    timings = interleaved(works, bench.device, inputs.advance)
    names = dict(zip(("batch", "drafted", "vocabulary"), inputs.shape, strict=True))
    row: Row = {"policy": spec, "verifier": verifier, **names}
    for name in ("floor", "softmax", "torch", "kernel"):
        timing = vars(timings[name]) if name in works else dict.fromkeys(vars(timings["torch"]))
        row |= {f"{name}_{part}": value for part, value in timing.items()}
    return row


# whole decodes of the shipped pair, which is so small that the launching of kernels shows; the
# knobs spend about 0.05 nats per token on its rows
DECODED = (
    (PLAIN, "chain"), (LOSSLESS, "block"), ("lenience:lenience=0.57", "chain"),
    ("cactus:delta=0.0008", "chain"), ("band:price=1.05", "chain"),
    ("band:price=1.05,per_row=True", "block"),
)  # fmt: skip
WIDTH, NEW_TOKENS = 5, 64
TINY_WIDTH, TINY_NEW_TOKENS = 2, 4
BATCHES, TINY_BATCHES = (1, 16), (2,)
# methods that are also timed with rounds launched by the host, not only as one CUDA graph
BY_HOST = DECODED[:2]
LOOPS = {"graph": True, "host": False}


def decodes(bench: Bench) -> Iterator[Job]:
    """Yield the jobs: passes and methods in graphs for each batch, then some launched by the host.

    Only the smallest batch is metered, as measuring a band's row takes milliseconds.
    """
    batches = TINY_BATCHES if bench.tiny else BATCHES
    todo = [("graph", batch, DECODED) for batch in batches] + [("host", batches[0], BY_HOST)]
    for loop, batch, methods in todo:
        if loop == "graph":
            yield f"passes of a round, batch {batch}", partial(_passes, bench, batch)
        for spec, verifier in methods:
            what = f"{spec} by {verifier} in {loop}, batch {batch}"
            yield what, partial(_decode, bench, batch, spec, verifier, loop)


@lru_cache(maxsize=1)
def shipped(device: torch.device) -> Pair:
    """Return the shipped pair: bfloat16 on a GPU, float32 on a CPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return load_pair(PAIR / "target", PAIR / "draft", device, dtype)


def _names(batch: int, width: int | None) -> Row:
    names = {"target": "target", "draft": "draft", "batch": batch}
    return names | {"num_draft_tokens": width}


@lru_cache(maxsize=len(BATCHES))
def passes_ms(device: torch.device, batch: int, width: int) -> float:
    """Return the milliseconds of a round's forward passes alone, without draws or verification."""
    pair = shipped(device)
    models = [CachedModel(m, BUCKET, batch, fast_forward=True) for m in (pair.target, pair.draft)]
    score, propose = (StaticForward(model) for model in models)
    ids = torch.ones(batch, width + 1, dtype=torch.int64, device=device)
    places = torch.arange(width + 1, device=device).expand(batch, -1) + 16

    def passes() -> None:
        propose(ids[:, :2], places[:, :2] - 1, BUCKET, last=True)
        for step in range(1, width):
            propose(ids[:, step, None], places[:, step, None], BUCKET, last=True)
        score(ids, places, BUCKET)

    return interleaved({"passes": passes}, device)["passes"].us / 1e3


def _passes(bench: Bench, batch: int) -> Row:
    width = TINY_WIDTH if bench.tiny else WIDTH
    took = passes_ms(bench.device, batch, width)
    empty = dict.fromkeys(("policy", "knob", "verifier"))
    return _names(batch, width) | empty | _measured(round_ms=took, loop="passes alone")


def _measured(**values: Any) -> Row:
    names = (
        "tokens seconds tokens_per_second round_ms over_passes prefill_ms preparation_ms "
        "tokens_per_call accepted_per_call emitted_kl_per_token largest_row_kl loop"
    )
    return {name: values.get(name) for name in names.split()}


def _decode(bench: Bench, batch: int, spec: str, verifier: str, loop: str) -> Row:
    """Return the measurements of a decode; a round's time excludes the prompts' passes.

    Two decodes have the same seed and so the same tokens. The first one is metered at the smallest
    batch; the second one is timed, without the meter, loading and captures.
    """
    pair, width = shipped(bench.device), TINY_WIDTH if bench.tiny else WIDTH
    texts = itertools.cycle(load_prompts(PROMPTS, pair.tokenizer))
    ids, mask = left_padded(list(itertools.islice(texts, batch)), pair.target)
    shared: Row = {"attention_mask": mask, "seed": bench.seed, "device_loop": LOOPS[loop]}
    shared["max_new_tokens"] = TINY_NEW_TOKENS if bench.tiny else NEW_TOKENS
    shared["eos_token_ids"] = ()  # all texts have the full length
    draft = None if spec == PLAIN else pair.draft
    if draft is not None:
        shared |= {"policy": spec, "verifier": verifier, "num_draft_tokens": width}
    first = batch == (TINY_BATCHES if bench.tiny else BATCHES)[0]
    metered, timed = (
        generate(pair.target, draft, ids, meter=meter, **shared) for meter in (first, False)
    )
    policy, knob = label(spec)
    reading, tokens, seconds = metered.reading, timed.num_tokens, timed.seconds.total
    own = timed.seconds
    prefill_ms = 1e3 * (own.target + own.draft) if timed.loop.startswith("device") else None
    round_ms = (1e3 * seconds - (prefill_ms or 0.0)) / timed.target_calls
    passes = None if draft is None else passes_ms(bench.device, batch, width)
    names = _names(batch, None if draft is None else width)
    return names | {"policy": policy, "knob": knob, "verifier": verifier} | _measured(
        tokens=tokens, seconds=seconds, tokens_per_second=tokens / seconds, round_ms=round_ms,
        over_passes=passes and round_ms / passes, prefill_ms=prefill_ms,
        preparation_ms=1e3 * own.preparation, tokens_per_call=timed.reading.tokens_per_call,
        accepted_per_call=timed.reading.accepted_per_call,
        emitted_kl_per_token=(reading.emitted_divergence or 0.0) / tokens if first else None,
        largest_row_kl=reading.largest_row_divergence, loop=timed.loop,
    )  # fmt: skip
