"""Measure the finished pair, describe it in ``report.json`` and put it where users find it."""

import argparse
import json
import math
import platform
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import tokenizers
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer
from torch import Generator, Tensor
from transformers import LlamaForCausalLM

from ..common.inputs import load_model
from ..common.results import machine_kind, write_bytes, write_json
from . import heads
from .corpus import (
    Document,
    Stream,
    as_transformers,
    fingerprint,
    held_out,
    num_bytes,
    prefixes,
    sample,
)
from .train import MAX_POSITIONS, Outcome, num_parameters

# tokens that the texts begin with along which heads are measured
HEAD_PREFIX = 32
# draft passes timed with one target pass, about as in a decode
DRAFTS_PER_ROUND = 5


@dataclass(frozen=True)
class HeldOut:
    """Loss on unseen files; ``bits_per_byte`` counts end-of-text tokens but not their bytes."""

    nats_per_token: float
    bits_per_byte: float
    tokens: int


@dataclass(frozen=True)
class Overlap:
    """Mean over positions of the sum over tokens of min(q, p)."""

    mean: float
    positions: int
    sequences: int
    prefix_tokens: int


@dataclass(frozen=True)
class Cost:
    """Median milliseconds of one forward of one token with a cache, and their ratio."""

    target_ms: float
    draft_ms: float
    ratio: float


@torch.inference_mode()
def held_out_loss(
    model: LlamaForCausalLM, stream: Stream, size: int, context: int = 256
) -> HeldOut:
    """Score every token of the stream once, with between 256 and 511 tokens before it.

    Windows of 512 move by 256 and score their second half; the first one scores all.
    ``size`` is the length of the documents in bytes.
    """
    tokens = stream.tokens.long()
    total, count = 0.0, 0
    for end in range(context, len(tokens) - 1 + context, context):
        window = tokens[max(0, end - 2 * context) : end + 1]
        new = len(window) - 1 if end <= context else min(context, len(tokens) - 1 - end + context)
        logits = model(window[None, :-1], use_cache=False).logits[0, -new:]
        total += F.cross_entropy(logits, window[-new:], reduction="sum").item()
        count += new
    return HeldOut(total / count, total / math.log(2) / size, count)


@torch.inference_mode()
def overlap(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    stream: Stream,
    *,
    rows: int,
    length: int,
    seed: int,
    prefix_tokens: int = 32,
) -> Overlap:
    """Average the overlap of q and p over the target's continuations of held-out prefixes."""
    generator = Generator().manual_seed(seed)
    values: list[Tensor] = []
    for _ in range(0, rows, 32):
        prefix = prefixes(stream, 32, prefix_tokens, generator)
        context = sample(target, prefix, length, generator)[:, :-1]
        q, p = (m(context, use_cache=False).logits.softmax(-1) for m in (target, draft))
        values.append(torch.minimum(q, p).sum(-1)[:, prefix_tokens - 1 :].flatten())
    overlaps = torch.cat(values)
    return Overlap(overlaps.double().mean().item(), len(overlaps), len(values) * 32, prefix_tokens)


@torch.inference_mode()
def forward_cost(target: LlamaForCausalLM, draft: LlamaForCausalLM, rounds: int = 60) -> Cost:
    """Time rounds of five draft forwards and one target forward, as a decode loop runs them.

    One row, one new token, 64 to 400 tokens in the cache.
    """
    models = {"target": target, "draft": draft}
    prompt = torch.full((1, 64), 5)
    caches = {k: m(prompt, use_cache=True).past_key_values for k, m in models.items()}
    milliseconds: dict[str, list[float]] = {"target": [], "draft": []}
    for _ in range(rounds):
        for name in ["draft"] * DRAFTS_PER_ROUND + ["target"]:
            start = time.perf_counter()
            models[name](prompt[:, :1], past_key_values=caches[name], use_cache=True)
            milliseconds[name].append(1e3 * (time.perf_counter() - start))
    cost = {name: median(times) for name, times in milliseconds.items()}
    return Cost(cost["target"], cost["draft"], cost["draft"] / cost["target"])


MODELS = ("target", "draft")
LICENCE = (
    "Trained on the Python standard library, which is under the Python Software Foundation "
    "licence; the weights and the tokenizer are ours, under the licence of this repository."
)
SAMPLE_PROMPT = 'def read_settings(path, encoding=None):\n    """Return'


def add_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Save the tokenizer, the same for both models, in each model's folder."""
    for name in MODELS:
        as_transformers(tokenizer, MAX_POSITIONS).save_pretrained(folder / name)


def write_report(
    args: argparse.Namespace,
    command: str,
    folder: Path,
    documents: list[Document],
    unseen: Stream,
    outcomes: dict[str, Outcome],
) -> None:
    """Measure the stored weights and write ``report.json``."""
    target, draft = (load_model(folder / name) for name in MODELS)
    size = num_bytes(held_out(documents))
    shared = overlap(
        target, draft, unseen, rows=args.overlap_rows, length=args.length, seed=args.seed + 7
    )
    report = {
        "command": command,
        "date": datetime.now(UTC).date().isoformat(),
        "held_out": {
            name: asdict(held_out_loss(model, unseen, size))
            for name, model in zip(MODELS, (target, draft), strict=True)
        },
        "overlap_on_target_samples": asdict(shared),
        "forward_cost": asdict(forward_cost(target, draft)),
        "parameters": {"target": num_parameters(target), "draft": num_parameters(draft)},
        "training": {name: asdict(outcome) for name, outcome in outcomes.items()},
        "corpus": describe_corpus(documents, unseen),
        "sample": {"prompt": SAMPLE_PROMPT, "target": continuation(target, folder / "target")},
        "versions": versions(),
        "machine": machine_kind(),
        "precision": {"training": args.precision, "stored": "float16", "measured": "float32"},
        "licence": LICENCE,
    }
    write_json(folder / "report.json", report)


def tokenizer_of(folder: Path) -> Tokenizer:
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"--target must be a model's folder with a tokenizer.json, got {folder}")
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def write_head_report(
    args: argparse.Namespace,
    command: str,
    target: LlamaForCausalLM,
    documents: list[Document],
    unseen: Stream,
    outcomes: dict[str, Outcome],
) -> dict:
    """Measure the stored head along the target's own unseen texts; write ``report.json``."""
    folder = args.work_dir / "head"
    head = heads.HEADS[args.drafter].load(folder)
    generator = Generator().manual_seed(args.seed + 7)
    prefix = prefixes(unseen, args.overlap_rows, HEAD_PREFIX, generator)
    texts = sample(target, prefix, args.length + 1, generator)
    report = {
        "command": command,
        "date": datetime.now(UTC).date().isoformat(),
        "overlap_by_place": heads.overlaps(head, target, texts, args.anchors, args.seed + 8),
        "parameters": num_parameters(head),
        "seed": args.seed,
        "reads": list(head.shape.reads),
        "training": {name: asdict(outcome) for name, outcome in outcomes.items()},
        "corpus": describe_corpus(documents, unseen),
        "versions": versions(),
        "machine": machine_kind(),
        "licence": LICENCE,
    }
    write_json(folder / "report.json", report)
    return report


def describe_corpus(documents: list[Document], unseen: Stream) -> dict:
    """Return what identifies the text and its held-out part."""
    return {
        "source": "Python standard library, .py files without tests and generated tables",
        "files": len(documents),
        "bytes": num_bytes(documents),
        "held_out_files": len(held_out(documents)),
        "held_out_bytes": num_bytes(held_out(documents)),
        "held_out_tokens": len(unseen.tokens) - 1,
        "sha256": fingerprint(documents),
    }


def continuation(model, folder: Path, length: int = 160) -> str:
    """Return the model's own continuation of a fixed prompt at temperature 1."""
    tokenizer = tokenizer_of(folder)
    prompt = torch.tensor([tokenizer.encode(SAMPLE_PROMPT).ids])
    row = sample(model, prompt, prompt.shape[1] + length, Generator().manual_seed(1))[0]
    return tokenizer.decode(row[prompt.shape[1] :].tolist(), skip_special_tokens=False)


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
    }


def publish(finished: Path, out: Path) -> None:
    """Copy the finished pair over ``out``, each file whole or not at all; remove stale ones."""
    files = {p.relative_to(finished) for p in finished.rglob("*") if p.is_file()}
    for name in MODELS:
        for stale in (out / name).glob("*"):
            if stale.relative_to(out) not in files:
                stale.unlink()
    for relative in sorted(files):
        write_bytes(out / relative, (finished / relative).read_bytes())


def summary(out: Path) -> dict:
    """Return the headline numbers of a shipped pair."""
    report = json.loads((out / "report.json").read_text())
    keys = ("held_out", "overlap_on_target_samples", "forward_cost", "parameters")
    size = sum(p.stat().st_size for p in out.rglob("*") if p.is_file())
    return {key: report[key] for key in keys} | {"megabytes": round(size / 1e6, 2)}
